"""A folder in COCO's layout: images and objects, checked before training starts, and average precision on them."""

import copy
import hashlib
import io
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TypeGuard

import cv2
import numpy as np
import numpy.typing as npt
from pycocotools import mask as rle
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from patchmix.data.contract import Labels
from patchmix.data.decode import DecodeError, Pixels, decode
from patchmix.files import write_text
from patchmix.progress import progress_bar

Mask = npt.NDArray[np.uint8]
Dataset = dict[str, list[dict[str, Any]]]  # a parsed annotation file
Entry = dict[str, Any]  # a detection: image_id, category_id, bbox (x, y, width, height), score, segmentation
KINDS = {"box": "bbox", "mask": "segm"}  # our names and pycocotools'
STATS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")  # the first six of COCOeval's twelve


class CocoImages:
    """Images by position with their objects; a `Source` for the loader, and the truth for pycocotools.

    Labels are 1 … K in the order of category ids; 0 is the background. The annotations are kept as text in one array:
    reading COCO's 860,000 Python objects would copy them into every worker.
    """

    labels: Labels | None = None  # an image has many

    def __init__(self, folder: Path, annotations: Path, dataset: Dataset | None = None) -> None:
        self._folder, self._file = folder, annotations
        self.name = annotations.name
        dataset = dataset or read_dataset(annotations)
        if problem := next(_problems(dataset, folder), None):
            raise ValueError(f"{annotations}: {problem}")
        names = {category["id"]: category["name"] for category in dataset["categories"]}
        self.categories: dict[int, str] = dict(sorted(names.items()))
        self.classes = tuple(self.categories.values())
        self._label_of = {number: i + 1 for i, number in enumerate(self.categories)}
        objects: dict[int, list[dict[str, Any]]] = {entry["id"]: [] for entry in dataset["images"]}
        for annotation in dataset["annotations"]:
            objects[annotation["image_id"]].append(annotation)
        records = [json.dumps([entry, objects[entry["id"]]]).encode() for entry in dataset["images"]]
        self._ends = np.cumsum([len(record) for record in records])
        self._text = np.frombuffer(b"".join(records), np.uint8)
        self.chosen = np.arange(len(records))

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
                f"{key} (image id {entry['id']}) is {pixels.shape[1]} × {pixels.shape[0]} px, but {self.name} "
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

        def has_area(x: float, y: float, width: float, height: float) -> bool:
            right, bottom = min(x + width, entry["width"]), min(y + height, entry["height"])
            return bool(right > max(x, 0) and bottom > max(y, 0))

        return [a for a in annotations if not a["iscrowd"] and has_area(*a["bbox"])]

    def truth(self) -> COCO:
        """The chosen images and all their annotations; a new object each time, because pycocotools changes it."""
        records = [self._record(i) for i in range(len(self))]
        images, objects = [entry for entry, _ in records], [one for _, some in records for one in some]
        # Numbered from 1, because pycocotools takes an object with id 0 for one that was not found.
        annotations = [one | {"id": number} for number, one in enumerate(objects, 1)]
        categories = [{"id": number, "name": name} for number, name in self.categories.items()]
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
        other = copy.copy(self)
        other.chosen = self.chosen[kept]
        return other


def open_split(data: Path, split: str) -> CocoImages:
    """`data`/SPLIT, such as train2017, with `data`/annotations/instances_SPLIT.json."""
    if not data.is_dir():
        raise ValueError(f"{data} is not a folder; give the one with train2017/, val2017/ and annotations/")
    return CocoImages(data / split, data / f"annotations/instances_{split}.json")


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


def score(source: CocoImages, entries: Sequence[Entry]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """pycocotools' scores of detections in the images of `source`; all entries count for boxes and for masks.

    Metrics: box_ap, mask_ap50, … in 0…1; sizes without an object are left out. And a row for each class with its id,
    name, number of objects, box_ap and mask_ap (None without objects).
    """
    metrics: dict[str, float] = {}
    objects = Counter(a["category_id"] for a in source.truth().dataset["annotations"] if not a["iscrowd"])
    classes: list[dict[str, Any]] = [{"id": i, "name": n, "objects": objects[i]} for i, n in source.categories.items()]
    for name, kind in KINDS.items():
        truth, part = source.truth(), part_of(entries, kind)
        with progress_bar(f"average precision of {name}", None), redirect_stdout(io.StringIO()):
            # loadRes needs at least one detection
            detections = truth.loadRes(part) if part else coco_of(truth.dataset | {"annotations": []})
            evaluation = COCOeval(truth, detections, iouType=kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        found = zip(STATS, evaluation.stats.tolist(), strict=False)
        metrics |= {f"{name}_{key}": value for key, value in found if value >= 0}  # -1: no object of that size
        precision = evaluation.eval["precision"][:, :, :, 0, -1]  # IoU thresholds × recalls × classes
        for row, values in zip(classes, np.moveaxis(precision, 2, 0), strict=True):
            row[f"{name}_ap"] = float(np.mean(values[values > -1])) if (values > -1).any() else None
    return metrics, classes


def part_of(entries: Sequence[Entry], kind: str) -> list[Entry]:
    """The entries with either boxes ("bbox") or masks ("segm") only.

    pycocotools sorts entries with both into small, medium and large by the area of the box, also for masks.
    """
    dropped = {"bbox": "segmentation", "segm": "bbox"}[kind]
    return [{key: value for key, value in entry.items() if key != dropped} for entry in entries]


def save_detections(folder: Path, entries: Sequence[Entry]) -> None:
    """detections.bbox.json and detections.segm.json: what COCO's own tools and server take."""
    for kind in KINDS.values():
        write_text(folder / f"detections.{kind}.json", json.dumps(part_of(entries, kind)))


def coco_of(dataset: dict[str, Any]) -> COCO:
    """pycocotools' object for a parsed file."""
    coco = COCO()
    coco.dataset = dataset
    with redirect_stdout(io.StringIO()):  # it prints its progress
        coco.createIndex()
    return coco


def read_dataset(path: Path) -> Dataset:
    """The parsed file, whose images, annotations and categories are lists."""
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


def _problems(dataset: Dataset, folder: Path) -> Iterator[str]:
    """What is wrong with an annotation file, image by image; fills in `iscrowd` and `area` where they are missing."""
    if not folder.is_dir():
        yield f"{folder} is not a folder; it should hold the images that the file lists"
    for kind, needs in (("categories", "name"), ("images", "file_name"), ("annotations", None)):
        if not dataset[kind] and needs:
            yield f"the file lists no {kind}; give one with at least one"
        for entry in dataset[kind]:
            if not isinstance(entry.get("id"), int) or (needs and not isinstance(entry.get(needs), str)):
                yield f"{str(entry)[:200]} in {kind} needs a whole number 'id'" + (f" and a {needs!r}" if needs else "")
        if twice := [number for number, count in Counter(e["id"] for e in dataset[kind]).items() if count > 1]:
            yield f"id {twice[0]} occurs twice in {kind}; ids must differ"
    images = {entry["id"]: entry for entry in dataset["images"]}
    categories = {entry["id"] for entry in dataset["categories"]}
    present = {file.name for file in folder.iterdir()}
    for number, entry in images.items():
        name = entry["file_name"]
        for side in ("height", "width"):
            if not isinstance(entry.get(side), int) or entry[side] < 1:
                yield f"{name} (image id {number}) has {side} {entry.get(side)}; it must be 1 or more"
        if Path(name).is_absolute() or ".." in Path(name).parts:
            yield f"image {number} has file_name {name!r}; it must lie below the image folder"
        if name not in present and not (folder / name).is_file():
            yield f"{folder / name} (image id {number}) does not exist; is this the right image folder?"
    for annotation in dataset["annotations"]:
        number, image_id = annotation["id"], annotation.get("image_id")
        if image_id not in images:
            yield f"annotation {number} is for image id {image_id}, which is not in its images"
        entry = images[image_id]
        if wrong := _wrong_object(annotation, entry, categories):
            yield f"annotation {number} of {entry['file_name']} (image id {image_id}) {wrong}"
        annotation["iscrowd"] = annotation.get("iscrowd") or 0
        if annotation.get("area") is None:
            annotation["area"] = float(mask_of(annotation, entry["height"], entry["width"]).sum())


def _wrong_object(annotation: dict[str, Any], entry: dict[str, Any], categories: set[int]) -> str | None:
    """What is wrong with an object of the image `entry`, or None."""
    if annotation.get("category_id") not in categories:
        return f"has category {annotation.get('category_id')}, which is not in its categories"
    box, shape = annotation.get("bbox"), annotation.get("segmentation")
    if not _numbers(box) or len(box) != 4:
        return f"has bbox {box}; expected four numbers: x, y, width, height"
    if isinstance(shape, list) and shape:
        if not all(_numbers(polygon) and len(polygon) >= 6 and len(polygon) % 2 == 0 for polygon in shape):
            return "has a polygon that is not a list of numbers x, y of at least three points"
    elif isinstance(shape, dict):
        height, width, counts = entry["height"], entry["width"], shape.get("counts")
        if shape.get("size") != [height, width]:
            return f"has a mask of size {shape.get('size')}, the image is {[height, width]}"
        if not isinstance(counts, list | str):
            return "has a mask without counts"
        if isinstance(counts, list) and sum(counts) != height * width:
            return f"has a mask whose runs sum to {sum(counts)} px, the image has {height * width}"
    else:
        return "has no segmentation; Mask R-CNN learns masks, so every object needs one"
    return None


def _numbers(values: Any) -> TypeGuard[list[float]]:
    return isinstance(values, list) and all(isinstance(v, int | float) and math.isfinite(v) for v in values)
