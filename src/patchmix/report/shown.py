"""Images as an encoder sees them and as a page shows them, and their features, for figures and the report."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from patchmix.data.contract import Source, Split
from patchmix.data.decode import DecodeError, Pixels, decode
from patchmix.data.sources import has_split, open_source
from patchmix.data.views import CenterCrop
from patchmix.device import resolve_device
from patchmix.evaluate.features import FeatureExtractor, Features, usual_resize
from patchmix.evaluate.labeled import Subset
from patchmix.interop.backbone import Backbone
from patchmix.interop.loading import load_backbone


class Pictures:
    """Some image files as a source, without labels."""

    name = "pictures"
    labels = None
    classes = None

    def __init__(self, files: Sequence[Path]) -> None:
        missing = [file for file in files if not file.is_file()]
        if missing:
            raise ValueError(f"there is no image {missing[0]}; give image files")
        self._files = list(files)

    def __len__(self) -> int:
        return len(self._files)

    def load(self, index: int) -> Pixels:
        return decode(self._files[index].read_bytes(), self.key(index))

    def key(self, index: int) -> str:
        return str(self._files[index])

    def fingerprint(self) -> str:
        sizes = [f"{file.name} {file.stat().st_size}" for file in self._files]
        return hashlib.sha256("\n".join(sizes).encode()).hexdigest()[:32]


def open_shown(data: str | Path | Sequence[Path], limit: int | None = None) -> Source:
    """The test images of `data`, or the training images where there are no others; with labels where it has them.

    data: what `pretrain` takes, or a list of image files. limit: at most so many, spread evenly over the set.
    """
    if not isinstance(data, str | Path):
        return Pictures(data)
    split: Split = "test" if has_split(data, "test") else "train"
    try:
        source = open_source(data, split, class_folders=True, cache_bytes=0, progress=False)
    except ValueError:
        source = open_source(data, split, cache_bytes=0, progress=False)  # a folder with images beside its sub-folders
    if limit is None or limit >= len(source):
        return source
    if limit < 1:
        raise ValueError(f"{limit} images are asked for; take at least 1")
    return Subset(source, limit)


def crop(source: Source, index: int, size: int) -> np.ndarray:
    """The central square of an image as evaluation takes it, uint8 (size, size, 3)."""
    (crops,) = CenterCrop(size, resize=usual_resize(size))([source.load(index)], epoch=0, indices=np.array([index]))
    square: np.ndarray = crops[0]
    return square


def crops(source: Source, positions: Sequence[int], size: int) -> dict[int, np.ndarray]:
    """By position; a grey square stands for an image that can't be decoded."""
    out = {}
    for position in positions:
        try:
            out[position] = crop(source, position, size)
        except DecodeError:
            out[position] = np.full((size, size, 3), 128, np.uint8)
    return out


@dataclass(frozen=True)
class Viewed:
    """A set of images and what each of several encoders makes of it. Rows are the images that all could decode."""

    source: Source
    positions: list[int]  # of the rows in the source
    labels: Tensor | None  # (N,)
    vectors: list[Tensor]  # (N, D) for each encoder

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self.source.classes


def view(
    source: Source, backbones: Sequence[Backbone], *, device: str = "auto", workers: int = 0, cache: bool = True
) -> Viewed:
    """The features of all images of `source`, as kNN extracts them (and its store, with `cache`)."""
    target = resolve_device(device)
    found: list[Features] = []
    for backbone in backbones:
        pool = "mean" if backbone.encoder().cls_token is None else "token"
        extractor = FeatureExtractor(backbone, device=target, pool=pool, workers=workers, cache=cache)  # type: ignore[arg-type]
        found.append(extractor.features(source))
    indices = found[0].indices
    return Viewed(source, indices.tolist(), found[0].labels, [features.vectors for features in found])


def load_all(runs: Sequence[str | Path]) -> list[Backbone]:
    """The encoders of runs, files or `timm:NAME`, with names that tell them apart."""
    if not runs:
        raise ValueError("there is no run to show; give at least one run's folder")
    backbones = [load_backbone(run) for run in runs]
    names = unique_names([backbone.name for backbone in backbones])
    return [dataclasses.replace(backbone, name=name) for backbone, name in zip(backbones, names, strict=True)]


def unique_names(names: Sequence[str]) -> list[str]:
    """The same names, numbered where one occurs twice."""
    return [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]


def check_positions(positions: Sequence[int], source: Source, what: str) -> None:
    for position in positions:
        if not 0 <= position < len(source):
            raise ValueError(f"{what} {position} is not among the {len(source)} images of {source.name}, 0 …")


def spread(count: int, wanted: int) -> list[int]:
    """`wanted` of `count` positions, evenly spread."""
    return torch.linspace(0, count - 1, min(wanted, count)).round().int().tolist()
