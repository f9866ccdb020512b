"""A detector over a set of images, shared by all processes: every image once, as COCO's result entries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from pycocotools import mask as rle
from torch import Tensor
from torchvision.models.detection.roi_heads import paste_masks_in_image

from patchmix import distributed
from patchmix.data.loader import one_pass
from patchmix.data.views import to_float
from patchmix.device import autocast_dtype
from patchmix.evaluate.detection.coco import Category, CocoImages
from patchmix.evaluate.detection.model import Detection, Detector
from patchmix.evaluate.detection.views import FittedViews
from patchmix.evaluate.features import gather_rows
from patchmix.progress import progress_bar

Entry = dict[str, Any]  # image_id, category_id, bbox (x, y, width, height), score, segmentation
_ROW = 1024  # bytes sent as one row between processes


@torch.no_grad()
def detect_all(
    detector: Detector,
    source: CocoImages,
    *,
    image_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
    batch_size: int = 1,
    workers: int = 0,
) -> list[Entry]:
    """What the detector finds in every image of `source`, in its order, on every process.

    An image that can't be read is an error, not a gap: it would change what the numbers mean.
    """
    was_training = detector.training
    detector.eval()
    lines: list[str] = []
    errors: list[str] = []
    rank, world_size = distributed.rank(), distributed.world_size()
    batches = one_pass(
        source,
        FittedViews(size=image_size, mean=mean),
        batch_size=batch_size,
        workers=workers,
        rank=rank,
        world_size=world_size,
    )
    try:
        with progress_bar("detection", -(-len(source) // world_size), distributed.is_main()) as advance:
            for batch in batches:
                errors += batch.bad
                found = detect_batch(detector, batch.views, mean=mean, std=std, device=device)
                for index, entries in zip(batch.indices.tolist(), found, strict=True):
                    image_id = source.entry(index)["id"]
                    named = [as_entry(one, source.categories) | {"image_id": image_id} for one in entries]
                    lines.append(json.dumps({"index": index, "entries": named}))
                advance(len(found))
    except ValueError as error:  # told to all: the others would wait for this process
        errors.append(str(error))
    finally:
        detector.train(was_training)
    lines += [json.dumps({"error": error}) for error in errors]
    gathered = [json.loads(line) for line in gather_text("\n".join(lines), device).splitlines() if line]
    if failed := [row["error"] for row in gathered if "error" in row]:
        raise ValueError(f"{min(failed)}; evaluation needs every image of {source.name}")
    assert [row["index"] for row in gathered] == list(range(len(source))), "an image was lost or seen twice"
    return [entry for row in gathered for entry in row["entries"]]


@torch.no_grad()
def detect_batch(
    detector: Detector, views: Sequence[Tensor], *, mean: Sequence[float], std: Sequence[float], device: torch.device
) -> list[list[Entry]]:
    """What `FittedViews` made → for each image its detections, best first, in the original image's pixels.

    Entries have "label" (1 … K), "bbox", "score" and "segmentation".
    """
    pixels, sizes = views
    if not len(pixels):
        return []
    visible = [(int(row[0]), int(row[1])) for row in sizes.tolist()]
    autocast = autocast_dtype(device)
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        detections = detector(to_float(pixels.to(device), mean, std), visible)
    assert isinstance(detections, list)
    return [_entries(one, row) for one, row in zip(detections, sizes.tolist(), strict=True)]


def _entries(detection: Detection, size: Sequence[int]) -> list[Entry]:
    seen_height, seen_width, height, width = size
    boxes = (
        detection["boxes"].float().cpu()
        / torch.tensor([seen_width, seen_height] * 2)
        * torch.tensor([width, height] * 2)
    )
    if not len(boxes):
        return []
    # One at a time: a hundred masks of a large photo would take gigabytes.
    masks = detection["masks"].float().cpu()
    entries = []
    for box, mask, label, score in zip(
        boxes, masks, detection["labels"].tolist(), detection["scores"].tolist(), strict=True
    ):
        pasted = paste_masks_in_image(mask[None], box[None], (height, width))[0, 0] > 0.5
        coded = rle.encode(np.asfortranarray(pasted.numpy().astype(np.uint8)))
        x0, y0, x1, y1 = box.tolist()
        entries.append(
            {
                "label": label,
                "bbox": [round(value, 3) for value in (x0, y0, x1 - x0, y1 - y0)],
                "score": round(score, 7),
                "segmentation": {"size": [height, width], "counts": coded["counts"].decode()},
            }
        )
    return entries


def as_entry(found: Entry, categories: Sequence[Category]) -> Entry:
    """The label's own category id in place of the label."""
    entry = {key: value for key, value in found.items() if key != "label"}
    return {"category_id": categories[found["label"] - 1].id, **entry}


def gather_text(text: str, device: torch.device) -> str:
    """The lines of all processes in the order of their ranks, on every process. No pickles, so any length is fine."""
    data = text.encode() + b"\n"
    data += b"\n" * (-len(data) % _ROW)
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, _ROW)
    return gather_rows(rows, device).numpy().tobytes().decode()
