"""Images in a folder, nested in any way; the first level below a split's folder may be its classes."""

import hashlib
import heapq
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from patchmix.data.contract import EncodedSource, Labels
from patchmix.data.decode import EXTENSIONS, DecodeError
from patchmix.progress import progress_bar, warn

_SUFFIXES = tuple(extension.encode() for extension in EXTENSIONS)
_OF_ONE_SIZE = (".npy", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")  # whatever they show
_UNREADABLE = (b".heic", b".heif", b".avif")  # photos all the same


class FolderSource(EncodedSource):
    """The images below `root`, in the order of their relative paths, or the given files in their own order.

    `classes`: names of first-level sub-folders that label the images; None for no labels.
    """

    def __init__(
        self,
        root: Path,
        *,
        name: str,
        classes: tuple[str, ...] | None = None,
        files: Sequence[str | Path] | None = None,
    ) -> None:
        paths = list_images(root) if files is None else [os.fsencode(file) for file in files]
        if not paths:
            raise ValueError(f"no images in {str(root)!r}; files ending in {', '.join(EXTENSIONS)} or .npy are taken")
        self.name, self.root, self.classes = name, root, classes
        self.labels = None if classes is None else _label(paths, classes, root)
        # One block that forked workers share: a list would be copied as its reference counts change.
        self._paths: Any = pa.array(paths, pa.large_binary())

    def __len__(self) -> int:
        return len(self._paths)

    def _path(self, index: int) -> Path:
        return self.root / os.fsdecode(self._paths[index].as_py())

    def encoded(self, index: int) -> bytes:
        try:
            return self._path(index).read_bytes()
        except OSError as error:
            raise DecodeError(self.key(index), error.strerror or type(error).__name__) from error

    def key(self, index: int) -> str:
        return str(self._paths[index].as_py(), "utf-8", "backslashreplace")  # a name need not be UTF-8

    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256(b"folder\0")
        for index in range(len(self)):
            size = -1
            with suppress(OSError):  # vanished or unreadable: its name still counts
                size = self._path(index).stat().st_size
            digest.update(self._paths[index].as_py() + b"\0%d\0" % size)
        for index in range(0, len(self), -(-len(self) // 8)):
            if self.key(index).lower().endswith(_OF_ONE_SIZE):
                with suppress(DecodeError):
                    digest.update(hashlib.sha256(self.encoded(index)).digest())
        return digest.hexdigest()[:32]


def list_images(root: Path) -> list[bytes]:
    """Relative paths of all images below `root`, sorted; hidden files and folders are left out.

    Where there are none, of all .npy files: beside images these hold something else. Folders behind symbolic links come
    after all others, and a folder is entered once: loops end.
    """
    found: list[bytes] = []
    left_out: list[bytes] = []
    pending = [(False, b"")]  # folders: whether behind a link, and the path
    entered: set[tuple[int, int]] = set()
    with progress_bar(f"listing {root}", None) as advance:
        while pending:
            (_, relative), before = heapq.heappop(pending), len(found)
            folder = os.path.join(os.fsencode(root), relative)  # noqa: PTH118 (Path has no bytes)
            status = os.stat(folder)  # noqa: PTH116
            if (status.st_dev, status.st_ino) in entered:
                continue
            entered.add((status.st_dev, status.st_ino))
            for entry in os.scandir(folder):
                path = os.path.join(relative, entry.name)  # noqa: PTH118
                if entry.name.startswith(b"."):
                    continue
                try:
                    if entry.is_dir():
                        heapq.heappush(pending, (entry.is_symlink(), path))
                    elif entry.name.lower().endswith((*_SUFFIXES, b".npy")) and entry.is_file():
                        found.append(path)
                    elif entry.name.lower().endswith(_UNREADABLE):
                        left_out.append(path)
                except OSError:  # a link to itself
                    continue
            advance(len(found) - before)
    if left_out:
        example = os.fsdecode(left_out[0])
        warn(f"{len(left_out)} files in {root} cannot be read, such as {example!r}; convert them to jpg or png")
    return sorted([path for path in found if not path.lower().endswith(b".npy")] or found)


def class_names(root: Path) -> tuple[str, ...] | None:
    """The sub-folders of `root`, sorted, or None when there are none or when images are next to them."""
    entries = [entry for entry in os.scandir(root) if not entry.name.startswith(".")]
    if any(entry.name.lower().endswith(EXTENSIONS) and not entry.is_dir() for entry in entries):
        return None
    return tuple(sorted(entry.name for entry in entries if entry.is_dir())) or None


def _label(paths: list[bytes], classes: tuple[str, ...], root: Path) -> Labels:
    number = {os.fsencode(name): label for label, name in enumerate(classes)}
    try:
        return np.array([number[path.partition(b"/")[0]] for path in paths], np.int64)
    except KeyError as error:
        raise ValueError(
            f"{os.fsdecode(error.args[0])!r} in {str(root)!r} is not one of the {len(classes)} class folders of the "
            "training split; move or remove it"
        ) from None
