"""Images and their objects on a square canvas: large-scale jitter for training, the longer side fitted for testing.

Shapes: N images, S the canvas's side, T objects of all N images together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cv2
import numpy as np
import torch
from pycocotools import mask as rle
from torch import Tensor

from patchmix.data.contract import Indices
from patchmix.data.decode import Pixels
from patchmix.data.randomness import uniforms
from patchmix.evaluate.detection.coco import CocoImages, Mask, mask_of

Target = dict[str, Tensor]  # boxes (t, 4) as x0, y0, x1, y1; labels (t,); masks (t, S, S): one image's objects
_LARGEST_PIXELS = 8_000  # a side; jitter of very long images must not take all memory


@dataclass(frozen=True)
class Placement:
    """How an image lies on its canvas: flipped, then resized to (height, width), then cut out at (top, left)."""

    height: int
    width: int
    top: int = 0
    left: int = 0
    flip: bool = False

    def visible(self, size: int) -> tuple[int, int]:
        """Height and width of what is seen of it on a canvas of `size`."""
        return min(size, self.height - self.top), min(size, self.width - self.left)


def fitted(height: int, width: int, size: float) -> Placement:
    """The longer side becomes `size`; the rest of the canvas stays empty."""
    scale = size / max(height, width)
    return Placement(max(1, round(height * scale)), max(1, round(width * scale)))


def jittered(height: int, width: int, size: int, *, scale: tuple[float, float], draws: Sequence[float]) -> Placement:
    """Large-scale jitter (Ghiasi et al. 2021): fitted, times a uniform factor; what is too large is cut at random.

    draws: four numbers in [0, 1).
    """
    factor = scale[0] + (scale[1] - scale[0]) * draws[0]
    whole = fitted(height, width, min(factor * size, _LARGEST_PIXELS))
    top, left = int(draws[1] * (max(whole.height - size, 0) + 1)), int(draws[2] * (max(whole.width - size, 0) + 1))
    return replace(whole, top=top, left=left, flip=draws[3] < 0.5)


def place_image(image: Pixels, where: Placement, size: int, mean: Sequence[float]) -> Pixels:
    """uint8 (H, W, 3) → (S, S, 3); the empty part gets the color `mean`, which normalizes to nearly zero."""
    canvas = np.full((size, size, 3), [round(255 * m) for m in mean], np.uint8)
    return _place(image, where, canvas, cv2.INTER_AREA if where.height < image.shape[0] else cv2.INTER_LINEAR)


def place_mask(annotation: dict[str, Any], height: int, width: int, where: Placement, size: int) -> Mask:
    """An object's mask on the canvas, uint8 (S, S) of 0 and 1. Polygons are drawn at the new size, not resampled."""
    canvas = np.zeros((size, size), np.uint8)
    if not isinstance(annotation["segmentation"], list):
        return _place(mask_of(annotation, height, width), where, canvas, cv2.INTER_NEAREST)
    moved = []
    for polygon in annotation["segmentation"]:
        x, y = np.asarray(polygon, np.float64).reshape(-1, 2).T
        x = (width - x if where.flip else x) * (where.width / width) - where.left
        y = y * (where.height / height) - where.top
        moved.append(np.stack([x, y], axis=1).ravel().tolist())
    seen = where.visible(size)
    canvas[: seen[0], : seen[1]] = rle.decode(rle.merge(rle.frPyObjects(moved, *seen)))
    return canvas


def _place(pixels: Pixels, where: Placement, canvas: Pixels, interpolation: int) -> Pixels:
    if where.flip:
        pixels = np.ascontiguousarray(pixels[:, ::-1])
    resized = cv2.resize(pixels, (where.width, where.height), interpolation=interpolation)
    height, width = where.visible(len(canvas))
    canvas[:height, :width] = resized[where.top : where.top + height, where.left : where.left + width]
    return canvas


class TrainingViews:
    """The loader's transform for training: (images, which ones) → the arrays that `unpack` turns into targets."""

    def __init__(
        self, source: CocoImages, *, size: int, scale: tuple[float, float], flip: bool, mean: Sequence[float], seed: int
    ) -> None:
        self._source, self._size, self._scale, self._flip, self._seed = source, size, scale, flip, seed
        self._mean = mean
        if not 0 < scale[0] <= scale[1] <= 4:
            raise ValueError(f"scale is {scale}; it must be two factors, 0 < low ≤ high ≤ 4")

    def __call__(self, images: Sequence[Pixels], *, epoch: int, indices: Indices) -> list[Any]:
        """Pixels uint8 (N, S, S, 3); visible sizes and numbers of objects (N, 3); boxes (T, 4), labels (T,), and
        masks as bits (T, S, ⌈S/8⌉): an eighth of the memory on the way from the worker."""
        draws = uniforms(4, self._seed, epoch, indices)
        pixels, sizes = np.empty((len(images), self._size, self._size, 3), np.uint8), []
        boxes, labels, masks = list[tuple[int, ...]](), [], []
        for n, (image, index) in enumerate(zip(images, indices.tolist(), strict=True)):
            height, width = image.shape[:2]
            where = jittered(height, width, self._size, scale=self._scale, draws=draws[n].tolist())
            where = replace(where, flip=self._flip and where.flip)
            pixels[n] = place_image(image, where, self._size, self._mean)
            before = len(boxes)
            for annotation in self._source.objects(index):
                mask = place_mask(annotation, height, width, where, self._size)
                x, y, wide, tall = cv2.boundingRect(mask)
                if wide:  # else it was cut off, or is smaller than a pixel now
                    boxes.append((x, y, x + wide, y + tall))
                    labels.append(self._source.label(annotation))
                    masks.append(np.packbits(mask, axis=1))
            sizes.append((*where.visible(self._size), len(boxes) - before))
        return [
            pixels,
            np.array(sizes, np.int64).reshape(-1, 3),
            np.array(boxes, np.float32).reshape(-1, 4),
            np.array(labels, np.int64),
            np.array(masks, np.uint8).reshape(len(boxes), self._size, -(-self._size // 8)),
        ]


def fitted_views(images: Sequence[Pixels], *, size: int, mean: Sequence[float], **_: Any) -> list[Any]:
    """The loader's transform for testing: pixels uint8 (N, S, S, 3); visible and original heights and widths (N, 4)."""
    pixels, sizes = np.empty((len(images), size, size, 3), np.uint8), []
    for n, image in enumerate(images):
        where = fitted(image.shape[0], image.shape[1], size)
        pixels[n] = place_image(image, where, size, mean)
        sizes.append((where.height, where.width, *image.shape[:2]))
    return [pixels, np.array(sizes, np.int64).reshape(-1, 4)]


def unpack(views: Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, int]], list[Target]]:
    """What `TrainingViews` packed, on its device: pixels (N, S, S, 3), visible sizes, and each image's objects."""
    pixels, sizes, boxes, labels, bits = views
    shifts = torch.arange(7, -1, -1, device=bits.device, dtype=torch.uint8)
    masks = (bits[..., None] >> shifts & 1).flatten(2)[:, :, : pixels.shape[1]]
    counts = sizes[:, 2].tolist()
    parts = zip(torch.split(boxes, counts), torch.split(labels, counts), torch.split(masks, counts), strict=True)
    targets = [{"boxes": box, "labels": label, "masks": mask} for box, label, mask in parts]
    return pixels, [(height, width) for height, width, _ in sizes.tolist()], targets
