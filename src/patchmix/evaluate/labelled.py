"""Labelled data to judge a backbone on: a training part, and a test part where there is one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from patchmix.data.contract import Labels, Source
from patchmix.data.randomness import hash_words
from patchmix.data.sources import has_split, open_source
from patchmix.evaluate.features import Part

HELD_OUT = 0.2  # of the training images, to test on where there is no test split
_MEMORY = 2 << 30  # bytes of decoded images that may be held


@dataclass(frozen=True)
class Labelled:
    """Every image has a label in 0 … classes - 1, and the training part has at least two classes."""

    train: Source
    test: Source | None
    classes: int

    def fingerprint(self) -> str:
        """Of both parts."""
        return self.train.fingerprint() + (f"+{self.test.fingerprint()}" if self.test is not None else "")

    @property
    def train_labels(self) -> Labels:
        assert self.train.labels is not None
        return self.train.labels

    def with_test(self) -> Labelled:
        """The same where there is a test part; else a fifth of each class's training images becomes it."""
        if self.test is not None:
            return self
        held = held_out(self.train_labels, HELD_OUT)
        return Labelled(
            Part(self.train, np.flatnonzero(~held)),
            Part(self.train, np.flatnonzero(held), name=f"{self.train.name}, held out"),
            self.classes,
        )


def open_labelled(data: str | Path, *, many_passes: bool = False) -> Labelled:
    """Opens what an evaluation needs; a ValueError says what is missing.

    In a folder without train/, the first-level sub-folders are classes. With `many_passes`, sets that fit are decoded
    into memory at once; without, images are decoded when they are asked for, which they never are where their
    features are stored.
    """
    cache_bytes = _MEMORY if many_passes else 0
    train = _open_train(data, cache_bytes)
    labels = _labels_of(train)
    if len(np.unique(labels)) < 2:
        raise ValueError(f"{train.name} has one class only; there is nothing to tell apart, give data with two or more")
    classes = int(labels.max()) + 1
    test: Source | None = None
    if has_split(data, "test"):
        test = open_source(data, "test", cache_bytes=cache_bytes)
        highest = int(_labels_of(test).max())
        if highest >= classes:
            raise ValueError(
                f"{test.name} has label {highest}, which {train.name} does not have; both must have the same classes"
            )
    if train.classes is not None:
        classes = max(classes, len(train.classes))
    return Labelled(train, test, classes)


def held_out(labels: Labels, share: float) -> npt.NDArray[np.bool_]:
    """Which samples to hold out: (N,). The same ones each time; `share` of each class, at least 1, never all of it."""
    order = np.lexsort((hash_words(np.arange(len(labels))), labels))  # by class, within a class at random
    counts = np.bincount(labels)
    rank = np.empty(len(labels), np.int64)
    rank[order] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    take = np.minimum(np.maximum(np.floor(share * counts), 1), np.maximum(counts - 1, 0))
    held: npt.NDArray[np.bool_] = rank < take[labels]
    if not held.any():
        raise ValueError(
            f"none of the {len(labels)} training images can be held out, as every class has one; give more images"
        )
    return held


def _open_train(data: str | Path, cache_bytes: int) -> Source:
    try:
        return open_source(data, "train", class_folders=True, cache_bytes=cache_bytes)
    except ValueError as error:
        try:
            plain = open_source(data, "train", cache_bytes=0, progress=False)
        except ValueError:
            raise error from None
        raise ValueError(_unlabelled(plain.name)) from error


def _labels_of(source: Source) -> Labels:
    if source.labels is None:
        raise ValueError(_unlabelled(source.name))
    if len(source.labels) and source.labels.min() < 0:
        raise ValueError(f"{source.name} has label {source.labels.min()}, which means unlabelled; remove those images")
    return source.labels


def _unlabelled(name: str) -> str:
    return (
        f"{name} has no labels, which evaluation needs; put the images into one sub-folder per class, "
        "or give parquet with a label column"
    )
