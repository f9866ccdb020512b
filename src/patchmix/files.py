"""Files that are the old one or the new one, never half of one; and the cache folders."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock

UNFINISHED = ".unfinished"  # how the names of files end that are not complete yet


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# Read once, before there are threads. A temporary file has 0600, which colleagues can't read.
_MODE = 0o666 & ~_umask()


def check_absent(*paths: Path) -> None:
    """A ValueError that names the first of these files that exists."""
    for path in paths:
        if path.is_file():
            raise ValueError(f"{path} exists; give another name, or allow it with overwrite (--overwrite)")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path next to `path`; once complete and on disk it becomes `path`, on failure it is removed."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
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


def cache_folder(kind: str) -> Path:
    """$PATCHMIX_CACHE/KIND, else ~/.cache/patchmix/KIND. It may be deleted at any time."""
    return Path(os.environ.get("PATCHMIX_CACHE") or "~/.cache/patchmix").expanduser() / kind


def prune(folder: Path, limit: int, *, keep: Path | None = None) -> None:
    """Removes the files below `folder` that were used longest ago, but never `keep`, down to `limit` bytes in all.

    Hidden files are neither counted nor removed. One process at a time does this: two would remove too much.
    """
    with FileLock(folder / ".prune.lock"):
        files = []
        for path in folder.rglob("[!.]*"):
            with suppress(FileNotFoundError):
                if path.is_file():
                    files.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total > limit and path != keep:
                path.unlink(missing_ok=True)
                total -= size
