"""The entries of a checkpoint file, read without running any code that it may contain."""

from __future__ import annotations

import argparse
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

# Plain data that the training scripts of DINO, iBOT and MAE put beside the weights: their arguments, and learning
# rates that are NumPy numbers (stored under the old and the new name of NumPy's core).
_scalar = np.float64(0).__reduce__()[0]
_HARMLESS: list[Any] = [
    argparse.Namespace,
    np.dtype,
    type(np.dtype(np.float64)),
    type(np.dtype(np.float32)),
    type(np.dtype(np.int64)),
    (_scalar, "numpy.core.multiarray.scalar"),
    (_scalar, "numpy._core.multiarray.scalar"),
]


def read_entries(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The top level of a .safetensors, .pth, .pt, .bin or .tar checkpoint, and its safetensors metadata.

    The kind of file is told by its first bytes, not by its name. A file that is none of these, is cut off, or needs
    code to be unpickled gives a ValueError of one line.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the checkpoint file in it")
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; give the path of a checkpoint file") from None
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error
    if not start:
        raise ValueError(f"{path} is empty (0 bytes); download or copy it again")
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
    if start[8:9] == b"{":
        return _read_safetensors(path)
    if start[:4] == b"PK\x03\x04" or start[:1] == b"\x80":
        return _read_torch(path), {}
    seen = "text" if _is_text(start) else f"bytes {start[:4].hex(' ')}"
    raise ValueError(f"{path} is no checkpoint: it begins with {seen}; expected a safetensors or a torch file")


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} can't be read as safetensors ({_one_line(error)}); is it complete?") from error


def _read_torch(path: Path) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals(_HARMLESS):
            entries = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if code := re.search(r"GLOBAL (\S+)", str(error)):
            raise ValueError(
                f"{path} needs code to be unpickled ({code[1]}), which could do anything to this machine; where you "
                "trust it, store its tensors alone: torch.save(torch.load(OLD, weights_only=False)['state_dict'], NEW)"
            ) from error
        raise ValueError(f"{path} can't be unpickled; is it complete, and a torch file?") from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} can't be read as a torch file ({_one_line(error)}); is it complete?") from error
    if not isinstance(entries, dict):
        raise ValueError(f"{path} holds a {type(entries).__name__}; expected a dictionary of tensors")
    if not entries:
        raise ValueError(f"{path} holds an empty dictionary; expected the tensors of a ViT")
    return {str(name): value for name, value in entries.items()}


def _is_text(start: bytes) -> bool:
    try:
        return start[:256].decode("ascii").isprintable() or b"\n" in start
    except UnicodeDecodeError:
        return False


def _one_line(error: Exception) -> str:
    """The first sentence: torch's messages go on with stack traces and advice."""
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0].split(". ")[0][:160]
