"""Average precision by pycocotools, for boxes and for masks, over all classes and for each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from rich.console import Console
from rich.table import Table
from rich.text import Text

from patchmix.evaluate.detection.coco import CocoImages, coco_of, silence
from patchmix.evaluate.detection.inference import Entry
from patchmix.evaluate.results import Result
from patchmix.files import write_text

KINDS = {"box": "bbox", "mask": "segm"}  # our names and pycocotools'
_STATS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")  # the first of COCOeval's twelve
_SHOWN = {"ap": "AP", "ap50": "AP50", "ap75": "AP75", "ap_small": "APs", "ap_medium": "APm", "ap_large": "APl"}


@dataclass(frozen=True)
class Scores:
    """`metrics`: box_ap, mask_ap50, … in 0…1; sizes without an object are left out. `classes`: a row for each class
    with its id, name, number of objects, box_ap and mask_ap (None without objects)."""

    metrics: dict[str, float]
    classes: list[dict[str, Any]]


def score(source: CocoImages, entries: Sequence[Entry]) -> Scores:
    """pycocotools' scores of detections in the images of `source`; all entries count for boxes and for masks."""
    metrics: dict[str, float] = {}
    classes = _class_rows(source)
    for name, kind in KINDS.items():
        truth = source.truth()
        with silence():
            evaluation = COCOeval(truth, _results(truth, part_of(entries, kind)), iouType=kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        for key, value in zip(_STATS, evaluation.stats[: len(_STATS)].tolist(), strict=True):
            if value >= 0:  # -1: no object of that size
                metrics[f"{name}_{key}"] = value
        precision = evaluation.eval["precision"][:, :, :, 0, -1]  # IoU thresholds × recalls × classes
        for k, row in enumerate(classes):
            known = precision[:, :, k][precision[:, :, k] > -1]
            row[f"{name}_ap"] = float(np.mean(known)) if known.size else None
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


def _results(truth: COCO, entries: list[Entry]) -> COCO:
    if entries:
        return truth.loadRes(entries)
    return coco_of(  # loadRes needs at least one
        {"images": truth.dataset["images"], "annotations": [], "categories": truth.dataset["categories"]}
    )


def _class_rows(source: CocoImages) -> list[dict[str, Any]]:
    counts = {category.id: 0 for category in source.categories}
    for index in range(len(source)):
        for annotation in source.annotations(index):
            counts[annotation["category_id"]] += not annotation["iscrowd"]
    return [{"id": c.id, "name": c.name, "objects": counts[c.id]} for c in source.categories]


def print_detection(result: Result, console: Console | None = None, *, classes: bool = True) -> None:
    """Box and mask AP in %, and with `classes` a row for each class that has objects, best first."""
    console = console or Console()
    console.print(Text(f"detection: {result.encoder} on {result.data}", style="bold"), soft_wrap=True)
    table = Table("", *_SHOWN.values())
    for name in KINDS:
        values = [result.metrics.get(f"{name}_{key}") for key in _STATS]
        table.add_row(name, *("–" if value is None else f"{100 * value:.1f}" for value in values))
    console.print(table)
    rows = [row for row in result.details.get("classes", []) if row["objects"]]
    if classes and rows:
        per_class = Table("class", "objects", "box AP", "mask AP")
        for row in sorted(rows, key=lambda row: -(row["box_ap"] or 0.0)):
            shown = ["–" if row[key] is None else f"{100 * row[key]:.1f}" for key in ("box_ap", "mask_ap")]
            per_class.add_row(row["name"], str(row["objects"]), *shown)
        console.print(per_class)
    console.print(Text(f"{result.images:,} images; weights {result.weights[:12]}"), soft_wrap=True)
