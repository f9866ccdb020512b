"""Shards that lie elsewhere: fetched whole into a bounded folder that all processes of a machine share.

`https://` needs nothing, `pipe:` runs a program (without a shell), every other protocol goes through fsspec.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from patchmix.data.shard_index import cache_root
from patchmix.files import UNFINISHED

TRIES = 4
PAUSE = 1.0  # seconds before the second try; doubled each time
_TIMEOUT = 60  # seconds without an answer
_ROOM_GB = 20.0
_ABANDONED = 24 * 3600  # seconds after which an unfinished file is nobody's
_SHELL_WORDS = {"|", "||", "&", "&&", ";", "<", ">", ">>", "2>", "2>&1"}


def is_remote(name: str) -> bool:
    return "://" in name or name.startswith("pipe:")


def open_remote(url: str, expected: int | None = None) -> IO[bytes]:
    """The shard as a local file, fetched if it is not there. Raises ValueError naming it after the last try.

    `expected`: its size, where an index tells. A file that others remove later stays readable once it is open.
    """
    path = _place(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(TRIES):
        with suppress(FileNotFoundError):  # also when another process makes room right now
            file = path.open("rb", buffering=0)
            if expected is None or os.fstat(file.fileno()).st_size == expected:
                os.utime(path, ns=(time.time_ns(),) * 2)  # used just now; the system's own clock is coarse
                return file
            file.close()
        with _locked(path.with_name(path.name + ".lock")):
            if not path.exists() or (expected is not None and path.stat().st_size != expected):
                _make_room(path.parent, expected or 0)
                _fetch_with_patience(url, path, expected)
                _make_room(path.parent, 0, keep=path)
    raise ValueError(f"{url!r} was removed from {str(path.parent)!r} {TRIES} times; {_more_room()}")


def read_remote(url: str, path: Path) -> bool:
    """Copy a small file to `path`, in one try; False where there is none."""
    try:
        _fetch(url, path, None)
    except (OSError, ImportError, subprocess.SubprocessError):
        return False
    return True


def list_remote(pattern: str) -> list[str]:
    """The files that match, with their protocol. Raises ValueError where the protocol cannot list."""
    if pattern.startswith(("http://", "https://", "pipe:")):
        raise ValueError(f"{pattern!r} cannot be listed; name the shards, such as train-{{000000..000099}}.tar")
    try:
        system, path = _fsspec(pattern)
        return sorted(str(system.unstrip_protocol(name)) for name in system.glob(path))
    except (OSError, ImportError) as error:
        raise ValueError(f"{pattern!r} cannot be listed ({_reason(error)}); {_remedy(pattern)}") from error


def _place(url: str) -> Path:
    name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in url.rpartition("/")[2])[-60:]
    return cache_root() / "fetched" / f"{hashlib.sha256(url.encode()).hexdigest()[:20]}-{name}"


def _fetch_with_patience(url: str, path: Path, expected: int | None) -> None:
    for attempt in range(TRIES):
        try:
            _fetch(url, path, expected)
            return
        except (OSError, ImportError, subprocess.SubprocessError) as error:
            if attempt == TRIES - 1 or isinstance(error, ImportError):
                raise ValueError(
                    f"{url!r} cannot be fetched ({_reason(error)}; {attempt + 1} tries); {_remedy(url)}"
                ) from error
            time.sleep(PAUSE * 2**attempt)


def _fetch(url: str, path: Path, expected: int | None) -> None:
    temporary = path.with_name(path.name + UNFINISHED)
    try:
        with temporary.open("wb") as file:
            if url.startswith("pipe:"):
                _run(url, file)
            elif url.startswith(("http://", "https://")):
                _download(url, file)
            else:
                system, name = _fsspec(url)
                with system.open(name, "rb") as remote:
                    shutil.copyfileobj(remote, file, 1 << 20)
                expected = int(system.size(name)) if expected is None else expected
            size = file.tell()
        if expected is not None and size != expected:
            raise OSError(f"{size} bytes arrived, not {expected}")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _download(url: str, file: IO[bytes]) -> None:
    with urlopen(Request(url, headers={"User-Agent": "patchmix"}), timeout=_TIMEOUT) as answer:
        length = answer.headers.get("Content-Length")
        shutil.copyfileobj(answer, file, 1 << 20)
    if length is not None and file.tell() != int(length):
        raise OSError(f"{file.tell()} bytes arrived, not {length}")


def _run(url: str, file: IO[bytes]) -> None:
    """Run the program behind `pipe:` with a list of arguments: no shell ever sees a name."""
    done = subprocess.run(pipe_words(url), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").split("\n")
        raise OSError(f"exit code {done.returncode}: {' '.join(' '.join(last[-3:]).split())[:200]}")
    file.seek(0, os.SEEK_END)


def pipe_words(url: str) -> list[str]:
    """The program and its arguments. Raises ValueError where it is not allowed, or wants a shell."""
    if os.environ.get("PATCHMIX_ALLOW_PIPE") != "1":
        raise ValueError(
            f"{url!r} runs a program, and a run's config.yaml may name data too; set PATCHMIX_ALLOW_PIPE=1 to allow it"
        )
    try:
        words = shlex.split(url.removeprefix("pipe:"))
    except ValueError as error:
        raise ValueError(f"{url!r} has an open quote; close it") from error
    if not words or _SHELL_WORDS & set(words):
        raise ValueError(f"{url!r} must be one program with arguments, as no shell runs it; put the rest into a script")
    return words


def _fsspec(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs  # optional, and needed here only

    try:
        system, name = url_to_fs(url)
    except ValueError as error:  # an unknown protocol
        raise OSError(str(error)) from error
    return system, str(name)


def _remedy(url: str) -> str:
    if url.startswith("pipe:"):
        return "check that the program works by itself"
    if url.startswith("http"):
        return "check the address and the network"
    return "check the address, and install fsspec (patchmix-ssl[remote]) with its part for this protocol, such as s3fs"


def _reason(error: Exception) -> str:
    if isinstance(error, HTTPError):
        return f"HTTP {error.code}"
    if isinstance(error, FileNotFoundError):
        return "no such file"
    return " ".join(str(error).split()) or type(error).__name__


# ------------------------------------------------------------------------------------------------- the bounded folder


def room() -> int:
    """Bytes that fetched shards may take, from $PATCHMIX_CACHE_GB."""
    chosen = os.environ.get("PATCHMIX_CACHE_GB", str(_ROOM_GB))
    try:
        gigabytes = float(chosen)
    except ValueError:
        gigabytes = -1.0
    if not 0 < gigabytes < 1e9:
        raise ValueError(f"PATCHMIX_CACHE_GB is {chosen!r}; it must be a number of gigabytes above 0")
    return round(gigabytes * 2**30)


def _more_room() -> str:
    return f"give the cache more room, PATCHMIX_CACHE_GB is {room() / 2**30:g}"


def _make_room(folder: Path, incoming: int, keep: Path | None = None) -> None:
    """Remove the shards that were used longest ago, until `incoming` bytes fit."""
    limit = room() - incoming
    with _locked(folder / "room.lock"):
        files = []
        for entry in os.scandir(folder):
            with suppress(FileNotFoundError):
                status = entry.stat()
                abandoned = time.time() - status.st_mtime > _ABANDONED
                if not entry.name.endswith((".lock", UNFINISHED)) or (abandoned and entry.name.endswith(UNFINISHED)):
                    files.append((status.st_mtime_ns, status.st_size, Path(entry.path)))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= limit:
                break
            if path != keep:
                path.unlink(missing_ok=True)
                total -= size


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock ends with its process, however that ends."""
    import fcntl  # not on Windows, where nothing is fetched

    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
