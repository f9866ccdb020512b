"""Files that are either the old one or the new one, never half of one."""

from __future__ import annotations

import filecmp
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def same_bytes(a: Path, b: Path) -> bool:
    return filecmp.cmp(a, b, shallow=False)


@contextmanager
def replacing(path: Path, *, overwrite: bool = True, same: Callable[[Path, Path], bool] = same_bytes) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on success it is synced and renamed to `path`, on failure removed.

    Without `overwrite` a `path` with other content, as `same` sees it, stays as it is and a ValueError says so.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        if not overwrite and path.exists() and not same(temporary, path):
            raise ValueError(f"{path} exists and differs; give another name, or allow it with overwrite (--overwrite)")
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())  # mkstemp makes it 0600, which colleagues can't read
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
