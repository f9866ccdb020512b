"""Boxes and masks drawn on images, and detections beside the truth."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np

from patchmix.data.decode import Pixels
from patchmix.evaluate.detection.coco import CocoImages, mask_of
from patchmix.evaluate.detection.inference import Entry
from patchmix.files import replacing

_GOLDEN = 0.618033988749895  # steps of the golden ratio keep neighbouring hues apart
_GAP = 8  # px between two pictures


def draw(image: Pixels, entries: Sequence[Entry], names: Mapping[int, str]) -> Pixels:
    """uint8 (H, W, 3) with each entry's mask tinted, its box outlined and its class (and score) written; a new array.

    Entries are annotations or detections of COCO: category_id, bbox, segmentation, perhaps a score.
    """
    height, width = image.shape[:2]
    canvas = image.copy()
    thickness = max(1, round(max(height, width) / 400))
    for entry in entries:
        inside = mask_of(entry, height, width).astype(bool)
        canvas[inside] = (0.55 * canvas[inside] + 0.45 * np.array(colour(entry["category_id"]))).astype(np.uint8)
    for entry in entries:
        tint = colour(entry["category_id"])
        x, y, w, h = entry["bbox"]
        cv2.rectangle(canvas, (round(x), round(y)), (round(x + w), round(y + h)), tint, thickness)
        text = names[entry["category_id"]] + (f" {entry['score']:.2f}" if "score" in entry else "")
        _write(canvas, text, round(x), round(y), tint)
    return canvas


def beside_truth(image: Pixels, truth: Sequence[Entry], found: Sequence[Entry], names: Mapping[int, str]) -> Pixels:
    """The truth on the left, the detections on the right: (H, 2 W + gap, 3)."""
    gap = np.full((image.shape[0], _GAP, 3), 255, np.uint8)
    return np.concatenate([draw(image, truth, names), gap, draw(image, found, names)], axis=1)


def save_pictures(
    folder: Path, source: CocoImages, entries: Sequence[Entry], *, count: int, threshold: float = 0.5
) -> list[Path]:
    """The first `count` images of `source`, detections of at least `threshold` beside the truth, as PNG files."""
    names = {category.id: category.name for category in source.categories}
    paths = []
    for index in range(min(count, len(source))):
        entry = source.entry(index)
        found = [one for one in entries if one["image_id"] == entry["id"] and one["score"] >= threshold]
        path = folder / f"{Path(entry['file_name']).stem}.png"
        write_picture(path, beside_truth(source.load(index), source.annotations(index), found, names))
        paths.append(path)
    return paths


def write_picture(path: Path, pixels: Pixels) -> None:
    """uint8 RGB → a PNG file, whole or not at all."""
    ok, data = cv2.imencode(".png", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))
    assert ok
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(data.tobytes())
    except OSError as error:
        raise ValueError(f"can't write {path} ({error.strerror}); choose another folder") from error


def colour(category: int) -> tuple[int, int, int]:
    """RGB of a class, always the same."""
    red, green, blue = colorsys.hsv_to_rgb(category * _GOLDEN % 1.0, 0.85, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def _write(canvas: Pixels, text: str, x: int, y: int, tint: tuple[int, int, int]) -> None:
    size = max(canvas.shape[:2]) / 1300 + 0.2
    (width, height), below = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, size, 1)
    x, y = max(0, min(x, canvas.shape[1] - width)), max(height + below, y)
    cv2.rectangle(canvas, (x, y - height - below), (x + width, y), tint, cv2.FILLED)
    cv2.putText(canvas, text, (x, y - below // 2), cv2.FONT_HERSHEY_SIMPLEX, size, (0, 0, 0), 1, cv2.LINE_AA)
