"""Files that are the old one or the new one, never half of one; folders that one process holds; cache folders."""

import errno
import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

UNFINISHED = ".unfinished"  # how the names of files end that are not complete yet
LOCK, HOLDER = ".lock", ".lock.json"  # the locked file of a folder, and who holds it


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
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    temporary.touch(exist_ok=False)
    mode = temporary.stat().st_mode
    try:
        yield temporary
        _sync(temporary)
        temporary.chmod(mode)  # safetensors makes it 0600, which colleagues can't read
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
        file.write(text.encode(errors="backslashreplace"))  # a file's name need not be UTF-8


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


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Holds `folder`, which is created if needed; a ValueError names the process that holds it already.

    The system releases the lock when the process ends, however it ends. A folder that was created for the lock alone
    is removed with it.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _acquire(folder)
        me = {"host": socket.gethostname(), "pid": os.getpid(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
        write_text(folder / HOLDER, json.dumps(me))
    except OSError as error:
        raise ValueError(f"can't write to {folder} ({error.strerror}); choose another --out") from error
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / HOLDER).unlink()
            if made and [entry.name for entry in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                folder.rmdir()
        lock.release()


def _acquire(folder: Path) -> BaseFileLock:
    """The system's lock; on file systems without locks (some network ones), a file that says who holds it."""
    lock: BaseFileLock = FileLock(folder / LOCK, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(_in_use(folder)) from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        lock = SoftFileLock(folder / f"{LOCK}.soft")
        try:
            lock.acquire(timeout=0.2)  # the first try may only remove the file of a dead process
        except Timeout:
            raise ValueError(f"{_in_use(folder)}; if it is gone, remove {lock.lock_file}") from error
    return lock


def _in_use(folder: Path) -> str:
    who = "another process"
    with suppress(OSError, ValueError, KeyError, TypeError):  # it is just taking or releasing the lock
        who = "process {pid} on {host}, since {since}".format(**json.loads((folder / HOLDER).read_bytes()))
    return f"{folder} is in use by {who}; wait for it, stop it, or choose another --out"
