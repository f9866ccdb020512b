"""The images of figures and reports: as files and thumbnails, and as features of one or several encoders."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchmix.data.contract import Source, Split
from patchmix.data.decode import pixel_channels, to_picture
from patchmix.data.folder import FolderSource
from patchmix.data.sources import has_split, open_source
from patchmix.data.views import CenterCrop, usual_resize
from patchmix.device import resolve_device
from patchmix.evaluate.features import FeatureExtractor
from patchmix.evaluate.labeled import Subset
from patchmix.interop.backbone import Backbone
from patchmix.interop.loading import load_backbone


def open_images(data: str | Path | Sequence[Path], limit: int | None = None, *, in_chans: int = 3) -> Source:
    """The test images of `data`, or its training images where it has no others; with labels where it has them.

    data: what `pretrain` takes, or a list of image files. limit: at most this many, spread evenly over the set.
    """
    if not isinstance(data, str | Path):
        if missing := [file for file in data if not Path(file).is_file()]:
            raise ValueError(f"there is no image {missing[0]}; give image files")
        files = FolderSource(Path(), name="files", files=data)
        files.channels = pixel_channels(in_chans)
        return files
    split: Split = "test" if has_split(data, "test") else "train"
    source = open_source(data, split, class_folders=True, cache_bytes=0, in_chans=in_chans)
    return source if limit is None or limit >= len(source) else Subset(source, limit)


def center_crop(source: Source, position: int, size: int) -> np.ndarray:
    """What evaluation takes of an image: (1, size, size, C), for `to_float`."""
    view = CenterCrop(size, resize=usual_resize(size))
    return view([source.load(position)], epoch=0, indices=np.array([position]))[0]


def crop_batch(source: Source, positions: Sequence[int], size: int) -> Tensor:
    """Center crops to look at: uint8 (N, size, size, 3)."""
    return torch.from_numpy(np.stack([to_picture(center_crop(source, each, size)[0]) for each in positions]))


def load_all(runs: Sequence[str | Path]) -> list[Backbone]:
    """The encoders of runs, files or `timm:NAME`, with unique names."""
    if not runs:
        raise ValueError("there is no run to show; give at least one run's folder")
    return uniquely_named([load_backbone(run) for run in runs])


def uniquely_named(records: Sequence[Any]) -> list[Any]:
    """The same dataclasses, with a number in their `name` where it occurs twice."""
    names = [record.name for record in records]
    numbered = [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]
    return [replace(record, name=name) for record, name in zip(records, numbered, strict=True)]


@dataclass(frozen=True)
class Gallery:
    """Images with their features by one or several encoders. Rows are the N images that could be decoded."""

    source: Source
    positions: list[int]  # of the rows in the source
    labels: Tensor | None  # (N,)
    runs: list[tuple[str, Tensor]]  # name and features (N, D) of each encoder

    def __len__(self) -> int:
        return len(self.positions)

    def class_name(self, row: int) -> str:
        """ "" where there are no labels."""
        return "" if self.labels is None else self.name_of(int(self.labels[row]))

    def name_of(self, label: int) -> str:
        names = self.source.classes or ()
        return names[label] if 0 <= label < len(names) else f"class {label}"

    def pictures(self, rows: Sequence[int], size: int = 96) -> dict[int, np.ndarray]:
        images = crop_batch(self.source, [self.positions[row] for row in rows], size)
        return dict(zip(rows, images.numpy(), strict=True))

    def queries(self, images: Sequence[str], count: int) -> list[int]:
        """Rows of images that are given by position or path; else of the first image of each of `count` classes."""
        positions = [find_image(image, self.source, "query") for image in images]
        if broken := [position for position in positions if position not in self.positions]:
            raise ValueError(f"query {broken[0]} can't be decoded; choose another")
        if positions:
            return [self.positions.index(position) for position in positions]
        if self.labels is None:
            return spread(len(self), count)
        classes = torch.unique(self.labels).tolist()
        return [int((self.labels == classes[i]).nonzero()[0]) for i in spread(len(classes), count)]


def load_gallery(
    encoders: Sequence[Backbone], data: str | Path, images: int, *, device: str = "auto", workers: int = 0
) -> Gallery:
    """At most so many images of `data` and their features by some encoders, as kNN computes and stores them."""
    source = open_images(data, images, in_chans=encoders[0].architecture.in_chans)
    runs = []
    for backbone in encoders:
        pool = "token" if "cls_token" in backbone.weights else "mean"
        features = FeatureExtractor(backbone, resolve_device(device), pool, workers=workers).features(source)
        runs.append((backbone.name, features.vectors))
    return Gallery(source, features.indices.tolist(), features.labels, runs)


def find_image(image: str | int, source: Source, what: str = "image") -> int:
    """The position of an image: a number, or a path that ends in the image's name below the source's root."""
    if isinstance(image, int) or image.isdecimal():
        found = int(image) if 0 <= int(image) < len(source) else None
    else:
        wanted = f"/{Path(image).as_posix()}"
        found = next((i for i in range(len(source)) if wanted.endswith(f"/{source.key(i)}")), None)
    if found is None:
        raise ValueError(
            f"{what} {image} is not among the {len(source)} images of {source.name} that were read; give another"
        )
    return found


def spread(count: int, wanted: int) -> list[int]:
    """`wanted` of `count` positions, evenly spread."""
    return torch.linspace(0, count - 1, min(wanted, count)).round().int().tolist()
