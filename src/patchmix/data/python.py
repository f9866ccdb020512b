"""Data that a Python program has in its hands → a Source, and a name for it that fits into a configuration.

A `torch.utils.data.Dataset` of images or (image, label), a Hugging Face `datasets.Dataset`, an array or tensor of
images, a list of image files, or a dictionary of such things under "train" and "test". An image is a PIL image, an
array (H, W, C) or (H, W), or a tensor (C, H, W); uint8, uint16 or floats, which are in [0, 1] if they are RGB or gray.
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from patchmix.data.contract import Labels, Source
from patchmix.data.decode import DecodeError, Pixels, as_pixels, to_rgb, to_unit
from patchmix.data.folder import FolderSource
from patchmix.data.memory import from_array
from patchmix.progress import progress_bar

PREFIX = "python:"
_GIVEN: dict[str, dict[str, Source]] = {}
_ONE_AT_A_TIME = threading.Lock()  # not every dataset supports threads
_SAMPLED = 64  # images that a dataset of unknown content is recognized by


def name_of(data: Any) -> str:
    """What a configuration calls `data`: a name or path as it is, anything else by its kind and fingerprint."""
    if isinstance(data, str | Path):
        return str(data)
    splits = dict(data) if isinstance(data, Mapping) else {"train": data}
    if not {"train"} <= splits.keys() <= {"train", "test"}:
        raise ValueError(f"data has the splits {', '.join(map(str, splits))}; name them train and, if any, test")
    sources: dict[str, Source] = {split: _source(part, split) for split, part in splits.items()}
    digest = hashlib.sha256("".join(source.fingerprint() for source in sources.values()).encode()).hexdigest()
    name = f"{PREFIX}{type(splits['train']).__name__}-{digest[:12]}"
    _GIVEN[name] = sources
    return name


def given(name: str) -> dict[str, Source]:
    """The splits of what `name_of` named in this process."""
    if name not in _GIVEN:
        raise ValueError(f"{name} is data of a Python program; call patchmix from Python with the same data again")
    return _GIVEN[name]


def _source(data: Any, split: str) -> Source:
    kind = "images" if isinstance(data, np.ndarray | Tensor | tuple | list) else type(data).__name__
    title = f"{kind} ({split})"
    if isinstance(data, np.ndarray | Tensor):
        return _array(data, None, title)
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], np.ndarray | Tensor):
        return _array(data[0], _labels(data[1], len(data[0])), title)
    if hasattr(data, "column_names") and hasattr(data, "features"):
        return _hugging_face(data, title)
    if isinstance(data, Sequence) and not isinstance(data, str) and data and isinstance(data[0], str | Path):
        return FolderSource(Path(), name=title, files=data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return _dataset(data, title)
    raise ValueError(
        f"data is a {type(data).__name__}; it must be a name or path, an array of images, a list of image files, or a "
        "dataset with a length and items that are images or (image, label)"
    )


def _array(images: Any, labels: Labels | None, title: str) -> Source:
    if images.ndim not in (3, 4) or len(images) == 0:
        raise ValueError(
            f"the array has the shape {tuple(images.shape)}; expected (N, H, W, C), or (N, C, H, W) as tensor"
        )
    found = [pixels_of(image) for image in images]
    same = len({pixels.dtype for pixels in found}) == 1
    pixels = np.stack(found if same else [to_unit(pixels) for pixels in found])
    digest = hashlib.sha256(pixels.data)
    digest.update(repr(pixels.shape).encode() + (b"" if labels is None else labels.tobytes()))
    return from_array(pixels, labels, None, name=title, prefix="array", fingerprint=digest.hexdigest()[:32])


def _labels(values: Any, images: int) -> Labels:
    """An integer for each image: (images,). Raises ValueError for anything else, such as names or measurements."""
    if len(values) != images:
        raise ValueError(f"there are {images} images and {len(values)} labels; give one label for each image")
    with suppress(TypeError, ValueError):
        labels = np.asarray(values.cpu() if isinstance(values, Tensor) else values)
        if labels.ndim == 1 and labels.dtype.kind in "biuf" and (labels % 1 == 0).all():
            return labels.astype(np.int64)
    kind = type(next(iter(values))).__name__
    raise ValueError(f"labels are of type {kind}; give an integer for each image, or the images without labels")


def pixels_of(image: Any, key: str = "an image") -> Pixels:
    """One image as (H, W, C); C is 3 for gray, too."""
    if isinstance(image, Image.Image) and image.mode.startswith("I;16"):
        image = np.asarray(image)
    if isinstance(image, Image.Image):
        return np.ascontiguousarray(to_rgb(image), dtype=np.uint8)
    if isinstance(image, Tensor):
        image = (image.permute(1, 2, 0) if image.ndim == 3 else image).detach().cpu()
        image = (image.float() if image.is_floating_point() else image).numpy()
    if not isinstance(image, np.ndarray) or image.ndim not in (2, 3):
        kind = f"has the shape {image.shape}" if isinstance(image, np.ndarray) else f"is a {type(image).__name__}"
        raise DecodeError(key, f"it {kind}; expected a PIL image, an array (H, W, C) or (H, W), or a tensor (C, H, W)")
    channels = 1 if image.ndim == 2 else image.shape[2]
    pixels = as_pixels(image, key, 3 if channels == 1 else channels)
    if pixels.dtype == np.float32 and pixels.min() >= 0 and pixels.max() <= 1:
        bytes_: Pixels = np.rint(pixels * 255).astype(np.uint8)
        if np.abs(bytes_ / np.float32(255) - pixels).max() < 1e-6:  # as torchvision's ToTensor makes it
            return bytes_
    return pixels


def _hugging_face(data: Any, title: str) -> Source:
    kinds = {name: type(feature).__name__ for name, feature in data.features.items()}

    def column(kind: str, *names: str) -> str | None:
        of_kind = [name for name in kinds if kinds[name] == kind]
        return next(iter(of_kind or [name for name in names if name in kinds]), None)

    image, label = column("Image", "image", "img"), column("ClassLabel", "label", "labels")
    if image is None:
        raise ValueError(f"none of the columns {', '.join(kinds)} holds images; cast one to datasets.Image()")
    labels = None if label is None else _labels(data[label], len(data))
    classes = tuple(getattr(data.features.get(label), "names", None) or ()) or None
    return Items(title, data, image, labels, classes, getattr(data, "_fingerprint", None))


def _dataset(data: Any, title: str) -> Source:
    if len(data) == 0:
        raise ValueError(f"{title} is empty; give at least one image")
    if not isinstance(data[0], tuple | list):
        return Items(title, data)
    labels = next((getattr(data, name) for name in ("targets", "labels") if hasattr(data, name)), None)
    if labels is None or len(labels) != len(data) or getattr(data, "target_transform", None) is not None:
        with progress_bar(f"labels of {title}", len(data)) as advance:
            labels = [(data[i][1], advance(1))[0] for i in range(len(data))]
    classes = getattr(data, "classes", None)
    names = tuple(map(str, classes)) if isinstance(classes, list | tuple) else None
    return Items(title, data, 0, _labels(labels, len(data)), names)


@dataclass(eq=False)
class Items:
    """The images of a dataset."""

    name: str
    data: Any
    field: int | str | None = None  # of an item, that is the image; None: the item itself
    labels: Labels | None = None
    classes: tuple[str, ...] | None = None
    identity: str | None = None  # the fingerprint; by default that of a sample

    def __len__(self) -> int:
        return len(self.data)

    def load(self, index: int) -> Pixels:
        try:
            with _ONE_AT_A_TIME:
                item = self.data[index]
            return pixels_of(item if self.field is None else item[self.field], self.key(index))
        except DecodeError:
            raise
        except (OSError, SyntaxError, ValueError) as error:  # Pillow's, of a damaged file
            raise DecodeError(self.key(index), " ".join(str(error).split())) from error

    def key(self, index: int) -> str:
        return f"#{index}"

    def fingerprint(self) -> str:
        if not self.identity:
            digest = hashlib.sha256(f"{len(self)}".encode() + (b"" if self.labels is None else self.labels.tobytes()))
            for index in np.linspace(0, len(self) - 1, min(_SAMPLED, len(self))).round().astype(int).tolist():
                try:
                    digest.update(self.load(index).tobytes())
                except DecodeError:
                    digest.update(b"bad")
            self.identity = digest.hexdigest()[:32]
        return self.identity
