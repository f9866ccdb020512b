"""Labeled data to evaluate a backbone on: a training part, and a test part where there is one."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from patchmix.data.contract import Groups, Labels, Source, groups_of
from patchmix.data.decode import Pixels
from patchmix.data.randomness import hash_words
from patchmix.data.sources import has_split, open_source

HELD_OUT = 0.2  # of the training images, to test on where there is no test split
_MEMORY = 2 << 30  # bytes of decoded images that may be held


@dataclass(frozen=True)
class Labeled:
    """Every image has a label in 0 … classes - 1, and the training part has at least two classes."""

    train: Source
    test: Source | None
    classes: int
    tested_on: str = "test split"

    def fingerprint(self) -> str:
        """That of the images, with a sum over the labels: a correction may leave a file's size as it is."""
        parts = [self.train] if self.test is None else [self.train, self.test]
        labels = [part.labels.tobytes() for part in parts if part.labels is not None]
        return "+".join([*(part.fingerprint() for part in parts), hashlib.sha256(b"".join(labels)).hexdigest()[:16]])

    def with_test(self) -> "Labeled":
        """The same where there is a test part; else a fifth of each class's training images becomes it."""
        if self.test is not None:
            return self
        held = held_out(_labels_of(self.train), HELD_OUT)
        test = Part(self.train, np.flatnonzero(held), name=f"{self.train.name}, held out")
        return Labeled(Part(self.train, np.flatnonzero(~held)), test, self.classes, "a fifth held out")


def open_labeled(data: str | Path, *, many_passes: bool = False, in_chans: int = 3) -> Labeled:
    """Opens what the evaluation of an encoder of `in_chans` needs; a ValueError says what is missing.

    In a folder without train/, the first-level sub-folders are classes. With `many_passes`, sets that fit are decoded
    into memory at once; otherwise images are decoded when needed: but for a few, not where their features are cached.
    """
    how: dict[str, Any] = {"cache_bytes": _MEMORY if many_passes else 0, "in_chans": in_chans}
    train = open_source(data, "train", class_folders=True, **how)
    labels = _labels_of(train)
    if set(train.classes or ()) in ({"images", "masks"}, {"images", "annotations"}):
        raise ValueError(f"{data} has images with masks instead of classes; use `patchmix segment`, or {data}/images")
    if len(np.unique(labels)) < 2:
        raise ValueError(f"{train.name} has only one class; give data with two or more")
    classes = max(int(labels.max()) + 1, len(train.classes or ()))
    test = open_source(data, "test", **how) if has_split(data, "test") else None
    if test is not None and len(unknown := np.setdiff1d(_labels_of(test), labels)):
        raise ValueError(
            f"{test.name} has label {unknown[-1]}, which {train.name} does not have; both must have the same classes"
        )
    return Labeled(train, test, classes, "" if test is None else test.name)


def held_out(labels: Labels, share: float) -> npt.NDArray[np.bool_]:
    """Which samples to hold out: (N,). The same ones each time; `share` of each class, at least 1, never all of it."""
    counts = np.bincount(labels)
    take = np.minimum(np.maximum(np.floor(share * counts), 1), np.maximum(counts - 1, 0))
    held: npt.NDArray[np.bool_] = _rank_in_class(labels) < take[labels]
    if not held.any():
        raise ValueError(
            f"none of the {len(labels)} training images can be held out, as every class has one; give more images"
        )
    return held


def few_labels(
    source: Source, *, shots: int | None, fraction: float | None, seed: int, draw: int
) -> npt.NDArray[np.int64]:
    """Positions of `shots` images of each class, or of a `fraction` of them (at least one), drawn at random: (n,)."""
    labels = _labels_of(source)
    counts = np.bincount(labels)
    if shots is None:
        assert fraction is not None
        take = np.maximum(np.round(fraction * counts), 1)
    else:
        take = np.full(len(counts), shots)
        if len(short := np.flatnonzero((counts > 0) & (counts < shots))):
            name = source.classes[short[0]] if source.classes is not None else short[0]
            raise ValueError(
                f"class {name} of {source.name} has {counts[short[0]]} images, too few for {shots} shots; "
                f"use --shots {counts[counts > 0].min()}, or add images"
            )
    return np.flatnonzero(_rank_in_class(labels, seed, draw) < take[labels])


def _rank_in_class(labels: Labels, *address: int) -> npt.NDArray[np.int64]:
    """0, 1, … for the images of each class, in a random order that `address` decides: (N,)."""
    order = np.lexsort((hash_words(*address, np.arange(len(labels))), labels))
    counts = np.bincount(labels)
    rank = np.empty(len(labels), np.int64)
    rank[order] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank


def _labels_of(source: Source) -> Labels:
    if source.labels is None:
        raise ValueError(
            f"{source.name} has no labels, which evaluation needs; put the images into one sub-folder per class, "
            "or give parquet with a label column"
        )
    if len(source.labels) and source.labels.min() < 0:
        raise ValueError(f"{source.name} has label {source.labels.min()}, which means unlabeled; remove those images")
    return source.labels


class Part:
    """Some of a source's samples, by their positions in it."""

    def __init__(self, source: Source, positions: npt.NDArray[np.int64], *, name: str | None = None) -> None:
        self._source = source
        self.positions = positions
        self.name = source.name if name is None else name
        self.labels: Labels | None = None if source.labels is None else source.labels[positions]
        self.classes = source.classes
        self.groups = _groups_at(groups_of(source), positions)

    def __len__(self) -> int:
        return len(self.positions)

    def load(self, index: int) -> Pixels:
        return self._source.load(int(self.positions[index]))

    def key(self, index: int) -> str:
        return self._source.key(int(self.positions[index]))

    def fingerprint(self) -> str:
        """The source's, with a sum over the positions: other positions, another fingerprint."""
        chosen = hashlib.sha256(self.positions.astype("<i8").tobytes()).hexdigest()[:16]
        return f"{self._source.fingerprint()}-{chosen}"


class Subset(Part):
    """At most `limit` of a source's samples, spread evenly over it and always the same ones.

    Where samples lie in groups (shards), they are spread over as many groups as may be in use at a time.
    """

    def __init__(self, source: Source, limit: int) -> None:
        positions = np.arange(len(source), dtype=np.int64)
        groups = groups_of(source)
        if groups is not None and len(groups.starts) > groups.window:
            few = np.linspace(0, len(groups.starts) - 1, groups.window).round().astype(np.int64)
            positions = positions[np.isin(np.searchsorted(groups.starts, positions, side="right") - 1, few)]
        count = min(limit, len(positions))
        super().__init__(source, positions[np.linspace(0, len(positions) - 1, count).round().astype(np.int64)])


def _groups_at(groups: Groups | None, positions: npt.NDArray[np.int64]) -> Groups | None:
    """The groups of some of a source's samples, if these are in order: (n,) positions."""
    if groups is None or not len(positions) or bool((np.diff(positions) < 0).any()):
        return None
    return Groups(np.unique(np.searchsorted(positions, groups.starts[groups.starts <= positions[-1]])), groups.window)
