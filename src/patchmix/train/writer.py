"""Checkpoints written beside the training: a copy is taken at once, the disk is waited for later."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchmix.train.checkpoint import Checkpoints


class CheckpointWriter:
    """One thread writes one checkpoint at a time; a save waits for the one before it.

    The copies stay for the next save: page-locked where the tensors are on a GPU, so that copying needs no waiting.
    """

    def __init__(self, checkpoints: Checkpoints | None) -> None:
        """Without `checkpoints` nothing is kept: for trials, and for every process but the first."""
        self.checkpoints = checkpoints
        self._copies: dict[tuple[str, ...], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failed: tuple[Path, Exception] | None = None

    def save(self, state: dict[str, Any], step: int) -> None:
        """Returns when `state` is copied; what happens to its tensors afterwards is not in the file."""
        self.wait()
        if self.checkpoints is None:
            return
        copy = self._copy(state, ())
        copied = None
        if any(tensor.is_pinned() for tensor in self._copies.values()):
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._thread = threading.Thread(
            target=self._write, args=(self.checkpoints, copy, step, copied), name="checkpoint"
        )
        self._thread.start()

    def check(self) -> None:
        """A ValueError if the last write failed: what, why, and what to do."""
        if self._failed is None:
            return
        path, error = self._failed
        self._failed = None
        kept = Checkpoints(path.parent).last
        where = f"the last good one is {kept}" if kept else "there is none yet"
        raise ValueError(
            f"can't write checkpoint {path} ({_reason(error)}); {where}. Make room or change permissions, then "
            "continue with --resume auto"
        ) from error

    def wait(self) -> None:
        """Until everything is on disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def close(self) -> None:
        """As `wait`, on the way out of another error, which is the one to tell."""
        if self._thread is not None:
            self._thread.join()

    def _write(
        self, checkpoints: Checkpoints, state: dict[str, Any], step: int, copied: torch.cuda.Event | None
    ) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            checkpoints.save(state, step)
        except (OSError, RuntimeError) as error:  # torch turns some failures of the disk into RuntimeError
            self._failed = (checkpoints.path(step), error)

    def _copy(self, value: Any, place: tuple[str, ...]) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value.detach(), place)
        if isinstance(value, dict):
            return {key: self._copy(item, (*place, str(key))) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._copy(item, (*place, str(i))) for i, item in enumerate(value))
        return value

    def _copy_tensor(self, tensor: Tensor, place: tuple[str, ...]) -> Tensor:
        copy = self._copies.get(place)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._copies[place] = copy
        return copy.copy_(tensor, non_blocking=True)


def _reason(error: BaseException) -> str:
    """What the system said; torch's own errors about a file come on top of it, and say less."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).splitlines()[0]
