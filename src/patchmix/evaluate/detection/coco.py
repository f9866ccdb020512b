"""A folder in COCO's layout: its images and objects, checked against each other before any training starts."""

import contextlib
import hashlib
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from pycocotools import mask as rle
from pycocotools.coco import COCO

from patchmix.data.contract import Labels
from patchmix.data.decode import DecodeError, Pixels, decode

Mask = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Category:
    """A class under the id that the annotation file gives it; ids need not be consecutive."""

    id: int
    name: str


def names_of(categories: Sequence[Category]) -> dict[int, str]:
    """The classes' names by their category ids."""
    return {category.id: category.name for category in categories}


class CocoImages:
    """Images by position with their objects; a `Source` for the loader, and the truth for pycocotools.

    Labels are 1 … K in the order of category ids; 0 is the background. The annotations are kept as text in one array:
    reading COCO's 860,000 Python objects would copy them into every worker.
    """

    labels: Labels | None = None  # an image has many

    def __init__(self, folder: Path, annotations: Path) -> None:
        self._folder, self._file = folder, annotations
        dataset = _read(annotations)
        self.categories = _categories(dataset["categories"], annotations)
        self._label_of = {category.id: i + 1 for i, category in enumerate(self.categories)}
        images: list[dict[str, Any]] = dataset["images"]
        _check_images(images, folder, annotations)
        _check_once([a.get("id") for a in dataset["annotations"]], "annotation id", annotations)
        by_id = {entry["id"]: entry for entry in images}
        objects: dict[int, list[dict[str, Any]]] = {number: [] for number in by_id}
        for annotation in dataset["annotations"]:
            _check(annotation, by_id, self._label_of, annotations)
            objects[annotation["image_id"]].append(annotation)
        records = [json.dumps([entry, objects[entry["id"]]]).encode() for entry in images]
        self._ends = np.cumsum([len(record) for record in records])
        self._text = np.frombuffer(b"".join(records), np.uint8)
        self.chosen = np.arange(len(images))

    @property
    def name(self) -> str:
        return str(self._file.name)

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(category.name for category in self.categories)

    def __len__(self) -> int:
        return len(self.chosen)

    def key(self, index: int) -> str:
        return f"{self._folder.name}/{self.entry(index)['file_name']}"

    def load(self, index: int) -> Pixels:
        """uint8 (H, W, 3); a ValueError where its size is not the one in the annotation file."""
        entry, key = self.entry(index), self.key(index)
        try:
            data = (self._folder / entry["file_name"]).read_bytes()
        except OSError as error:
            raise DecodeError(key, error.strerror or "can't be read") from error
        pixels = decode(data, key)
        wanted = (entry["height"], entry["width"])
        if pixels.shape[:2] == wanted[::-1] != wanted:
            # Objects may have been marked on the pixels as they are stored, before any EXIF rotation.
            raw = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
            if raw is not None:
                pixels = np.ascontiguousarray(raw[:, :, ::-1])
        if pixels.shape[:2] != wanted:
            raise ValueError(
                f"{key} (image id {entry['id']}) is {pixels.shape[1]} × {pixels.shape[0]} px, but {self._file.name} "
                f"says {wanted[1]} × {wanted[0]}; use the annotations that were made for these images"
            )
        return pixels

    def fingerprint(self) -> str:
        """SHA-256 over images and objects as the file lists them, and which of them are used."""
        return hashlib.sha256(self._text.tobytes() + repr(self.categories).encode() + self.chosen.tobytes()).hexdigest()

    def entry(self, index: int) -> dict[str, Any]:
        """An image's id, file_name, height and width."""
        return self._record(index)[0]

    def annotations(self, index: int) -> list[dict[str, Any]]:
        """All annotations of an image, crowds and boxes without area included."""
        return self._record(index)[1]

    def objects(self, index: int) -> list[dict[str, Any]]:
        """The annotations to learn from: no crowds, no boxes without area inside the image."""
        entry, annotations = self._record(index)
        return [a for a in annotations if not a["iscrowd"] and _has_area(a["bbox"], entry)]

    def truth(self) -> COCO:
        """The chosen images and all their annotations; a new object each time, because pycocotools changes it."""
        records = [self._record(i) for i in range(len(self))]
        images, annotations = [entry for entry, _ in records], [one for _, objects in records for one in objects]
        categories = [vars(category) for category in self.categories]
        return coco_of({"images": images, "annotations": annotations, "categories": categories})

    def _record(self, index: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        number = int(self.chosen[index])
        start = self._ends[number - 1] if number else 0
        entry, annotations = json.loads(self._text[start : self._ends[number]].tobytes())
        return entry, annotations

    def label(self, annotation: dict[str, Any]) -> int:
        return self._label_of[annotation["category_id"]]

    def with_objects(self) -> "CocoImages":
        """The images with objects to learn from."""
        kept = [i for i in range(len(self)) if self.objects(i)]
        if not kept:
            raise ValueError(f"{self._file} has no object in any image; there is nothing to learn from")
        return self.only(kept)

    def only(self, positions: Sequence[int]) -> "CocoImages":
        """Some of the images, by position."""
        other = object.__new__(CocoImages)
        other.__dict__.update(self.__dict__)
        other.chosen = self.chosen[np.asarray(positions, np.int64)]
        return other


def open_split(data: Path, split: str, *, images: str | None = None, annotations: str | None = None) -> CocoImages:
    """`data`/SPLIT (such as train2017) with `data`/annotations/instances_SPLIT.json, or other names below `data`."""
    if not data.is_dir():
        raise ValueError(f"{data} is not a folder; give the one with train2017/, val2017/ and annotations/")
    return CocoImages(data / (images or split), data / (annotations or f"annotations/instances_{split}.json"))


def coco_of(dataset: dict[str, Any]) -> COCO:
    """pycocotools' object for a parsed file."""
    coco = COCO()
    coco.dataset = dataset
    with silence():
        coco.createIndex()
    return coco


def silence() -> contextlib.AbstractContextManager[Any]:
    """Without pycocotools' printed progress."""
    return contextlib.redirect_stdout(io.StringIO())


def mask_of(annotation: dict[str, Any], height: int, width: int) -> Mask:
    """uint8 (height, width) of 0 and 1, in the image's own pixels."""
    shape = annotation["segmentation"]
    if isinstance(shape, list):
        shape = rle.merge(rle.frPyObjects(shape, height, width))
    elif isinstance(shape["counts"], list):
        shape = rle.frPyObjects(shape, height, width)
    try:
        return np.asarray(rle.decode(shape), np.uint8)
    except ValueError as error:
        raise ValueError(
            f"annotation {annotation.get('id')} of image id {annotation.get('image_id')} has a mask that can't be "
            f"decoded ({error}); repair the annotation file"
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        dataset = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error.strerror}); give COCO's instances json") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not json ({str(error).splitlines()[0]}); is it complete?") from error
    for key in ("images", "annotations", "categories"):
        found = dataset.get(key) if isinstance(dataset, dict) else None
        if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
            raise ValueError(f"{path} has no list {key!r}; expected COCO's instances json")
    return dict(dataset)


def _categories(entries: Sequence[dict[str, Any]], path: Path) -> tuple[Category, ...]:
    for entry in entries:
        if not isinstance(entry.get("id"), int) or not isinstance(entry.get("name"), str):
            raise ValueError(f"{path}: category {entry} needs a whole number 'id' and a 'name'")
    if len({entry["id"] for entry in entries}) < len(entries) or not entries:
        raise ValueError(f"{path}: category ids must be given, each once; repair the file")
    return tuple(sorted((Category(entry["id"], entry["name"]) for entry in entries), key=lambda c: c.id))


def _check_images(images: Sequence[dict[str, Any]], folder: Path, path: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; it should hold the images that {path.name} lists")
    if not images:
        raise ValueError(f"{path} lists no images; give a file with at least one")
    present = {file.name for file in folder.iterdir()}
    for entry in images:
        number, name = entry.get("id"), entry.get("file_name")
        if not isinstance(number, int) or not isinstance(name, str):
            raise ValueError(f"{path}: image {entry} needs a whole number 'id' and a 'file_name'")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{path}: image {number} has file_name {name!r}; it must lie below the image folder")
        for side in ("height", "width"):
            if not isinstance(entry.get(side), int) or entry[side] < 1:
                size = f"has {side} {entry.get(side)}; it must be 1 or more"
                raise ValueError(f"{path}: {name} (image id {number}) {size}")
        if name not in present and not (folder / name).is_file():
            where = f"{folder / name} (image id {number} in {path.name})"
            raise ValueError(f"{where} does not exist; is this the right image folder?")
    _check_once([entry["id"] for entry in images], "image id", path)


def _check_once(ids: Sequence[Any], what: str, path: Path) -> None:
    seen = set()
    for one in ids:
        if not isinstance(one, int):
            raise ValueError(f"{path}: {what} {one!r} must be a whole number")
        if one in seen:
            raise ValueError(f"{path}: {what} {one} occurs twice; ids must differ")
        seen.add(one)


def _check(annotation: dict[str, Any], images: dict[int, Any], labels: dict[int, int], path: Path) -> None:
    """Names the image where something is wrong; fills in `iscrowd` and `area` where they are missing."""
    number, image_id = annotation["id"], annotation.get("image_id")
    if image_id not in images:
        raise ValueError(f"{path}: annotation {number} is for image id {image_id}, which is not in its images")
    entry = images[image_id]
    where = f"{path}: annotation {number} of {entry['file_name']} (image id {image_id})"
    if annotation.get("category_id") not in labels:
        raise ValueError(f"{where} has category {annotation.get('category_id')}, which is not in its categories")
    box = annotation.get("bbox")
    numbers = isinstance(box, list) and len(box) == 4 and all(isinstance(v, int | float) for v in box)
    if not numbers or not all(math.isfinite(v) for v in box or []):
        raise ValueError(f"{where} has bbox {box}; expected four numbers: x, y, width, height")
    if wrong := _wrong_shape(annotation.get("segmentation"), entry):
        raise ValueError(f"{where} {wrong}")
    annotation.setdefault("iscrowd", 0)
    if "area" not in annotation:
        annotation["area"] = float(mask_of(annotation, entry["height"], entry["width"]).sum())


def _wrong_shape(shape: Any, entry: dict[str, Any]) -> str | None:
    """What is wrong with a segmentation, or None."""
    if isinstance(shape, list) and shape:
        for polygon in shape:
            if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
                return "has a polygon that is not a list of at least three points x, y"
            if not all(isinstance(v, int | float) and math.isfinite(v) for v in polygon):
                return "has a polygon with something other than numbers"
        return None
    if isinstance(shape, dict):
        size = [entry["height"], entry["width"]]
        if shape.get("size") != size:
            return f"has a mask of size {shape.get('size')}, the image is {size}"
        counts = shape.get("counts")
        if isinstance(counts, list) and sum(counts) != size[0] * size[1]:
            return f"has a mask whose runs sum to {sum(counts)} px, the image has {size[0] * size[1]}"
        if not isinstance(counts, list | str):
            return "has a mask without counts"
        return None
    return "has no segmentation; Mask R-CNN learns masks, so every object needs one"


def _has_area(box: Sequence[float], entry: dict[str, Any]) -> bool:
    """Inside the image."""
    x, y, width, height = box
    return bool(min(x + width, entry["width"]) > max(x, 0) and min(y + height, entry["height"]) > max(y, 0))
