"""Features of a set of images: computed in one pass over all processes, kept on disk, or written to a file.

Shapes: N images of the source that can be decoded, of T patches; D = the encoder's width.
"""

import contextlib
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
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from patchmix import distributed
from patchmix.data.contract import Source
from patchmix.data.loader import one_pass
from patchmix.data.sources import open_source
from patchmix.data.views import CenterCrop, as_channels, to_float, usual_resize
from patchmix.device import resolve_device
from patchmix.files import cache_folder, prune, replacing, writing
from patchmix.interop.backbone import Backbone, pooled
from patchmix.interop.loading import load_backbone
from patchmix.progress import progress_bar
from patchmix.settings import Embed

PIXELS = 16  # side of the images whose pixels are features, for comparison
LAYERS: dict[str, str] = {
    "token": "class token after the last norm",
    "mean": "mean of the patch tokens after the last norm",
    "patches": "patch tokens after the last norm",
    "pixels": f"pixels at {PIXELS} px",
}
KEPT_BYTES = 10 * 2**30  # of all features on disk together; beyond that, those unused for longest go
MOST_BYTES = 8 * 2**30  # of patch tokens that may be held in memory
_VERSION = 2  # part of every key: raise it when the same arguments give other features


@dataclass(frozen=True)
class Features:
    """An encoder's output for a source, in the source's order."""

    vectors: Tensor  # (N, D), float32, on the CPU; patch tokens: (N, T, D), float16
    labels: Tensor | None  # (N,)
    indices: Tensor  # (N,), positions in the source

    def at(self, positions: npt.NDArray[np.int64]) -> "Features":
        """Those of some of the source's images."""
        rows = torch.isin(self.indices, torch.from_numpy(positions))
        if bool(rows.all()):
            return self
        return Features(self.vectors[rows], None if self.labels is None else self.labels[rows], self.indices[rows])

    @staticmethod
    def of(source: Source, vectors: Tensor, indices: Tensor) -> "Features":
        labels = None if source.labels is None else torch.from_numpy(source.labels[indices.numpy()])
        return Features(vectors, labels, indices)


@dataclass
class FeatureExtractor:
    """Features of sources by one encoder, computed, or loaded where an earlier evaluation kept them on disk."""

    backbone: Backbone
    device: torch.device
    pool: str = "token"  # one of LAYERS
    resize: int | None = None  # shorter side before the center crop; None: `usual_resize` of the encoder's image size
    workers: int = 0
    cache: bool = True
    memory: dict[Path, Features] | None = None  # features that several evaluations share, besides those on disk

    def __post_init__(self) -> None:
        self.image_size = self.backbone.architecture.image_size
        self.resize = self.resize or usual_resize(self.image_size)
        self._digest = self.backbone.digest()

    def how(self) -> dict[str, Any]:
        """How `extract` is to prepare images."""
        normalization = {"mean": [*self.backbone.mean], "std": [*self.backbone.std]}
        return {"image_size": self.image_size, "resize": self.resize, **normalization}

    def record(self) -> dict[str, Any]:
        """What a result says about how images became features, besides the weights."""
        heads = {} if self.pool == "pixels" else {"heads": self.backbone.architecture.heads}
        return {"layer": LAYERS[self.pool], **self.how(), **heads}

    def features(self, source: Source) -> Features:
        """(N, D) features with labels, in the source's order, on every process."""
        return self.all_features(source, [self.pool])[self.pool]

    def patch_bytes(self, source: Source) -> int:
        """What the patch tokens of all images need in memory."""
        return 2 * len(source) * self.backbone.architecture.patches * self.backbone.architecture.dim

    def all_features(self, source: Source, pools: Sequence[str]) -> dict[str, Features]:
        """Features of several pools (see `pooled_all`): those that are not stored are computed in one pass."""
        if "patches" in pools and (size := self.patch_bytes(source)) > MOST_BYTES:
            raise ValueError(
                f"the patch tokens of the {len(source):,} images of {source.name} take {size / 2**30:.0f} GB, at most "
                f"{MOST_BYTES >> 30} GB are held; give fewer images, or use --pool mean"
            )
        paths, found = {}, dict[str, Features]()
        for pool in pools:
            # The number of heads shows in the architecture, but in no weight.
            whose = [] if pool == "pixels" else [self._digest, repr(self.backbone.architecture)]
            key = [_VERSION, *whose, source.fingerprint(), self.how() | {"pool": pool}]
            digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
            paths[pool] = cache_folder("features") / f"{digest[:40]}.safetensors"
            kept = (self.memory or {}).get(paths[pool]) or (_load(paths[pool]) if self.cache else None)
            # All processes read, or all compute: a home folder need not be shared between machines.
            if not distributed.any_process(kept is None, self.device):
                assert kept is not None
                found[pool] = Features.of(source, kept.vectors, kept.indices)  # others may know no labels
        if missing := [pool for pool in pools if pool not in found]:
            encoder = self.backbone.encoder().to(self.device)
            how: dict[str, Any] = {**self.how(), "device": self.device, "workers": self.workers, "progress": True}
            for pool, features in extract_all(encoder, source, missing, **how).items():
                check_finite(features.vectors, source.name)
                if self.cache and distributed.is_main():
                    _keep(paths[pool], features)
                found[pool] = features
        if self.memory is not None:
            self.memory |= {paths[pool]: features for pool, features in found.items()}
        return found


def extract(encoder: nn.Module, source: Source, *, pool: str = "token", **how: Any) -> Features:
    """`extract_all` of one pool."""
    return extract_all(encoder, source, [pool], **how)[pool]


@torch.inference_mode()
def extract_all(
    encoder: nn.Module,
    source: Source,
    pools: Sequence[str],
    *,
    image_size: int,
    resize: int | None = None,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
    batch_size: int = 256,
    workers: int = 0,
    progress: bool = False,
) -> dict[str, Features]:
    """Features of each pool by one pass over the source, resized on the shorter side and center-cropped.

    Under torchrun every process must call this: each takes a part, and each gets the features of all, in the source's
    order. `encoder` is on `device` and keeps its mode. Images that can't be decoded are left out.
    """
    world_size = distributed.world_size()
    share = {"rank": distributed.rank(), "world_size": world_size, "batch_size": batch_size, "workers": workers}
    vectors: dict[str, list[Tensor]] = {pool: [] for pool in pools}
    indices = [torch.empty(0, dtype=torch.int64)]
    bad: tuple[str, ...] = ()
    was_training = encoder.training
    encoder.eval()
    try:
        part = -(-len(source) // world_size)
        with progress_bar(f"features of {source.name}", part, progress) as advance:
            for batch in one_pass(source, CenterCrop(image_size, resize=resize), **share):
                if len(batch.indices):
                    images = to_float(batch.views[0].to(device, non_blocking=True), mean, std)
                    for pool, features in pooled_all(encoder, images, pools).items():
                        vectors[pool].append((features.half() if pool == "patches" else features.float()).cpu())
                    indices.append(batch.indices)
                bad = bad or batch.bad
                advance(len(batch.indices) + len(batch.bad))
    finally:
        encoder.train(was_training)
    every = torch.cat(distributed.gather_rows(torch.cat(indices), device))
    if not len(every):
        raise ValueError(f"{source.name} has no image that can be decoded; check its files{bad and f': {bad[0]}'}")
    found = {}
    for pool, parts in vectors.items():
        empty = torch.empty(0, 0, 0, dtype=torch.float16) if pool == "patches" else torch.empty(0, 0)
        rows = distributed.gather_rows(torch.cat(parts or [empty]), device)
        parts.clear()
        found[pool] = Features.of(source, torch.cat(rows), every)
    return found


def pooled_all(encoder: nn.Module, images: Tensor, pools: Sequence[str]) -> dict[str, Tensor]:
    """(N, 3, H, W) → for each pool (N, D), or (N, T, D) for "patches", in one pass of the encoder.

    "token-3" and "mean-3" are those after block 3 (1 is the first) and the encoder's last norm; "pixels" need no pass.
    "token" is what the encoder returns: some of timm's models pool otherwise.
    """
    found = {"pixels": F.interpolate(images, PIXELS, mode="area").flatten(1)} if "pixels" in pools else {}
    if len(rest := [pool for pool in pools if pool != "pixels"]) == 1 and rest[0] in ("token", "mean"):
        return found | {rest[0]: pooled(encoder, images, rest[0])}
    if not rest:
        return found
    vit: Any = encoder
    images = as_channels(images, int(vit.patch_embed.proj.in_channels))
    if any(pool.startswith("token-") for pool in rest) and vit.cls_token is None:
        raise ValueError("the encoder has no class token in its blocks; use --pool mean")
    blocks = {pool: int(pool.partition("-")[2] or len(vit.blocks)) for pool in rest}
    wanted = sorted(set(blocks.values()))
    how = {"return_prefix_tokens": True, "norm": True, "output_fmt": "NLC"}
    last, outputs = vit.forward_intermediates(images, indices=[block - 1 for block in wanted], **how)
    after = dict(zip(wanted, outputs, strict=True))
    for pool, block in blocks.items():
        # Patch tokens (N, T, D) and prefix tokens (N, …, D), of which there may be none.
        patches, prefix = after[block] if vit.num_prefix_tokens else (after[block], after[block][:, :0])
        if pool == "token":
            found[pool] = vit.forward_head(last)
        else:
            found[pool] = patches if pool == "patches" else patches.mean(dim=1) if "mean" in pool else prefix[:, 0]
    return found


def check_finite(vectors: Tensor, whose: str) -> None:
    """A ValueError where a feature is NaN or infinite: its similarities would mean nothing."""
    if not bool(torch.isfinite(vectors.sum(dtype=torch.float64))):  # one number that is not shows in the sum
        rows = torch.isfinite(vectors).flatten(1).all(dim=1).logical_not().nonzero().flatten()
        raise ValueError(
            f"{whose}: the features of {len(rows)} of {len(vectors)} images are NaN or infinite (the first: image "
            f"{int(rows[0])}); the encoder's weights are broken, use an earlier checkpoint"
        )


def _keep(path: Path, features: Features) -> None:
    try:
        with replacing(path) as temporary:
            save_file({"vectors": features.vectors, "indices": features.indices}, temporary)
        prune(path.parent, KEPT_BYTES, keep=path)
    except OSError as error:  # a full disk or a read-only home must not stop the evaluation
        warnings.warn(f"features are not kept: {path.parent} can't be written ({error.strerror})", stacklevel=2)


def _load(path: Path) -> Features | None:
    """What `_keep` wrote, without labels, or None where it is missing or incomplete."""
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError):
        return None
    with contextlib.suppress(OSError):  # a cache that others own
        os.utime(path)  # used now
    return Features(**tensors, labels=None)


def embed(settings: Embed) -> list[Path]:
    """Writes path, label where there is one, and vector of every image that can be decoded; returns the file."""
    out = settings.out
    if out.suffix != ".parquet":
        raise ValueError(f"{out} must end in .parquet")
    device = resolve_device(settings.device)
    with distributed.process_group(device):
        backbone = load_backbone(settings.weights, encoder=settings.encoder)
        how: dict[str, Any] = {"cache_bytes": 0, "in_chans": backbone.architecture.in_chans}  # one pass, or none
        source = open_source(settings.data, settings.split, class_folders=True, **how)
        extractor = FeatureExtractor(backbone, device, settings.pool, settings.resize, settings.workers)
        features = extractor.features(source)
    if not distributed.is_main():
        return []
    columns: dict[str, Any] = {"path": [source.key(int(i)) for i in features.indices]}
    if features.labels is not None:
        columns["label"] = features.labels.tolist()
    vectors = features.vectors.numpy()
    columns["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    with writing(out) as file:
        pq.write_table(pa.table(columns), file)
    return [out]
