"""Which shards a DATA means: a .tar, a folder, a glob, braces, URLs → file names by split."""

import glob
import os
import re
from collections.abc import Iterable
from pathlib import Path

from patchmix.data.contract import Split
from patchmix.data.decode import EXTENSIONS
from patchmix.data.remote import is_remote, list_remote, pipe_words

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST_SHARDS = 100_000
_WORDS = ("train", "validation", "val", "test")


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
        if name.startswith("pipe:"):
            pipe_words(name)
        elif not is_remote(name) and not Path(name).is_file():
            raise ValueError(f"shard {name!r} is missing; check the pattern, or leave it out")
    return {"train": names} if len(names) == 1 and names[0] == data else by_split(names)


def shards_in(root: Path) -> dict[Split, list[str]]:
    """The shards of a local folder, by split; {} where images lie beside them, or where there are none."""
    found = [path for pattern in ("*.tar", "*/*.tar") for path in sorted(root.glob(pattern))]
    found = [path for path in found if not path.relative_to(root).as_posix().startswith(".")]
    if not found or any(_has_images(folder) for folder in {root, *(path.parent for path in found)}):
        return {}
    return by_split([str(path) for path in found], str(root))


def by_split(names: Iterable[str], root: str = "") -> dict[Split, list[str]]:
    """Files by how their names, or else their folders' names, begin; all are for training where none tells."""
    groups: dict[str, list[str]] = {}
    names = list(names)
    for name in names:
        below = name.removeprefix(root).replace(os.sep, "/").rstrip(" -")
        parts = below.rpartition(" ")[2].strip("/").split("/")
        for part in reversed(parts[-2:]):
            word = next((w for w in _WORDS if part.startswith(w)), None)
            if word is not None:
                groups.setdefault("val" if word == "validation" else word, []).append(name)
                break
    if names and not groups:
        return {"train": names}
    splits: dict[Split, list[str]] = {}
    if "train" in groups:
        splits["train"] = groups["train"]
    test = groups.get("val") or groups.get("test")
    if test:
        splits["test"] = test
    return splits


def expand_braces(pattern: str) -> list[str]:
    """`a-{00..02}.tar` → a-00.tar, a-01.tar, a-02.tar; `{a,b}.tar` → a.tar, b.tar; as shells do."""
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    inside = match.group(1)
    numbers = _RANGE.fullmatch(inside)
    if numbers is not None:
        first, last = int(numbers[1]), int(numbers[2])
        if not first <= last < first + _MOST_SHARDS:
            raise ValueError(f"{{{inside}}} in {pattern!r} must count upwards, to at most {_MOST_SHARDS:,} shards")
        width = len(numbers[1]) if numbers[1].startswith("0") else 0
        choices = [f"{number:0{width}d}" for number in range(first, last + 1)]
    elif "," in inside:
        choices = inside.split(",")
    else:
        raise ValueError(f"{{{inside}}} in {pattern!r} is neither a range such as {{000..099}} nor a list {{a,b}}")
    rest = expand_braces(pattern[match.end() :])
    if len(choices) * len(rest) > _MOST_SHARDS:
        raise ValueError(f"{pattern!r} names more than {_MOST_SHARDS:,} shards; split it")
    return [pattern[: match.start()] + choice + end for choice in choices for end in rest]


def _matches(name: str) -> list[str]:
    if name.startswith("pipe:"):
        return [name]
    if not is_remote(name):
        path = str(Path(name).expanduser())
        return sorted(glob.glob(path)) if glob.has_magic(path) and not Path(path).exists() else [path]  # noqa: PTH207
    if glob.has_magic(name) and not name.startswith("http"):
        return list_remote(name)
    if not name.partition("?")[0].endswith(".tar"):
        return [found for pattern in ("*.tar", "*/*.tar") for found in list_remote(f"{name.rstrip('/')}/{pattern}")]
    return [name]


def _has_images(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(entry.name.lower().endswith(EXTENSIONS) and not entry.name.startswith(".") for entry in entries)
