"""The files of shards: which ones a DATA means, and remote ones as local files.

Remote shards are fetched as a whole, to a folder of bounded size that all processes of a machine share.
"""

import glob
import hashlib
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, TypeVar

from filelock import FileLock
from fsspec.core import url_to_fs

from patchmix.data.contract import Split
from patchmix.data.decode import EXTENSIONS
from patchmix.files import cache_folder, prune, remove_unfinished, replacing
from patchmix.progress import warn

TRIES = 4
PAUSE = 1.0  # seconds before the second try; doubled each time

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST_SHARDS = 100_000
_SPLIT = re.compile(r"(?<![a-z])(train|val|test)(ing|id|idation)?(?![a-z])", re.IGNORECASE)  # a whole word
_NAMED = 5  # files that a warning names
_TIMEOUT = 60  # seconds without an answer

T = TypeVar("T")


def is_remote(name: str) -> bool:
    return "://" in name


def names_shards(data: str) -> bool:
    """Whether a DATA can only mean shards: by its protocol, its pattern or its ending."""
    if is_remote(data):
        return True
    path = Path(data).expanduser()
    if data.endswith(".tar"):
        return not path.is_dir()
    return not path.exists() and (bool(_BRACES.search(data)) or glob.has_magic(data))


def find_shards(data: str) -> dict[Split, list[str]]:
    """Shards by split; raises ValueError where there are none, or where a local one is missing."""
    names = [name for part in expand_braces(data) for name in _matches(part)]
    if not names:
        raise ValueError(f"no shard matches {data!r}; check the pattern, its files end in .tar")
    for name in names:
        if not is_remote(name) and not Path(name).is_file():
            raise ValueError(f"shard {name!r} is missing; check the pattern, or leave it out")
    alone = [data if is_remote(data) else str(Path(data).expanduser())]  # one file, whatever its name
    return {"train": names} if names == alone else by_split(names)


def shards_in(root: Path) -> dict[Split, list[str]]:
    """The shards of a local folder, by split; {} where there are none, or where the data is images in files.

    That is so where images are next to a shard, or in a folder train/ that has no shards.
    """
    names = files_in(root, ".tar")
    folders = {root, *(Path(name).parent for name in names)}
    if not names or any(first_image(folder, deep=False) for folder in folders):
        return {}
    if root / "train" not in folders and first_image(root / "train"):
        return {}
    if image := first_image(root):
        warn_of_left_out((f"the images, such as {image}",), "there are .tar files")
    return by_split(names, str(root))


def first_image(root: Path, *, deep: bool = True) -> Path | None:
    """A visible image file in a folder or, unless not `deep`, anywhere below it."""
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if deep and not name.startswith(".")]
        for name in names:
            if name.lower().endswith(EXTENSIONS) and not name.startswith("."):
                return Path(folder, name)
    return None


def files_in(root: Path, ending: str) -> list[str]:
    """Visible files of a folder or one level below; a deep folder of images is not searched."""
    found = [path for pattern in (f"*{ending}", f"*/*{ending}") for path in sorted(root.glob(pattern))]
    return [str(path) for path in found if not path.relative_to(root).as_posix().startswith(".")]


def by_split(names: list[str], root: str | None = None) -> dict[Split, list[str]]:
    """Files by a word in their names, or else in their folders' names; without such a word they are for training.

    `root`: the folder whose own name does not count; by default the deepest one that holds all files.
    """
    if root is None:
        root = os.path.commonprefix(names).rpartition("/")[0]  # noqa: RUF071 (commonpath would change URLs)
    groups: dict[str, list[str]] = {}
    for name in names:
        parts = name.removeprefix(root).strip("/").split("/")[-2:]
        match = next(filter(None, map(_SPLIT.search, reversed(parts))), None)
        groups.setdefault(match[1].lower() if match else "", []).append(name)
    if "train" in groups and "" in groups:
        warn_of_left_out(tuple(groups[""]), "other files are named train")
    train = groups.get("train") or groups.get("", [])
    splits: dict[Split, list[str]] = {"train": train, "test": groups.get("val") or groups.get("test", [])}
    return {split: found for split, found in splits.items() if found}


@cache  # the splits are looked up more than once
def warn_of_left_out(names: tuple[str, ...], reason: str) -> None:
    more = f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)
    warn(f"left out: {', '.join(names[:_NAMED])}{more}, because {reason}; rename or move them")


def expand_braces(pattern: str) -> list[str]:
    """`a-{00..02}.tar` → a-00.tar, a-01.tar, a-02.tar; `{a,b}.tar` → a.tar, b.tar; as shells do."""
    parts = _BRACES.split(pattern)  # text and what is inside of braces by turns
    choices = [_choices(part, pattern) if number % 2 else [part] for number, part in enumerate(parts)]
    if math.prod(len(choice) for choice in choices) > _MOST_SHARDS:
        raise ValueError(f"{pattern!r} names more than {_MOST_SHARDS:,} shards; split it")
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _choices(inside: str, pattern: str) -> list[str]:
    if match := _RANGE.fullmatch(inside):
        first, last = int(match[1]), int(match[2])
        if first <= last < first + _MOST_SHARDS:
            width = len(match[1]) if match[1].startswith("0") else 0
            return [f"{number:0{width}d}" for number in range(first, last + 1)]
    elif "," in inside:
        return inside.split(",")
    raise ValueError(
        f"{{{inside}}} in {pattern!r} must be a list {{a,b}}, or a range {{000..099}} of at most {_MOST_SHARDS:,}"
    )


def _matches(name: str) -> list[str]:
    if not is_remote(name):
        path = str(Path(name).expanduser())
        return sorted(glob.glob(path)) if glob.has_magic(path) and not Path(path).exists() else [path]  # noqa: PTH207
    if glob.has_magic(name) and not name.startswith("http"):
        return _list_remote(name)
    if not name.partition("?")[0].endswith(".tar"):
        return [found for pattern in ("*.tar", "*/*.tar") for found in _list_remote(f"{name.rstrip('/')}/{pattern}")]
    return [name]


def retry(action: Callable[[], T], complaint: str, remedy: str) -> T:
    """A few tries, because networks fail occasionally; a ValueError after the last one."""
    for attempt in range(TRIES):
        try:
            return action()
        except OSError as error:
            if attempt == TRIES - 1:
                raise ValueError(f"{complaint} ({error.strerror or error}; {TRIES} tries); {remedy}") from error
            time.sleep(PAUSE * 2**attempt)
    raise AssertionError("the last try returns or raises")


def open_remote(url: str, expected: int | None = None) -> IO[bytes]:
    """The shard as a local file, fetched if it is not in the cache. Raises ValueError naming it after the last try.

    `expected`: its size, if an index says so. A file that others remove later stays readable once it is open.
    """
    room = _cache_bytes()
    folder = cache_folder("shards") / "fetched" / hashlib.sha256(url.encode()).hexdigest()[:20]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        remove_unfinished(folder)
        fetch = partial(_fetch, url, folder / Path(url.partition("?")[0]).name, expected, room)
        return retry(fetch, f"{url!r} cannot be fetched", "check the address and the network")


def _fetch(url: str, kept: Path, expected: int | None, room: int) -> IO[bytes]:
    """Open the file `kept`; if it is not there, or has another size than expected, fetch it first."""
    if not kept.exists() or expected not in (None, kept.stat().st_size):
        prune(kept.parents[1], max(0, room - (expected or 0)))
        with _os_errors(url), replacing(kept) as temporary:
            system, name = url_to_fs(url, **_options(url))
            system.get_file(name, str(temporary))
            if expected is None and not url.startswith("http"):  # over HTTP a short answer is an error already
                expected = system.size(name)
            size = temporary.stat().st_size
            if expected not in (None, size):
                raise OSError(f"{size} bytes arrived, not {expected}")
        prune(kept.parents[1], room, keep=kept)
    os.utime(kept, ns=(time.time_ns(),) * 2)  # used just now; the system's own clock is coarse
    return kept.open("rb", buffering=0)


def read_remote(url: str) -> bytes:
    """A small file, in one try. Raises OSError."""
    with _os_errors(url):
        system, name = url_to_fs(url, **_options(url))
        return bytes(system.cat_file(name))


def _list_remote(pattern: str) -> list[str]:
    """The files that match, with their protocol. Raises ValueError where the protocol cannot list."""
    if pattern.startswith("http"):
        raise ValueError(f"{pattern!r} cannot be listed; name the shards, such as train-{{000000..000099}}.tar")
    try:
        with _os_errors(pattern):
            system, path = url_to_fs(pattern)
            return sorted(str(system.unstrip_protocol(name)) for name in system.glob(path))
    except OSError as error:
        raise ValueError(f"{pattern!r} cannot be listed ({error}); check the address and the network") from error


@contextmanager
def _os_errors(url: str) -> Iterator[None]:
    """Each file system of fsspec has errors of its own; here they become an OSError, a missing package a ValueError."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError("no such file") from error
    except Exception as error:  # not to be listed: botocore's, gcsfs's, … belong to packages that need not be there
        status = getattr(error, "status", None)  # aiohttp's
        reason = f"HTTP {status}" if isinstance(status, int) else " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ImportError) or "Protocol not known" in reason:
            remedy = "install fsspec's package for its protocol, such as s3fs"
            raise ValueError(f"{url!r} cannot be fetched ({reason}); {remedy}") from error
        raise OSError(reason) from error


def _options(url: str) -> dict[str, Any]:
    """Options of fsspec: over HTTP a time limit for each answer, none for the whole file."""
    if not url.startswith("http"):
        return {}
    from aiohttp import ClientTimeout  # slow to import

    timeout = ClientTimeout(total=None, sock_connect=_TIMEOUT, sock_read=_TIMEOUT)
    return {"client_kwargs": {"timeout": timeout, "trust_env": True}}  # proxies from the environment


def _cache_bytes() -> int:
    """Bytes that fetched shards may take, from $PATCHMIX_CACHE_GB."""
    chosen = os.environ.get("PATCHMIX_CACHE_GB", "20")
    with suppress(ValueError):
        if 0 < float(chosen) < 1e9:
            return round(float(chosen) * 2**30)
    raise ValueError(f"PATCHMIX_CACHE_GB is {chosen!r}; it must be a number of gigabytes above 0")
