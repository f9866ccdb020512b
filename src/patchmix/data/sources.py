"""Where images come from: a name, a folder, parquet files or shards → a Source.

Splits are "train" and "test". In a folder, "test" is the first there is of val/, validation/, test/.
"""

import difflib
from pathlib import Path

from patchmix.data.contract import Source, Split
from patchmix.data.decode import DecodeError
from patchmix.data.folder import FolderSource, class_names
from patchmix.data.memory import InMemorySource, check_decodable, in_memory
from patchmix.data.named import cifar_source, find_folder, imagenet_root
from patchmix.data.parquet import ParquetSource
from patchmix.data.shapes import shapes_source
from patchmix.data.shard_names import by_split, find_shards, names_shards, shards_in
from patchmix.data.shards import open_shards

__all__ = [
    "DecodeError",
    "InMemorySource",
    "Source",
    "Split",
    "check_decodable",
    "has_split",
    "in_memory",
    "open_source",
]

NAMES = ("shapes", "cifar10", "cifar100", "imagenet")
FORMS = (
    f"a name ({', '.join(NAMES)}), a folder of images, a folder with train/ and val/, a parquet file or folder, "
    "or .tar shards (a folder, a pattern, URLs)"
)
_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("val", "validation", "test")}


def open_source(
    data: str | Path,
    split: Split = "train",
    *,
    class_folders: bool = False,
    cache_bytes: int = 2 << 30,
    progress: bool = True,
) -> Source:
    """Open one split of `data`; kept decoded in shared memory if it needs at most `cache_bytes`.

    `class_folders`: in a folder without train/, the first-level sub-folders are classes.
    """
    splits = _splits(data)
    if split not in splits:
        raise ValueError(f"{str(data)!r} has no split {split!r}; it has {', '.join(map(repr, splits))}")
    return in_memory(_open(data, split, class_folders, progress), cache_bytes, progress)


def has_split(data: str | Path, split: Split) -> bool:
    """Whether `open_source(data, split)` finds something to open."""
    return split in _splits(data)


def _open(data: str | Path, split: Split, class_folders: bool, progress: bool) -> Source:
    if isinstance(data, str) and _base_name(data) == "shapes":
        return shapes_source(split, _shapes_length(data) if split == "train" else None)
    title = f"{data} ({split})"
    if names_shards(str(data)):
        return open_shards(find_shards(str(data))[split], name=title, progress=progress)
    root = _local(data)
    if root is None:
        assert isinstance(data, str)
        return cifar_source(data, split)
    files = _parquet_files(root)
    if files:
        return ParquetSource(files[split], name=title)
    shards = shards_in(root)
    if shards:
        return open_shards(shards[split], name=title, progress=progress)
    folder = _split_folder(root, split)
    if folder is None:
        classes = class_names(root) if class_folders else None
        if class_folders and classes is None:
            raise ValueError(f"{str(root)!r} has images outside of sub-folders; move them, or leave out class folders")
        return FolderSource(root, name=title, classes=classes)
    train = _split_folder(root, "train")
    assert train is not None
    # Labels count in the order of the training classes, in every split.
    classes = class_names(train) if class_names(folder) is not None else None
    return FolderSource(folder, name=title, classes=classes)


def _splits(data: str | Path) -> tuple[Split, ...]:
    """The splits that `data` has; raises ValueError when it is nothing we know."""
    both: tuple[Split, ...] = ("train", "test")
    if isinstance(data, str) and _base_name(data) == "shapes":
        _shapes_length(data)
        return both
    if names_shards(str(data)):
        shards = find_shards(str(data))
        return tuple(split for split in both if split in shards)
    root = _local(data)
    if root is None:
        return both
    files = _parquet_files(root)
    if files:
        return tuple(split for split in both if split in files)
    if root.is_file():
        raise ValueError(f"{str(data)!r} is a file that is neither parquet nor a .tar; DATA is {FORMS}")
    shards = shards_in(root)
    if shards:
        return tuple(split for split in both if split in shards)
    if _split_folder(root, "train") is None:
        return ("train",)
    return tuple(split for split in both if _split_folder(root, split) is not None)


def _local(data: str | Path) -> Path | None:
    """The path that `data` means; None for a set that torchvision holds or fetches."""
    if data in ("cifar10", "cifar100"):
        folder = find_folder(str(data))
        return folder if folder is not None and _parquet_files(folder) else None
    if data == "imagenet":
        return imagenet_root()
    path = Path(data).expanduser()
    if not path.exists():
        raise ValueError(_unknown(str(data), path))
    return path


def _unknown(data: str, path: Path) -> str:
    neighbors = {str(path.parent / entry.name): entry.name for entry in _entries(path.parent)}
    close = difflib.get_close_matches(data, NAMES, n=1, cutoff=0.5)
    if not close:
        names = difflib.get_close_matches(path.name, list(neighbors.values()), n=1)
        close = [shown for shown, name in neighbors.items() if name in names][:1]
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"data {data!r} is neither a name nor a path that exists; {hint}DATA is {FORMS}"


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _base_name(data: str) -> str:
    return data.partition(":")[0]


def _shapes_length(data: str) -> int | None:
    _, colon, length = data.partition(":")
    if not colon:
        return None
    if not length.isdecimal() or int(length) == 0:
        raise ValueError(f"{data!r} needs a number of training images after the colon, such as 'shapes:5000'")
    return int(length)


def _split_folder(root: Path, split: Split) -> Path | None:
    return next((root / name for name in _FOLDERS[split] if (root / name).is_dir()), None)


def _parquet_files(root: Path) -> dict[Split, list[Path]]:
    """Parquet files by split, from how their names, or else their folders' names, begin; {} when there are none."""
    if root.is_file():
        return {"train": [root]} if root.suffix == ".parquet" else {}
    # Two levels are what the Hugging Face hub's layout needs; a deep folder of images is not searched.
    found = [path for pattern in ("*.parquet", "*/*.parquet") for path in sorted(root.glob(pattern))]
    found = [path for path in found if not path.relative_to(root).as_posix().startswith(".")]
    splits = by_split([str(path) for path in found], str(root))
    return {split: [Path(name) for name in names] for split, names in splits.items()}
