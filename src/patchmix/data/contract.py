"""The interface of a source of images."""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from patchmix.data.decode import Pixels, read_image

Split = Literal["train", "test"]
Labels = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]


@runtime_checkable
class Source(Protocol):
    """Images by position, with labels where there are some."""

    name: str  # for messages, such as "cifar10 (train)"
    labels: Labels | None  # int64 (len,), or None where there are none

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The name of each label, or None."""

    def __len__(self) -> int: ...

    def load(self, index: int) -> Pixels:
        """(H, W, C), upright; shared, so not to be written to. Raises DecodeError.

        uint8 or, in 16-bit files, uint16; float32 in arrays. RGB, unless the encoder takes other channels.
        """

    def key(self, index: int) -> str:
        """The sample's own name: its path below the root, or "train.parquet#123"."""

    def fingerprint(self) -> str:
        """Hex digits that identify the contents; independent of where they are stored."""


class EncodedSource(ABC):
    """A source that still has its images as files."""

    channels = 3  # to read; 3 is RGB

    @abstractmethod
    def key(self, index: int) -> str: ...

    @abstractmethod
    def encoded(self, index: int) -> bytes:
        """The image file's bytes, as they are. Raises DecodeError."""

    def load(self, index: int) -> Pixels:
        return read_image(self.encoded(index), self.key(index), self.channels)


class Groups(NamedTuple):
    """Contiguous runs of samples that are cheap to read together: shards, or row groups of parquet."""

    starts: Indices  # (groups,), where each begins; the first is 0
    window: int  # how many of them may be in use at a time

    def bounds(self, length: int) -> Indices:
        """Where each begins, and the end of the last one: (groups + 1,)."""
        return np.append(self.starts, length)

    def of(self, index: int) -> int:
        """The group of a sample."""
        return int(np.searchsorted(self.starts, index, side="right")) - 1


def groups_of(source: Source) -> Groups | None:
    """What a source says in its optional attribute `groups`; None where every sample costs the same."""
    groups: Groups | None = getattr(source, "groups", None)
    return groups
