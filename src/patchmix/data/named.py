"""Sets known by name: a local copy is looked for, CIFAR is downloaded when there is none."""

import hashlib
import os
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np

from patchmix.data.contract import Split
from patchmix.data.memory import InMemorySource, from_array

_CIFAR_FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
_CIFAR_ARCHIVES = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}


def data_roots() -> list[Path]:
    """Where named sets are looked for, in this order: $PATCHMIX_DATA, ./data, ~/.cache/patchmix."""
    roots = [Path("data"), _cache_root()]
    chosen = os.environ.get("PATCHMIX_DATA")
    return [Path(chosen).expanduser(), *roots] if chosen else roots


def _cache_root() -> Path:
    return Path("~/.cache/patchmix").expanduser()


def find_folder(name: str) -> Path | None:
    """The first folder of this name below the data roots."""
    return next((root / name for root in data_roots() if (root / name).is_dir()), None)


def imagenet_root() -> Path:
    """The folder with ImageNet's train/ and val/."""
    found = find_folder("imagenet")
    if found is None:
        raise ValueError(
            f"'imagenet' is not in {_places()}; set PATCHMIX_DATA to the folder that holds imagenet/train and "
            "imagenet/val, or give that path itself"
        )
    return found


def cifar_source(name: str, split: Split) -> InMemorySource:
    """CIFAR-10 or CIFAR-100 in the authors' files, checked by md5, through torchvision."""
    dataset = _open_cifar(name, train=split == "train")
    images = np.asarray(dataset.data, np.uint8)
    digest = hashlib.sha256(f"{name}\0{split}\0{len(images)}".encode())
    return from_array(
        images,
        np.asarray(dataset.targets, np.int64),
        tuple(dataset.classes),
        name=f"{name} ({split})",
        prefix=f"{name}-{split}",
        fingerprint=digest.hexdigest()[:32],
    )


def _open_cifar(name: str, *, train: bool) -> Any:
    from torchvision import datasets  # slow to import, and needed here only

    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    for root in data_roots():
        unpacked = (root / _CIFAR_FOLDERS[name]).is_dir()
        packed = (root / _CIFAR_ARCHIVES[name]).is_file()
        if not (unpacked or packed):
            continue
        try:
            return kind(root, train=train, download=packed)
        except RuntimeError as error:
            shown = root / (_CIFAR_ARCHIVES[name] if packed else _CIFAR_FOLDERS[name])
            raise ValueError(f"{str(shown)!r} is incomplete or damaged (md5 differs); remove it") from error
    target = data_roots()[0] if os.environ.get("PATCHMIX_DATA") else _cache_root()
    try:
        target.mkdir(parents=True, exist_ok=True)
        return kind(target, train=train, download=True)
    except (URLError, OSError, RuntimeError) as error:
        reason = getattr(error, "reason", None) or error
        raise ValueError(
            f"{name!r} is not in {_places()} and cannot be downloaded ({reason}); put {_CIFAR_ARCHIVES[name]} from "
            "https://www.cs.toronto.edu/~kriz/cifar.html there, or use 'shapes', which needs no files"
        ) from error


def _places() -> str:
    return ", ".join(str(root) for root in data_roots())
