"""A small folder in COCO's layout, made here; and the real one where it stands beside the checkout."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from pycocotools import mask as rle

from patchmix.interop.backbone import Architecture, Backbone
from patchmix.nn.vit import create_encoder

Change = Callable[[dict[str, Any]], None]
CATEGORIES = [{"id": 3, "name": "disc"}, {"id": 7, "name": "rectangle"}, {"id": 90, "name": "never seen"}]


def write_split(root: Path, split: str, count: int, change: Change = lambda dataset: None) -> None:
    """`count` images with a bright rectangle (polygon) and a dark disc (run lengths); the last one is empty.

    Image 1 has a crowd, too, and an object whose box has no width.
    """
    generator = np.random.default_rng(len(split))
    dataset: dict[str, Any] = {"images": [], "annotations": [], "categories": [dict(c) for c in CATEGORIES]}
    (root / split).mkdir(parents=True)
    (root / "annotations").mkdir(exist_ok=True)

    def annotate(image_id: int, category: int, box: list[float], shape: Any, crowd: int = 0) -> None:
        number = len(dataset["annotations"]) + 1
        area = float(box[2] * box[3])
        entry = {"id": number, "image_id": image_id, "category_id": category, "bbox": box, "area": area}
        dataset["annotations"].append(entry | {"segmentation": shape, "iscrowd": crowd})

    for n in range(count):
        height, width = ((60, 80), (72, 48))[n % 2]
        image_id = 100 * (n + 1)
        pixels = generator.integers(90, 110, (height, width, 3)).astype(np.uint8)
        dataset["images"].append({"id": image_id, "file_name": f"{n}.png", "height": height, "width": width})
        if n < count - 1:
            x, y = int(generator.integers(2, 12)), int(generator.integers(2, 12))
            pixels[y : y + 22, x : x + 30] = 250
            polygon = [x, y, x + 30, y, x + 30, y + 22, x, y + 22]
            annotate(image_id, 7, [x, y, 30, 22], [[float(v) for v in polygon]])
            disc = np.zeros((height, width), np.uint8)
            cv2.circle(disc, (width - 14, height - 14), 10, 1, -1)
            pixels[disc > 0] = 5
            coded = rle.encode(np.asfortranarray(disc))
            shape = {"size": [height, width], "counts": coded["counts"].decode()}
            annotate(image_id, 3, rle.toBbox(coded).tolist(), shape)
        if n == 0:
            crowd = np.zeros((height, width), np.uint8)
            crowd[:, :10] = 1
            coded = rle.encode(np.asfortranarray(crowd))
            shape = {"size": [height, width], "counts": coded["counts"].decode()}
            annotate(image_id, 7, [0, 0, 10, height], shape, crowd=1)
            annotate(image_id, 7, [20, 5, 0, 10], [[20.0, 5.0, 20.0, 15.0, 20.0, 10.0]])
        cv2.imwrite(str(root / split / f"{n}.png"), pixels)
    change(dataset)
    (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(dataset))


@pytest.fixture
def make_split() -> Callable[..., None]:
    return write_split


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    """Five training images, four validation images, one of each empty."""
    root = tmp_path / "coco"
    write_split(root, "train2017", 5)
    write_split(root, "val2017", 4)
    return root


@pytest.fixture
def encoder_file() -> Backbone:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = create_encoder("vit_tiny_patch16_32", dim=24, depth=4, heads=3)
    return Backbone(Architecture.of("vit_tiny_patch16_32", encoder), encoder.state_dict())


@pytest.fixture(scope="session")
def coco_mini(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = shared / "data" / "coco-mini.tar"
    if not archive.is_file():
        pytest.skip(f"needs real images: put coco-mini.tar into {archive.parent}")
    root = tmp_path_factory.mktemp("coco-mini")
    with tarfile.open(archive) as tar:
        tar.extractall(root, filter="data")
    return root / "coco-mini"
