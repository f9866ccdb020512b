"""Checkpoints that are either whole or absent."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from patchmix.files import writing


class Checkpoints:
    """A folder of step-N.pt files, and `last`, a link to the newest."""

    def __init__(self, folder: Path, *, keep: int = 1) -> None:
        self.folder = folder
        self.keep = keep

    @property
    def last(self) -> Path | None:
        """The newest complete checkpoint; also right if the process died between writing it and moving `last`."""
        return max(self._complete(), default=None)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}.pt"

    def save(self, state: dict[str, Any], step: int) -> Path:
        """`state` holds tensors, numbers, text, lists and dicts only: it is read back without unpickling code."""
        path = self.path(step)
        with writing(path) as file:
            torch.save(state, file)
        link = self.folder / ".last"
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        link.replace(self.folder / "last")
        for old in sorted(self._complete())[: -self.keep]:
            old.unlink()
        return path

    def _complete(self) -> Iterator[Path]:
        return self.folder.glob("step-*.pt")


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
