"""Average precision: perfect detections, pycocotools by hand, and what is easily got wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools import mask as rle
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from rich.console import Console

from patchmix.evaluate.detection.coco import CocoImages, coco_of, mask_of, open_split, save_detections, score
from patchmix.evaluate.results import Result, print_result

NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


def truth_as_detections(source: CocoImages) -> list[dict[str, Any]]:
    entries = []
    for index in range(len(source)):
        entry = source.entry(index)
        for annotation in source.annotations(index):
            if not annotation["iscrowd"]:
                coded = rle.encode(np.asfortranarray(mask_of(annotation, entry["height"], entry["width"])))
                shape = {"size": coded["size"], "counts": coded["counts"].decode()}
                kept = {key: annotation[key] for key in ("image_id", "category_id", "bbox")}
                entries.append({**kept, "segmentation": shape, "score": 0.9})
    return entries


def disturbed(source: CocoImages) -> list[dict[str, Any]]:
    """The truth with shifted boxes and masks, some of it missing, some wrong classes, random scores."""
    generator = np.random.default_rng(0)
    ids = list(source.categories)
    entries = []
    for entry in truth_as_detections(source):
        if generator.random() < 0.2:
            continue
        shift = int(generator.integers(0, 6))
        mask = np.roll(rle.decode(entry["segmentation"]), shift, axis=1)
        coded = rle.encode(np.asfortranarray(mask))
        entry["segmentation"] = {"size": coded["size"], "counts": coded["counts"].decode()}
        entry["bbox"] = [entry["bbox"][0] + shift, *entry["bbox"][1:]]
        entry["score"] = float(generator.random())
        if generator.random() < 0.1:
            entry["category_id"] = int(generator.choice(ids))
        entries.append(entry)
    return entries


@pytest.mark.parametrize("split", ["train2017", "val2017"])
def test_the_truth_as_detections_has_ap_1(coco_mini: Path, split: str) -> None:
    source = open_split(coco_mini, split)
    metrics, classes = score(source, truth_as_detections(source))
    assert metrics == {f"{kind}_{name}": pytest.approx(1.0) for kind in ("box", "mask") for name in NAMES}
    seen = [row for row in classes if row["objects"]]
    assert len(seen) > 50 and all(row["box_ap"] == row["mask_ap"] == pytest.approx(1.0) for row in seen)


def test_ids_from_0_on(tmp_path: Path, make_split: Any) -> None:
    def renumber(dataset: dict[str, Any]) -> None:
        for entry in dataset["annotations"]:
            entry["id"] -= 1

    make_split(tmp_path, "a", 3)
    make_split(tmp_path, "b", 3, renumber)
    first, second = (open_split(tmp_path, split) for split in "ab")
    assert score(second, truth_as_detections(second)) == score(first, truth_as_detections(first))


def test_it_is_pycocotools_on_the_saved_files(coco_mini: Path, tmp_path: Path) -> None:
    source = open_split(coco_mini, "val2017")
    entries = disturbed(source)
    metrics, classes = score(source, entries)
    save_detections(tmp_path, entries)
    for ours, theirs in (("box", "bbox"), ("mask", "segm")):
        truth = COCO(str(coco_mini / "annotations" / "instances_val2017.json"))
        evaluation = COCOeval(truth, truth.loadRes(str(tmp_path / f"detections.{theirs}.json")), theirs)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        assert [metrics[f"{ours}_{name}"] for name in NAMES] == evaluation.stats[:6].tolist()
        assert 0.2 < metrics[f"{ours}_ap"] < 0.9
        per_class = [row[f"{ours}_ap"] for row in classes if row[f"{ours}_ap"] is not None]
        assert np.mean(per_class) == pytest.approx(evaluation.stats[0])


def test_evaluation_leaves_the_truth_as_it_was(coco: Path) -> None:
    source = open_split(coco, "val2017")
    before = [source.annotations(i) for i in range(len(source))]
    fingerprint = source.fingerprint()
    first = score(source, truth_as_detections(source))
    assert [source.annotations(i) for i in range(len(source))] == before
    assert source.fingerprint() == fingerprint
    assert score(source, truth_as_detections(source)) == first


def test_nothing_found_is_zero_not_an_error(coco: Path) -> None:
    source = open_split(coco, "val2017")
    metrics, classes = score(source, [])
    assert metrics["box_ap"] == metrics["mask_ap"] == 0.0
    assert "box_ap_large" not in metrics, "there is no large object, so no AP of large ones"
    assert [row["box_ap"] for row in classes] == [0.0, 0.0, None]
    # Two rectangles and their discs in image 2 and 3; image 1 has a box without area besides, which counts.
    assert [row["objects"] for row in classes] == [3, 4, 0]


def test_only_the_chosen_images_count(coco: Path) -> None:
    source = open_split(coco, "val2017")
    entries = [e for e in truth_as_detections(source) if e["image_id"] in (200, 300)]
    assert score(source, entries)[0]["box_ap"] < 1.0
    source.chosen = np.array([1, 2])
    assert score(source, entries)[0]["box_ap"] == pytest.approx(1.0)


def test_finding_a_crowd_is_no_mistake(coco: Path) -> None:
    source = open_split(coco, "val2017")
    entries = [e for e in truth_as_detections(source) if e["bbox"][2] > 0]
    crowd = next(a for a in source.annotations(0) if a["iscrowd"])
    extra = {key: crowd[key] for key in ("image_id", "category_id", "bbox", "segmentation")} | {"score": 0.99}
    elsewhere = extra | {"image_id": 200, "bbox": [0, 0, 10, 60]}
    kept = score(source, [*entries, extra])[0]["box_ap"]
    assert kept == score(source, entries)[0]["box_ap"]
    assert score(source, [*entries, elsewhere])[0]["box_ap"] < kept, "but a false alarm is"


def test_the_files_have_boxes_or_masks(coco: Path, tmp_path: Path) -> None:
    source = open_split(coco, "val2017")
    save_detections(tmp_path, truth_as_detections(source))
    boxes, masks = (json.loads((tmp_path / f"detections.{kind}.json").read_text()) for kind in ("bbox", "segm"))
    assert set(boxes[0]) == {"image_id", "category_id", "bbox", "score"}
    assert set(masks[0]) == {"image_id", "category_id", "segmentation", "score"}
    assert coco_of({"images": [], "annotations": [], "categories": []}).anns == {}


def test_the_table(coco: Path) -> None:
    source = open_split(coco, "val2017")
    metrics, classes = score(source, truth_as_detections(source)[:3])
    result = Result("detect", metrics, 4, "coco", "f", "vit", "0" * 64, details={"classes": classes})
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    print_result(result, console)
    text = console.export_text()
    assert "disc" in text and "rectangle" in text and "never seen" not in text
    assert f"{100 * metrics['box_ap50']:.1f}" in text
