"""What a source of images is, for everything that reads from one."""

from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from patchmix.data.decode import Pixels

Split = Literal["train", "test"]
Labels = npt.NDArray[np.int64]


@runtime_checkable
class Source(Protocol):
    """Images by position, with labels where there are some."""

    @property
    def name(self) -> str:
        """For messages, such as "cifar10 (train)"."""
        ...

    @property
    def labels(self) -> Labels | None:
        """int64 (len,), or None where there are none."""
        ...

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The name of each label, or None."""
        ...

    def __len__(self) -> int: ...

    def load(self, index: int) -> Pixels:
        """uint8 (H, W, 3), RGB, upright; shared, so not to be written to. Raises DecodeError."""
        ...

    def key(self, index: int) -> str:
        """The sample's own name: its path below the root, or "train.parquet#123"."""
        ...

    def fingerprint(self) -> str:
        """Hex digits that identify the list of contents; the same wherever the root lies."""
        ...
