"""Annotation files: what is read, what is left out, and what is refused, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from patchmix.data.decode import DecodeError
from patchmix.evaluate.detection.coco import CocoImages, mask_of, open_split


def test_reads_images_objects_and_categories(coco: Path) -> None:
    source = open_split(coco, "train2017")
    assert len(source) == 5
    assert source.classes == ("disc", "rectangle", "never seen")
    assert [source.label(a) for a in source.objects(1)] == [2, 1], "labels follow the file's ids: 3 → 1, 7 → 2"
    pixels = source.load(1)
    rectangle = mask_of(source.objects(1)[0], *pixels.shape[:2]).astype(bool)
    assert (pixels[rectangle] == 250).all() and (pixels[~rectangle] < 250).all()
    assert source.key(1) == "train2017/1.png"


def test_crowds_and_boxes_without_area_are_not_learnt_and_empty_images_are_left_out(coco: Path) -> None:
    source = open_split(coco, "train2017")
    assert len(source.annotations(0)) == len(source.truth().imgToAnns[100]) == 4
    assert [a["category_id"] for a in source.objects(0)] == [7, 3]
    assert source.objects(4) == []
    fewer = source.with_objects()
    assert len(fewer) == 4 and fewer.fingerprint() != source.fingerprint()
    assert [fewer.entry(i)["id"] for i in range(4)] == [100, 200, 300, 400]


def test_area_and_iscrowd_may_be_left_out_or_empty(tmp_path: Path, make_split: Any) -> None:
    def strip(dataset: dict[str, Any]) -> None:
        for annotation in dataset["annotations"]:
            del annotation["area"], annotation["iscrowd"]

    make_split(tmp_path, "a", 2, strip)
    make_split(tmp_path, "b", 2, lambda d: [each.update(area=None, iscrowd=None) for each in d["annotations"]])
    for split in "ab":
        first = open_split(tmp_path, split).objects(0)[0]
        assert (first["area"], first["iscrowd"]) == (30 * 22, 0)


def test_the_fingerprint_is_of_the_content(coco: Path, tmp_path: Path, make_split: Any) -> None:
    first = open_split(coco, "train2017").fingerprint()
    coco.rename(tmp_path / "elsewhere")
    assert open_split(tmp_path / "elsewhere", "train2017").fingerprint() == first
    make_split(tmp_path / "other", "train2017", 5, lambda d: d["annotations"][0].update(category_id=3))
    assert open_split(tmp_path / "other", "train2017").fingerprint() != first


def _set(what: str, index: int, **values: Any) -> Any:
    return lambda dataset: dataset[what][index].update(values)


def _drop(what: str, index: int, key: str) -> Any:
    return lambda dataset: dataset[what][index].pop(key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("images", 2, file_name="9.png"), r"instances_a\.json: .*9\.png \(image id 300\) does not exist"),
        (_set("images", 0, file_name="../0.png"), r"'\.\./0\.png'; it must lie below the image folder"),
        (_set("images", 1, id=100), "id 100 occurs twice in images"),
        (_set("images", 0, height=0), r"0\.png \(image id 100\) has height 0"),
        (_drop("images", 0, "width"), r"0\.png \(image id 100\) has width None"),
        (_drop("images", 0, "id"), "needs a whole number 'id'"),
        (_set("annotations", 1, id=1), "id 1 occurs twice in annotations"),
        (_set("annotations", 1, image_id=5), "annotation 2 is for image id 5, which is not in its images"),
        (_set("annotations", 1, category_id=1), r"annotation 2 of 0\.png \(image id 100\) has category 1"),
        (_set("annotations", 0, bbox=[1, 2, 3]), r"annotation 1 of 0\.png .* has bbox \[1, 2, 3\]"),
        (_set("annotations", 0, bbox=[0, 0, float("nan"), 1]), "four numbers"),
        (_set("annotations", 0, bbox="all"), "four numbers"),
        (_drop("annotations", 0, "bbox"), "has bbox None"),
        (_set("annotations", 0, segmentation=[[1, 2, 3, 4]]), "at least three points"),
        (_set("annotations", 0, segmentation=[[1, 2, 3, 4, 5, "6"]]), "not a list of numbers"),
        (_set("annotations", 0, segmentation=[]), "Mask R-CNN learns masks"),
        (_drop("annotations", 0, "segmentation"), "Mask R-CNN learns masks"),
        (_set("annotations", 0, segmentation={"size": [3, 4], "counts": [12]}), r"mask of size \[3, 4\]"),
        (_set("annotations", 0, segmentation={"size": [60, 80], "counts": [5]}), "runs sum to 5 px, .* 4800"),
        (_set("annotations", 0, segmentation={"size": [60, 80]}), "without counts"),
        (_set("categories", 1, id=3), "id 3 occurs twice in categories"),
        (_drop("categories", 1, "name"), "needs a whole number 'id' and a 'name'"),
        (lambda d: d.pop("annotations"), "has no list 'annotations'"),
        (lambda d: d.update(images=[]), "lists no images"),
        (lambda d: d.update(images=[1, 2]), "has no list 'images'"),
    ],
)
def test_a_file_that_does_not_fit_says_where(tmp_path: Path, make_split: Any, change: Any, message: str) -> None:
    make_split(tmp_path, "a", 3, change)
    with pytest.raises(ValueError, match=message) as caught:
        open_split(tmp_path, "a")
    assert "\n" not in str(caught.value)


def test_files_that_are_not_annotations(tmp_path: Path, make_split: Any) -> None:
    make_split(tmp_path, "a", 3)
    path = tmp_path / "annotations" / "instances_a.json"
    with pytest.raises(ValueError, match=r"instances_b\.json can't be read"):
        open_split(tmp_path, "b")
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        open_split(tmp_path / "nowhere", "a")
    for text in (path.read_text()[:200], "", "\x00\xff", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"is not json .* is it complete\?"):
            open_split(tmp_path, "a")
    path.write_text("[1]")
    with pytest.raises(ValueError, match="has no list 'images'"):
        open_split(tmp_path, "a")


def test_an_image_of_another_size_is_named(coco: Path) -> None:
    cv2.imwrite(str(coco / "val2017" / "1.png"), np.zeros((10, 20, 3), np.uint8))
    with pytest.raises(ValueError, match=r"val2017/1\.png \(image id 200\) is 20 × 10 px, but .* says 48 × 72"):
        open_split(coco, "val2017").load(1)
    (coco / "val2017" / "1.png").write_bytes(b"nothing")
    with pytest.raises(DecodeError, match=r"val2017/1\.png"):
        open_split(coco, "val2017").load(1)


def test_objects_marked_before_an_exif_rotation_fit(tmp_path: Path, make_split: Any) -> None:
    """The file says 80 × 60, which is how the pixels are stored; upright the image is 60 × 80."""
    make_split(tmp_path, "a", 2)
    stored = cv2.cvtColor(cv2.imread(str(tmp_path / "a" / "0.png")), cv2.COLOR_BGR2RGB)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(stored).save(tmp_path / "a" / "0.jpg", quality=95, exif=exif)
    path = tmp_path / "annotations" / "instances_a.json"
    path.write_text(path.read_text().replace("0.png", "0.jpg"))
    pixels = CocoImages(tmp_path / "a", path).load(0)
    assert np.abs(pixels.astype(int) - stored).mean() < 6


def test_nothing_to_learn(tmp_path: Path, make_split: Any) -> None:
    make_split(tmp_path, "a", 1, lambda d: d.update(annotations=[]))
    with pytest.raises(ValueError, match="nothing to learn"):
        open_split(tmp_path, "a").with_objects()


def test_coco_mini_reads(coco_mini: Path) -> None:
    for split in ("train2017", "val2017"):
        source = open_split(coco_mini, split)
        assert (len(source), len(source.categories)) == (50, 80)
        assert list(source.categories)[-1] == 90
        listed = json.loads((coco_mini / "annotations" / f"instances_{split}.json").read_text())["annotations"]
        assert sum(len(source.objects(i)) for i in range(50)) == sum(not a["iscrowd"] for a in listed)
        assert source.load(0).shape[:2] == (source.entry(0)["height"], source.entry(0)["width"])
