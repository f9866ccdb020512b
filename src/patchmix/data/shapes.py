"""Ten classes of colored shapes, generated: a set that needs no files and that raw pixels do not solve.

An image shows nine shapes of one class over a dark textured ground. Place, size, angle and color of each are random,
and so is the texture: none of them says anything about the class, and none is common to an image. What two crops of an
image have in common is the kind of shape, which is what an encoder is to find.
"""

import hashlib

import cv2
import numpy as np
import numpy.typing as npt

from patchmix.data.contract import Split
from patchmix.data.decode import Pixels
from patchmix.data.memory import InMemorySource, from_array
from patchmix.data.randomness import uniforms

SIZE = 32
TRAIN_LENGTH = 10_000
TEST_LENGTH = 2_000
_VERSION = 2  # part of the fingerprint: raise it when the pixels change
_SEED = 20_220_803
_SIDE = 3  # shapes stand on a grid of 3 × 3 cells, each moved off its place
_CELL = SIZE / _SIDE
_GROUND, _ROUGHNESS = 40.0, 60.0  # mean and spread of the ground's brightness
_POINTS = 5  # per side of the ground's noise
_SHIFT = 6  # fractional bits of the corners given to OpenCV


def _box(half_width: float, half_height: float) -> npt.NDArray[np.float64]:
    return np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * (half_width, half_height)


def _arc(start: float, stop: float, corners: int = 32) -> npt.NDArray[np.float64]:
    """Points on the unit circle, in degrees; a full turn does not repeat its first point: (corners, 2)."""
    angle = np.deg2rad(np.linspace(start, stop, corners, endpoint=abs(stop - start) < 360))
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


# Corners (x, y) of shapes with circumradius 1: some closed lines, each (corners, 2), filled by even-odd.
_CROSS = np.array([(0.28, -1), (0.28, -0.28), (1, -0.28)])  # a quarter of it
_OUTLINES: dict[str, list[npt.NDArray[np.float64]]] = {
    "circle": [_arc(0, 360) * 0.95],
    "ring": [_arc(0, 360) * 0.95, _arc(0, 360) * 0.55],
    "square": [_box(0.8, 0.8)],
    "frame": [_box(0.95, 0.95), _box(0.64, 0.64)],
    "triangle": [_arc(-90, 270, 3)],
    "cross": [np.concatenate([_CROSS, _CROSS[:, ::-1] * (-1, 1), -_CROSS, _CROSS[:, ::-1] * (1, -1)])],
    "star": [np.stack([_arc(-90, 270, 5), _arc(-54, 306, 5) * 0.3], axis=1).reshape(-1, 2)],
    "bar": [_box(1.0, 0.3)],
    "crescent": [
        np.concatenate([_arc(50, 310, 24), _arc(290, 70, 24) * 0.82 + np.array([0.36, 0])]) + np.array([0.1, 0])
    ],
    "rails": [_box(1.0, 0.2) + np.array([0, side]) for side in (-0.6, 0.6)],
}
CLASSES = tuple(_OUTLINES)


def shapes_source(split: Split, length: int | None = None) -> InMemorySource:
    """`length` images (default 10,000 for training, 2,000 for test); image i depends on the split and on i alone."""
    if length is None:
        length = TRAIN_LENGTH if split == "train" else TEST_LENGTH
    identity = f"shapes\0{_VERSION}\0{split}\0{length}"
    return from_array(
        draw_shapes(split, length),
        np.arange(length, dtype=np.int64) % len(CLASSES),
        CLASSES,
        name=f"shapes ({split})",
        prefix=f"shapes-{split}",
        fingerprint=hashlib.sha256(identity.encode()).hexdigest()[:32],
    )


def draw_shapes(split: Split, length: int) -> Pixels:
    """uint8 (length, 32, 32, 3); the class of image i is i mod 10."""
    count = _SIDE * _SIDE
    draw = uniforms(2 + 7 * count, _SEED, int(split == "test"), np.arange(length))
    offset = (draw[:, None, :2] - 0.5) * _CELL  # of the whole grid
    each = draw[:, 2:].reshape(length, count, 7)
    cells = np.stack(np.divmod(np.arange(count), _SIDE), axis=1) + 0.5
    center = (cells + 0.5 * (each[:, :, :2] - 0.5)) * _CELL + offset
    radius = _CELL * (0.40 + 0.08 * each[:, :, 2])
    angle = each[:, :, 3] * 2 * np.pi
    turn = np.stack([np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)], axis=2).reshape(length, count, 2, 2)
    hsv = np.stack([each[:, :, 4] * 180, 120 + 135 * each[:, :, 5], 180 + 75 * each[:, :, 6]], axis=2)
    color = cv2.cvtColor(hsv.astype(np.uint8), cv2.COLOR_HSV2RGB).tolist()

    ground = _ground(split, length)
    images = np.empty((length, SIZE, SIZE, 3), np.uint8)
    for i in range(length):
        image = np.clip(cv2.resize(ground[i], (SIZE, SIZE)), 0, 255).astype(np.uint8)
        placed = [
            (part @ turn[i].transpose(0, 2, 1)) * radius[i, :, None, None] + center[i, :, None]
            for part in _OUTLINES[CLASSES[i % len(CLASSES)]]
        ]  # per part: (9, corners, 2)
        fixed = [np.rint((part - 0.5) * (1 << _SHIFT)).astype(np.int32) for part in placed]
        for k in range(count):
            cv2.fillPoly(image, [part[k] for part in fixed], color[i][k], cv2.LINE_AA, _SHIFT)
        images[i] = image
    return images


def _ground(split: Split, length: int) -> npt.NDArray[np.float32]:
    """Coarse color noise around one and the same mean: float32 (length, 5, 5, 3), in 0…255."""
    draw = uniforms(_POINTS * _POINTS * 3, _SEED + 1, int(split == "test"), np.arange(length)).astype(np.float32)
    noise = np.float32(_GROUND) + (draw - np.float32(0.5)) * np.float32(_ROUGHNESS)
    return noise.reshape(length, _POINTS, _POINTS, 3)
