"""From the canvas back to the image: a detector that knows the truth scores as if it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from patchmix.evaluate.detection.coco import CocoImages, mask_of, open_split
from patchmix.evaluate.detection.detect import evaluate
from patchmix.evaluate.detection.model import DetectorFile, Shape
from patchmix.interop.backbone import Architecture

CPU = torch.device("cpu")


class Knowing(nn.Module):
    """Answers with the truth of the next images, in the canvas's pixels, masks as 28 × 28 inside their boxes."""

    def __init__(self, source: CocoImages) -> None:
        super().__init__()
        self.source, self.next = source, 0

    def forward(self, images: Tensor, sizes: list[tuple[int, int]]) -> list[dict[str, Tensor]]:
        assert not self.training
        answers = []
        for height, width in sizes:
            entry, objects = self.source.entry(self.next), self.source.objects(self.next)
            self.next += 1
            boxes, masks = [], []
            for annotation in objects:
                x, y, w, h = annotation["bbox"]
                boxes.append([x, y, x + w, y + h])
                mask = mask_of(annotation, entry["height"], entry["width"]).astype(np.float32)
                # The middle of cell (i, j) of the small mask, in pixels of the image.
                across = (x + (np.arange(28) + 0.5) * w / 28 - 0.5).astype(np.float32)
                down = (y + (np.arange(28) + 0.5) * h / 28 - 0.5).astype(np.float32)
                masks.append(cv2.remap(mask, *np.meshgrid(across, down), cv2.INTER_LINEAR)[None])
            scale = torch.tensor([width / entry["width"], height / entry["height"]] * 2)
            answers.append(
                {
                    "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4) * scale,
                    "labels": torch.tensor([self.source.label(a) for a in objects], dtype=torch.int64),
                    "scores": torch.full((len(objects),), 0.9),
                    "masks": torch.from_numpy(np.array(masks, np.float32).reshape(-1, 1, 28, 28)),
                }
            )
        return answers


def found(source: CocoImages, image_size: int, workers: int = 0) -> tuple[list[dict[str, Any]], dict[str, float]]:
    detector: Any = Knowing(source).eval()
    vit, shape = Architecture("vit_tiny_patch16_32", 32, 16, 3, 24, 4, 3), Shape(image_size=image_size)
    file = DetectorFile(vit, shape, source.categories, {}, mean=(0.5,) * 3, std=(0.5,) * 3)
    entries, metrics, _ = evaluate(detector, file, source, CPU, workers)
    return entries, metrics


def test_a_detector_that_knows_the_truth(coco_mini: Path) -> None:
    """Boxes come back to the image's own pixels, labels to the file's own ids, masks to where they were."""
    source = open_split(coco_mini, "val2017")
    _, metrics = found(source, image_size=128)
    assert metrics["box_ap"] > 0.999
    assert metrics["mask_ap50"] > 0.95 and metrics["mask_ap"] > 0.75


def test_workers_do_not_matter(coco: Path) -> None:
    source = open_split(coco, "train2017")
    one, _ = found(source, image_size=64)
    assert one == found(source, image_size=64, workers=1)[0]
    assert [entry["image_id"] for entry in one] == [100, 100, 200, 200, 300, 300, 400, 400]
    assert {entry["category_id"] for entry in one} == {3, 7}
