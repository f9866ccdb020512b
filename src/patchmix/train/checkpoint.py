"""Checkpoints that are either complete or absent."""

import pickle
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from patchmix.files import writing


class Checkpoints:
    """A folder of step-N.pt files, and `last`, a link to the newest."""

    def __init__(self, folder: Path, *, keep: int = 1) -> None:
        self.folder = folder
        self.keep = keep

    @property
    def last(self) -> Path | None:
        """The newest complete checkpoint, even if the process died before it moved `last`."""
        return max(self.folder.glob("step-*.pt"), default=None)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}.pt"

    def save(self, state: dict[str, Any], step: int) -> Path:
        """`state` holds tensors and plain data only: it is read back with `weights_only=True`.

        Later checkpoints are of a training that this one, continued from an earlier step, replaces.
        """
        path = self.path(step)
        with writing(path) as file:
            torch.save(state, file)
        link = self.folder / ".last"
        with suppress(OSError):  # some file systems have no links, and `last` is for people only
            link.unlink(missing_ok=True)
            link.symlink_to(path.name)
            link.replace(self.folder / "last")
        kept = [path, *sorted(each for each in self.folder.glob("step-*.pt") if each < path)[::-1]][: self.keep]
        for other in set(self.folder.glob("step-*.pt")) - set(kept):
            other.unlink()
        return path


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The saved state, on the CPU. Never runs code from the file."""
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not a checkpoint, or an incomplete one")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"checkpoint {path} holds more than tensors and plain data, so it is not read") from error
    except (RuntimeError, OSError) as error:
        raise ValueError(f"checkpoint {path} can't be read ({str(error).splitlines()[0]})") from error
    if not isinstance(state, dict) or "step" not in state or "method" not in state:
        raise ValueError(f"{path} is not a patchmix checkpoint: it has no 'step' and 'method'")
    return state


class CheckpointWriter:
    """Writes checkpoints in a thread while training continues: one at a time, from a copy that `save` takes.

    The copy's memory is kept for the next save; it is page-locked where the tensors are on a GPU.
    """

    def __init__(self, checkpoints: Checkpoints | None) -> None:
        """`checkpoints` is None where nothing is to be written: in trials, and on every rank but 0."""
        self.checkpoints = checkpoints
        self._copies: list[Any] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, state: dict[str, Any], step: int) -> None:
        """Returns when `state` is copied; later changes of its tensors do not reach the file."""
        self.wait()
        if self.checkpoints is None:
            return
        leaves, structure = tree_flatten(state)
        if len(leaves) != len(self._copies):
            self._copies = [None] * len(leaves)
        self._copies = [_copy(leaf, before) for leaf, before in zip(leaves, self._copies, strict=True)]
        copied = None
        if any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves):
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._path = self.checkpoints.path(step)
        copy = tree_unflatten(self._copies, structure)
        self._writing = self._thread.submit(_write, self.checkpoints, copy, step, copied)

    def check(self) -> None:
        """A ValueError if the last write failed."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Until everything is on disk; a ValueError if the last write failed."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except (OSError, RuntimeError) as error:  # torch turns some failures of the disk into RuntimeError
            kept = Checkpoints(self._path.parent).last
            where = f"the last good one is {kept}" if kept else "there is none yet"
            raise ValueError(
                f"can't write checkpoint {self._path} ({_reason(error)}); {where}. Free some space or change "
                "permissions, then repeat the call (pretrain and adapt: with --resume auto)"
            ) from error

    def close(self) -> None:
        """As `wait`, without an error: for use while another one is raised."""
        self._thread.shutdown()


def _write(checkpoints: Checkpoints, state: dict[str, Any], step: int, copied: torch.cuda.Event | None) -> None:
    if copied is not None:
        copied.synchronize()
    checkpoints.save(state, step)


def _copy(value: Any, before: Any) -> Any:
    """A tensor's values, in the memory of the copy before, if there is one of its shape and type."""
    if not isinstance(value, Tensor):
        return value
    if not isinstance(before, Tensor) or (before.shape, before.dtype) != (value.shape, value.dtype):
        before = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return before.copy_(value.detach(), non_blocking=True)


def _reason(error: BaseException) -> str:
    """The system's own message, which torch's error may hide."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).splitlines()[0]
