"""What a detector finds: in a set of images, shared by all processes, as COCO's result entries; and pictures of it."""

import colorsys
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import torch
from PIL import Image
from pycocotools import mask as rle
from torch import Tensor
from torchvision.models.detection.roi_heads import paste_masks_in_image

from patchmix.data.decode import DecodeError, Pixels, decode
from patchmix.data.folder import list_images
from patchmix.data.views import to_float
from patchmix.device import autocast_dtype, resolve_device
from patchmix.evaluate.detection.coco import CocoImages, Entry, mask_of
from patchmix.evaluate.detection.model import Detector, DetectorFile, load_detector
from patchmix.evaluate.detection.views import FittedViews
from patchmix.evaluate.protocol import map_images
from patchmix.files import write_text, writing
from patchmix.progress import progress_bar
from patchmix.settings import Detect

_GOLDEN = 0.618033988749895  # steps of the golden ratio keep neighboring hues apart


def detect_all(
    detector: Detector, file: DetectorFile, source: CocoImages, *, device: torch.device, workers: int = 0
) -> list[Entry]:
    """The detections in every image of `source`, in its order, on every process; `file` says how to prepare images."""
    view, detect = FittedViews(size=file.shape.image_size, mean=file.mean), partial(detect_one, detector, file, device)
    found = map_images(source, view, detect, "detection", device=device, workers=workers)
    numbers = (source.entry(index)["id"] for index in range(len(source)))
    return [entry | {"image_id": number} for number, entries in zip(numbers, found, strict=True) for entry in entries]


@torch.no_grad()
def detect_one(detector: Detector, file: DetectorFile, device: torch.device, views: Sequence[Tensor]) -> list[Entry]:
    """What `FittedViews` made of an image → its detections, best first, in the original image's pixels."""
    pixels, ((seen_height, seen_width, height, width),) = views[0], views[1].tolist()
    autocast, categories = autocast_dtype(device), list(file.categories)
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        (detection,) = detector(to_float(pixels.to(device), file.mean, file.std), [(seen_height, seen_width)])
    boxes = detection["boxes"].float().cpu()
    boxes = boxes / torch.tensor([seen_width, seen_height] * 2) * torch.tensor([width, height] * 2)
    columns = boxes, detection["masks"].float().cpu(), detection["labels"].tolist(), detection["scores"].tolist()
    entries = []
    for box, mask, label, score in zip(*columns, strict=True):
        # One mask at a time: a hundred masks of a large photo would take gigabytes.
        pasted = paste_masks_in_image(mask[None], box[None], (height, width))[0, 0] > 0.5
        coded = rle.encode(np.asfortranarray(pasted.numpy().astype(np.uint8)))
        x0, y0, x1, y1 = box.tolist()
        shape = {"size": [height, width], "counts": coded["counts"].decode()}
        bbox = [round(value, 3) for value in (x0, y0, x1 - x0, y1 - y0)]
        entry = {"category_id": categories[label - 1], "bbox": bbox, "score": round(score, 7), "segmentation": shape}
        entries.append(entry)
    return entries


def predict(settings: Detect) -> list[Path]:
    """Draws detections on images: for each image a PNG file in `out`, and predictions.json with all detections."""
    file, out = load_detector(Path(settings.weights)), settings.out or Path("predictions")
    device = resolve_device(settings.device)
    detector = file.detector().to(device)
    views = FittedViews(size=file.shape.image_size, mean=file.mean)
    listed, written, paths = [], list[Path](), list[Path]()
    for path in settings.predict:  # files, and all images in folders
        paths += [path / os.fsdecode(name) for name in list_images(path)] if path.is_dir() else [path]
    if not paths:
        raise ValueError("there are no images to show; give image files, or a folder that holds some")
    with progress_bar("detection", len(paths)) as advance:
        for path in paths:
            try:
                pixels = decode(path.read_bytes(), str(path))
            except (OSError, DecodeError) as error:
                raise ValueError(f"{error}; give image files or folders") from error
            made = [torch.from_numpy(array) for array in views([pixels], epoch=0, indices=np.zeros(1, np.int64))]
            kept = [one for one in detect_one(detector, file, device, made) if one["score"] >= settings.threshold]
            picture, number = out / f"{path.stem}.png", 1
            while picture in written:  # images of one name, from several folders
                number += 1
                picture = out / f"{path.stem}-{number}.png"
            write_picture(picture, draw(pixels, kept, file.categories))
            written.append(picture)
            objects = [one | {"name": file.categories[one["category_id"]]} for one in kept]
            listed.append({"image": str(path), "picture": picture.name, "objects": objects})
            advance(1)
    write_text(out / "predictions.json", json.dumps(listed, indent=1, ensure_ascii=False) + "\n")
    return written


def draw(image: Pixels, entries: Sequence[Entry], names: Mapping[int, str]) -> Pixels:
    """uint8 (H, W, 3) with each entry's mask tinted, its box outlined and its class (and score) written; a new array.

    Entries are annotations or detections of COCO: category_id, bbox, segmentation, perhaps a score.
    """
    height, width = image.shape[:2]
    canvas = image.copy()
    thickness = max(1, round(max(height, width) / 400))
    for entry in entries:
        inside = mask_of(entry, height, width).astype(bool)
        canvas[inside] = (0.55 * canvas[inside] + 0.45 * np.array(color(entry["category_id"]))).astype(np.uint8)
    for entry in entries:
        tint = color(entry["category_id"])
        x, y, w, h = entry["bbox"]
        cv2.rectangle(canvas, (round(x), round(y)), (round(x + w), round(y + h)), tint, thickness)
        text = names[entry["category_id"]] + (f" {entry['score']:.2f}" if "score" in entry else "")
        _write(canvas, text, round(x), round(y), tint)
    return canvas


def save_pictures(folder: Path, source: CocoImages, entries: Sequence[Entry], *, count: int) -> None:
    """The first `count` images of `source` as PNG files: the truth, next to it detections with scores from 0.5."""
    for index in range(min(count, len(source))):
        entry, image = source.entry(index), source.load(index)
        found = [one for one in entries if one["image_id"] == entry["id"] and one["score"] >= 0.5]
        truth, detected = (draw(image, each, source.categories) for each in (source.annotations(index), found))
        gap = np.full((len(image), 8, 3), 255, np.uint8)
        picture = np.concatenate([truth, gap, detected], axis=1)
        write_picture(folder / f"{Path(entry['file_name']).stem}.png", picture)


def write_picture(path: Path, pixels: Pixels) -> None:
    """uint8 RGB → a PNG file."""
    with writing(path) as file:
        Image.fromarray(pixels).save(file, "PNG")


def color(category: int) -> tuple[int, int, int]:
    """RGB of a class, always the same."""
    red, green, blue = colorsys.hsv_to_rgb(category * _GOLDEN % 1.0, 0.85, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def _write(canvas: Pixels, text: str, x: int, y: int, tint: tuple[int, int, int]) -> None:
    size = max(canvas.shape[:2]) / 1300 + 0.2
    (width, height), below = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, size, 1)
    x, y = max(0, min(x, canvas.shape[1] - width)), max(height + below, y)
    cv2.rectangle(canvas, (x, y - height - below), (x + width, y), tint, cv2.FILLED)
    cv2.putText(canvas, text, (x, y - below // 2), cv2.FONT_HERSHEY_SIMPLEX, size, (0, 0, 0), 1, cv2.LINE_AA)
