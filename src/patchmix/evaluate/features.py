"""Features of a set of images: computed in one pass over all processes, kept on disk, or written to a file.

Shapes: N images of the source that can be decoded, D = the encoder's width.
"""

import contextlib
import csv
import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from patchmix import distributed
from patchmix.data.contract import Source
from patchmix.data.loader import one_pass
from patchmix.data.sources import open_source
from patchmix.data.views import CenterCrop, to_float
from patchmix.device import resolve_device
from patchmix.files import cache_folder, prune, replacing, writing
from patchmix.interop.backbone import Backbone, Pool, pooled
from patchmix.interop.loading import load_backbone
from patchmix.progress import progress_bar
from patchmix.settings import Embed

LAYERS: dict[str, str] = {
    "token": "class token after the last norm",
    "mean": "mean of the patch tokens after the last norm",
}
SMALL_IMAGES = 64  # up to here images are evaluated whole, above with the usual margin of 8/7 (256 → 224)
KEPT_BYTES = 10 * 2**30  # of all features on disk together; beyond that, those unused for longest go
_VERSION = 1  # part of every key: raise it when the same arguments give other features


@dataclass(frozen=True)
class Features:
    """An encoder's output for a source, in the source's order."""

    vectors: Tensor  # (N, D), float32, on the CPU
    labels: Tensor | None  # (N,)
    indices: Tensor  # (N,), positions in the source

    def at(self, positions: npt.NDArray[np.int64]) -> "Features":
        """Those of some of the source's images."""
        rows = torch.isin(self.indices, torch.from_numpy(positions))
        return Features(self.vectors[rows], None if self.labels is None else self.labels[rows], self.indices[rows])

    @staticmethod
    def of(source: Source, vectors: Tensor, indices: Tensor) -> "Features":
        return Features(vectors, None if source.labels is None else torch.from_numpy(source.labels)[indices], indices)


@dataclass
class FeatureExtractor:
    """Features of sources by one encoder, computed, or loaded where an earlier evaluation kept them on disk."""

    backbone: Backbone
    device: torch.device
    pool: Pool = "token"
    resize: int | None = None  # shorter side before the center crop; None: `usual_resize` of the encoder's image size
    workers: int = 0
    batch_size: int = 256
    cache: bool = True

    def __post_init__(self) -> None:
        self.image_size = self.backbone.architecture.image_size
        self.resize = self.resize or usual_resize(self.image_size)
        self._digest = self.backbone.digest()

    def record(self) -> dict[str, Any]:
        """What a result says about how images became features."""
        return {"layer": LAYERS[self.pool], "image_size": self.image_size, "resize": self.resize}

    def features(self, source: Source) -> Features:
        """(N, D) features with labels, in the source's order, on every process."""
        how: dict[str, Any] = {"image_size": self.image_size, "resize": self.resize, "pool": self.pool}
        how |= {"mean": self.backbone.mean, "std": self.backbone.std}
        # the number of heads shows in the architecture, but in no weight
        origin = [_VERSION, self._digest, repr(self.backbone.architecture), source.fingerprint()]
        key = hashlib.sha256(json.dumps([*origin, how], sort_keys=True).encode()).hexdigest()[:40]
        path = cache_folder("features") / f"{key}.safetensors"
        kept = _load(path, source) if self.cache else None
        # All processes read, or all compute: a home folder need not be shared between machines.
        if not distributed.any_process(kept is None, self.device):
            assert kept is not None
            return kept
        encoder = self.backbone.encoder().to(self.device)
        work: dict[str, Any] = {"device": self.device, "batch_size": self.batch_size, "workers": self.workers}
        features = extract(encoder, source, **how, **work, progress=True)
        check_finite(features.vectors, source.name)
        if self.cache and distributed.is_main():
            _keep(path, features)
        return features


@torch.inference_mode()
def extract(
    encoder: nn.Module,
    source: Source,
    *,
    image_size: int,
    resize: int | None = None,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
    pool: str = "token",
    batch_size: int = 256,
    workers: int = 0,
    progress: bool = False,
) -> Features:
    """One pass over the source, whose images are resized on their shorter side and center-cropped.

    Under torchrun every process must call this: each takes a part, and each gets the features of all, in the source's
    order. `encoder` is on `device` and keeps its mode. Images that can't be decoded are left out.
    """
    if pool not in LAYERS:
        raise ValueError(f"pool is {pool!r}; it must be token (class token) or mean (of the patch tokens)")
    world_size = distributed.world_size()
    share = {"rank": distributed.rank(), "world_size": world_size, "batch_size": batch_size, "workers": workers}
    vectors, indices = [torch.empty(0, 0)], [torch.empty(0, dtype=torch.int64)]
    was_training = encoder.training
    encoder.eval()
    try:
        part = -(-len(source) // world_size)
        with progress_bar(f"features of {source.name}", part, progress and distributed.is_main()) as advance:
            for batch in one_pass(source, CenterCrop(image_size, resize=resize), **share):
                if len(batch.indices):
                    images = to_float(batch.views[0].to(device, non_blocking=True), mean, std)
                    vectors.append(pooled(encoder, images, pool).float().cpu())
                    indices.append(batch.indices)
                advance(len(batch.indices) + len(batch.bad))
    finally:
        encoder.train(was_training)
    every = torch.cat(distributed.gather_rows(torch.cat(indices), device))
    if not len(every):
        raise ValueError(f"{source.name} has no image that can be decoded; check its files")
    return Features.of(source, torch.cat(distributed.gather_rows(torch.cat(vectors[1:] or vectors), device)), every)


def usual_resize(image_size: int) -> int:
    """The shorter side before the center crop: small images are taken whole, larger ones with ImageNet's margin."""
    return image_size if image_size <= SMALL_IMAGES else round(image_size * 256 / 224)


def check_finite(vectors: Tensor, whose: str) -> None:
    """A ValueError where a feature is NaN or infinite: its similarities would mean nothing."""
    if bool(torch.isfinite(vectors.sum(dtype=torch.float64))):  # one number that is not would show in the sum
        return
    finite = torch.isfinite(vectors).all(dim=1)
    if not bool(finite.all()):
        rows = finite.logical_not().nonzero().flatten()
        raise ValueError(
            f"{whose}: the features of {len(rows)} of {len(vectors)} images are NaN or infinite (the first: image "
            f"{int(rows[0])}); the encoder's weights are broken, take an earlier checkpoint"
        )


# -------------------------------------------------------------------------------------------------- features on disk


def _keep(path: Path, features: Features) -> None:
    try:
        with replacing(path) as temporary:
            save_file({"vectors": features.vectors, "indices": features.indices}, temporary)
        prune(path.parent, KEPT_BYTES, keep=path)
    except OSError as error:  # a full disk or a read-only home must not stop the evaluation
        warnings.warn(f"features are not kept: {path.parent} can't be written ({error.strerror})", stacklevel=2)


def _load(path: Path, source: Source) -> Features | None:
    """What `_keep` wrote, or None where it is missing or incomplete."""
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError):
        return None
    with contextlib.suppress(OSError):  # a cache that others own
        os.utime(path)  # used now
    return Features.of(source, **tensors)


# ------------------------------------------------------------------------------------------------------ patchmix embed


def embed(settings: Embed) -> list[Path]:
    """Writes path, label where there is one, and vector of every image that can be decoded; returns the files."""
    out = settings.out
    if out.suffix not in (".parquet", ".npy"):
        raise ValueError(f"{out} must end in .parquet or .npy")
    device = resolve_device(settings.device)
    with distributed.process_group(device):
        source = open_source(settings.data, settings.split, class_folders=True)
        backbone = load_backbone(settings.weights, encoder=settings.encoder)
        extractor = FeatureExtractor(backbone, device, settings.pool, settings.resize, settings.workers)
        features = extractor.features(source)
    if not distributed.is_main():
        return []
    columns: dict[str, list[Any]] = {"path": [source.key(int(i)) for i in features.indices]}
    if features.labels is not None:
        columns["label"] = features.labels.tolist()
    vectors = features.vectors.numpy()
    with writing(out) as file:
        if out.suffix == ".parquet":
            column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
            pq.write_table(pa.table({**columns, "vector": column}), file)
            return [out]
        np.save(file, vectors)
    table = out.with_suffix(".csv")
    with replacing(table) as path, path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as lines:
        csv.writer(lines).writerows([columns, *zip(*columns.values(), strict=True)])
    return [out, table]
