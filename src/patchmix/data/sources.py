"""Where images come from: a name, a folder, parquet files or shards → a Source.

Splits are "train" and "test". In a folder, "test" is the first there is of val/, valid/, validation/, test/. Sets known
by name are looked for in some folders; CIFAR is downloaded when it is in none of them.
"""

import difflib
import hashlib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.error import URLError

import numpy as np
from filelock import FileLock

from patchmix.data.contract import EncodedSource, Source, Split
from patchmix.data.decode import DecodeError, pixel_channels
from patchmix.data.folder import FolderSource, class_names
from patchmix.data.memory import InMemorySource, from_array, in_memory
from patchmix.data.parquet import ParquetSource, parquet_files
from patchmix.data.python import PREFIX, given
from patchmix.data.shapes import shapes_source
from patchmix.data.shard_files import find_shards, first_image, names_shards, shards_in, warn_of_left_out
from patchmix.data.shards import open_shards
from patchmix.files import cache_folder

NAMES = ("shapes", "cifar10", "cifar100", "imagenet")
FORMS = (
    f"a name ({', '.join(NAMES)}), a folder of images, a folder with train/ and val/, a parquet file or folder, "
    "or .tar shards (a folder, a pattern, URLs)"
)
SPLITS: tuple[Split, ...] = ("train", "test")
_FOLDERS: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training", "Train", "Training"),
    "test": ("val", "valid", "validation", "test", "testing", "Val", "Valid", "Validation", "Test", "Testing"),
}
_CIFAR = ("cifar10", "cifar100")


def open_source(
    data: str | Path,
    split: Split = "train",
    *,
    class_folders: bool = False,
    cache_bytes: int = 2 << 30,
    in_chans: int = 3,
) -> Source:
    """Open one split of `data` for an encoder of `in_chans`; kept decoded in shared memory up to `cache_bytes`.

    `class_folders`: in a folder without train/, the first-level sub-folders are classes if all images lie in them.
    """
    openers = _openers(data, class_folders)
    if split not in openers:
        raise ValueError(f"{str(data)!r} has no split {split!r}; it has {', '.join(map(repr, openers))}")
    source, channels = openers[split](), pixel_channels(in_chans)
    if isinstance(source, EncodedSource):
        source.channels = channels
    elif len(source):
        with suppress(DecodeError):  # said elsewhere
            shape = source.load(0).shape
            if shape[2] != channels:
                remedy = f"give other data, or an encoder with --in-chans {shape[2]}"
                if shape[0] in (1, channels):
                    remedy = "arrays are (N, H, W, C); for (N, C, H, W) pass a tensor"
                raise ValueError(
                    f"{source.name} has images of {shape[2]} channels, the encoder takes {in_chans}; {remedy}"
                )
    return in_memory(source, cache_bytes)


def has_split(data: str | Path, split: Split) -> bool:
    """Whether `open_source(data, split)` finds something to open."""
    return split in _openers(data)


def _openers(data: str | Path, class_folders: bool = False) -> dict[Split, Callable[[], Source]]:
    """The splits that `data` has, and how to open each; raises ValueError when it is nothing we know."""
    titles = {split: f"{data} ({split})" for split in SPLITS}
    if str(data).partition(":")[0] == "shapes":
        if (match := re.fullmatch(r"shapes(:0*[1-9]\d*)?", str(data))) is None:
            raise ValueError(f"{data!r} needs a number of training images after the colon, such as 'shapes:5000'")
        length = int(match[1][1:]) if match[1] else None
        return {"train": lambda: shapes_source("train", length), "test": lambda: shapes_source("test")}
    if str(data).startswith(PREFIX):
        return {split: lambda source=source: source for split, source in given(str(data)).items()}  # type: ignore[misc]
    root = None if names_shards(str(data)) else _local(data)
    if root is None and data in _CIFAR:
        return {split: partial(_cifar_source, str(data), split) for split in SPLITS}
    if root is not None and (files := parquet_files(root)):
        return {split: partial(ParquetSource, paths, name=titles[split]) for split, paths in files.items()}
    if root is not None and root.is_file():
        raise ValueError(f"{str(data)!r} is a file that is neither parquet nor a .tar; DATA is {FORMS}")
    if shards := find_shards(str(data)) if root is None else shards_in(root):
        return {s: partial(open_shards, names, name=titles[s]) for s, names in shards.items()}
    assert root is not None, "shards are found, or an error is raised"
    found = {split: [root / name for name in names if (root / name).is_dir()] for split, names in _FOLDERS.items()}
    folders = {split: places[0] for split, places in found.items() if places}
    if "train" not in folders:
        classes = class_names(root) if class_folders else None
        return {"train": partial(FolderSource, root, name=titles["train"], classes=classes)}
    if "test" not in folders:  # train/ may be a class
        others = [path for path in sorted(root.glob("[!.]*")) if path not in found["train"] and first_image(path)]
        if others:
            warn_of_left_out(tuple(map(str, others)), f"{folders['train']} holds the training images")
    return {split: partial(_open_split, folders, split, f"{data} ({folders[split].name})") for split in folders}


def _open_split(folders: dict[Split, Path], split: Split, title: str) -> Source:
    # Labels count in the order of the training classes, in every split.
    classes = class_names(folders["train"]) if class_names(folders[split]) is not None else None
    return FolderSource(folders[split], name=title, classes=classes)


def _local(data: str | Path) -> Path | None:
    """The path that `data` means; None for a set that torchvision holds or fetches."""
    if data in (*_CIFAR, "imagenet"):
        roots = _data_roots()
        folder = next((root / data for root in roots if (root / data).is_dir()), None)
        if folder is None and data == "imagenet":
            raise ValueError(
                f"'imagenet' is not in {', '.join(map(str, roots))}; set PATCHMIX_DATA to the folder that holds "
                "imagenet/train and imagenet/val, or give that path itself"
            )
        return folder if folder is not None and (data == "imagenet" or parquet_files(folder)) else None
    path = Path(data).expanduser()
    if path.exists():
        return path
    close = difflib.get_close_matches(str(data), NAMES, n=1, cutoff=0.5)
    if not close and path.parent.is_dir():
        names = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1)  # noqa: PTH208 (names are enough)
        close = [str(path.parent / name) for name in names]
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ValueError(f"data {str(data)!r} is neither a name nor a path that exists; {hint}DATA is {FORMS}")


def _data_roots() -> list[Path]:
    """Where sets known by name are looked for, in this order: $PATCHMIX_DATA, ./data, the cache."""
    chosen = os.environ.get("PATCHMIX_DATA")
    cache = cache_folder("data")  # version 0.1 kept them in its parent
    return [*([Path(chosen).expanduser()] if chosen else []), Path("data"), cache.parent, cache]


def _cifar_source(name: str, split: Split) -> InMemorySource:
    """CIFAR-10 or CIFAR-100 in the authors' files, checked by md5, through torchvision."""
    from torchvision import datasets  # slow to import, and needed here only

    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    roots = _data_roots()
    held = [root / file for root in roots for file in (kind.filename, kind.base_folder) if (root / file).exists()]
    root = held[0].parent if held else roots[0 if os.environ.get("PATCHMIX_DATA") else -1]
    opened = partial(kind, root, train=split == "train")
    try:
        root.mkdir(parents=True, exist_ok=True)
        try:
            dataset = opened()
        except RuntimeError:  # not unpacked, or not completely
            if held and held[0].is_dir():
                raise
            with FileLock(root / f".{name}.lock"):  # torchvision unpacks in place, unless another process has done it
                dataset = opened(download=True)
    except (URLError, OSError, RuntimeError) as error:
        if held:
            raise ValueError(f"{str(held[0])!r} is incomplete or damaged (md5 differs); remove it") from error
        reason = getattr(error, "reason", None) or error
        raise ValueError(
            f"{name!r} is not in {', '.join(map(str, roots))} and cannot be downloaded ({reason}); put {kind.filename} "
            "from https://www.cs.toronto.edu/~kriz/cifar.html there, or use 'shapes', which needs no files"
        ) from error
    return from_array(
        np.asarray(dataset.data, np.uint8),
        np.asarray(dataset.targets, np.int64),
        tuple(dataset.classes),
        name=f"{name} ({split})",
        prefix=f"{name}-{split}",
        fingerprint=hashlib.sha256(f"{name}\0{split}\0{len(dataset.data)}".encode()).hexdigest()[:32],
    )
