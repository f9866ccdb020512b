"""Average precision by pycocotools, for boxes and for masks, over all classes and for each."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools.cocoeval import COCOeval

from patchmix.evaluate.detection.coco import CocoImages, coco_of, silence
from patchmix.evaluate.detection.inference import Entry
from patchmix.evaluate.results import AP_NAMES
from patchmix.files import write_text

KINDS = {"box": "bbox", "mask": "segm"}  # our names and pycocotools'


@dataclass(frozen=True)
class Scores:
    """`metrics`: box_ap, mask_ap50, … in 0…1; sizes without an object are left out. `classes`: a row for each class
    with its id, name, number of objects, box_ap and mask_ap (None without objects)."""

    metrics: dict[str, float]
    classes: list[dict[str, Any]]


def score(source: CocoImages, entries: Sequence[Entry]) -> Scores:
    """pycocotools' scores of detections in the images of `source`; all entries count for boxes and for masks."""
    metrics: dict[str, float] = {}
    counts = Counter(a["category_id"] for a in source.truth().dataset["annotations"] if not a["iscrowd"])
    classes: list[dict[str, Any]] = [
        {"id": number, "name": title, "objects": counts[number]} for number, title in source.categories.items()
    ]
    for name, kind in KINDS.items():
        truth = source.truth()
        with silence():
            part = part_of(entries, kind)  # loadRes needs at least one
            detections = truth.loadRes(part) if part else coco_of(truth.dataset | {"annotations": []})
            evaluation = COCOeval(truth, detections, iouType=kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        # the first six of COCOeval's twelve
        for key, value in zip(AP_NAMES, evaluation.stats.tolist(), strict=False):
            if value >= 0:  # -1: no object of that size
                metrics[f"{name}_{key}"] = value
        precision = evaluation.eval["precision"][:, :, :, 0, -1]  # IoU thresholds × recalls × classes
        for k, row in enumerate(classes):
            found = precision[:, :, k][precision[:, :, k] > -1]
            row[f"{name}_ap"] = float(np.mean(found)) if found.size else None
    return Scores(metrics, classes)


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
