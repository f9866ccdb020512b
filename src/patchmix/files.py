"""Files that are the old one or the new one, never half of one."""

from __future__ import annotations

import filecmp
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".unfinished"  # how the names of files end that are not complete yet


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


_MODE = (
    0o666 & ~_umask()
)  # asked for once, before there are threads: a temporary file is 0600, which colleagues can't read


def same_bytes(a: Path, b: Path) -> bool:
    return filecmp.cmp(a, b, shallow=False)


@contextmanager
def replacing(path: Path, *, overwrite: bool = True, same: Callable[[Path, Path], bool] = same_bytes) -> Iterator[Path]:
    """Yields a temporary path beside `path`; once it is complete and on disk it becomes `path`, on failure it vanishes.

    Without `overwrite` a `path` with other content, as `same` sees it, stays as it is and a ValueError says so.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        if not overwrite and path.exists() and not same(temporary, path):
            raise ValueError(f"{path} exists and differs; give another name, or allow it with overwrite (--overwrite)")
        _sync(temporary)
        temporary.chmod(_MODE)
        temporary.replace(path)
        _sync(path.parent)  # makes the renaming itself survive a power cut
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to; see `replacing`."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        yield file


def write_text(path: Path, text: str) -> None:
    with writing(path) as file:
        file.write(text.encode())


def remove_unfinished(folder: Path) -> None:
    """What a killed process had begun to write; for the one process that may write there."""
    for path in folder.glob(f".*{UNFINISHED}"):
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
