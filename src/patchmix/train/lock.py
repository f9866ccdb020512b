"""One process at a time trains in a run's folder; a lock that its holder can't forget to give back."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

NAME = ".lock"
_held: set[int] = set()  # file handles; forked workers close theirs, or they would keep the lock of a dead run


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Holds `folder`, which is made if need be; a ValueError names who holds it already.

    The system takes the lock back when the process ends, however it ends. A folder that was made for the lock alone
    goes with it.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = _open(folder / NAME)
    except OSError as error:
        raise ValueError(f"can't write to {folder} ({error.strerror}); choose another --out") from error
    _held.add(handle)
    try:
        yield
    finally:
        with suppress(OSError):
            os.ftruncate(handle, 0)
            if made and [entry.name for entry in folder.iterdir()] == [NAME]:
                (folder / NAME).unlink()
                folder.rmdir()
        _held.discard(handle)
        os.close(handle)


def _open(path: Path) -> int:
    """A handle that has the lock, with our name in the file."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle, path)
            if _is_still(handle, path):
                me = {"host": socket.gethostname(), "pid": os.getpid(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps(me).encode(), 0)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its holder removed the file between our opening and our locking it: once more


def _lock(handle: int, path: Path) -> None:
    """The system's lock; where it has none to give (some network file systems), the name in the file must do."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # not a Unix
        _check_name(path)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise ValueError(_in_use(path.parent, _holder(path))) from error
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        _check_name(path)


def _check_name(path: Path) -> None:
    """The holder in the file counts, unless it is a process of this machine that has ended."""
    holder = _holder(path)
    if holder and (holder["host"] != socket.gethostname() or _runs(int(holder["pid"]))):
        raise ValueError(f"{_in_use(path.parent, holder)}; if it is gone, remove {path}")


def _holder(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_bytes())
        return {key: str(found[key]) for key in ("host", "pid", "since")}
    except (OSError, ValueError, KeyError, TypeError):  # just being written, or given back
        return {}


def _in_use(folder: Path, holder: dict[str, str]) -> str:
    who = "process {pid} on {host}, since {since}".format(**holder) if holder else "another process"
    return f"{folder} is in use by {who}; wait for it, stop it, or choose another --out"


def _is_still(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def _forget() -> None:
    for handle in _held:
        with suppress(OSError):
            os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
