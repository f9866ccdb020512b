"""Ten classes of coloured shapes, generated: a set that needs no files and that raw pixels do not solve.

Place, size, angle, colours and textures of a shape and of its background are random and say nothing about its class;
only the outline does.
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
CLASSES = ("circle", "square", "triangle", "star", "cross", "ring", "bar", "crescent", "heart", "arrow")
TRAIN_LENGTH = 10_000
TEST_LENGTH = 2_000
_VERSION = 1  # part of the fingerprint: raise it when the pixels change
_SEED = 20_220_803
_GRIDS = (2, 3, 5, 8)  # points per side of a texture's noise, from smooth to rough
_SHIFT = 6  # fractional bits of the corners given to OpenCV

Outline = list[npt.NDArray[np.float64]]


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
    draw = uniforms(24, _SEED, int(split == "test"), np.arange(length))
    angle = draw[:, 0] * 2 * np.pi
    radius = SIZE * (0.22 + 0.20 * draw[:, 1])
    margin = radius * 0.85
    centre = margin[:, None] + draw[:, 2:4] * (SIZE - 2 * margin[:, None])
    # Of three colours the one farthest from the background: the outline has to be visible.
    ground = draw[:, 4:7]
    options = draw[:, 7:16].reshape(length, 3, 3)
    farthest = np.abs(options - ground[:, None]).sum(axis=2).argmax(axis=1)
    colour = options[np.arange(length), farthest]
    rough = (draw[:, 16:18] * len(_GRIDS)).astype(int)
    strength = 30 + 50 * draw[:, 18:20]

    # Corners of all images of a class at once: (length, corners, 2), in OpenCV's fixed-point pixels.
    turn = np.stack([np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)], axis=1).reshape(-1, 2, 2)
    outlines = [_outline(name) for name in CLASSES]
    images = np.empty((length, SIZE, SIZE, 3), np.uint8)
    noise = _noise(2 * 3 * max(_GRIDS) ** 2, 1, split, length).reshape(length, 2, -1)
    grain = _noise((SIZE // 2) ** 2, 2, split, length)
    for i in range(length):
        corners = [
            np.rint(((part @ turn[i].T) * radius[i] + centre[i] - 0.5) * (1 << _SHIFT)).astype(np.int32)
            for part in outlines[i % len(CLASSES)]
        ]
        mask = np.zeros((SIZE, SIZE), np.uint8)
        cv2.fillPoly(mask, corners, 255, cv2.LINE_AA, _SHIFT)
        cover = (mask.astype(np.float32) / 255)[:, :, None]
        inner = _texture(noise[i, 0], _GRIDS[rough[i, 0]], colour[i], strength[i, 0])
        outer = _texture(noise[i, 1], _GRIDS[rough[i, 1]], ground[i], strength[i, 1])
        image = outer + cover * (inner - outer)
        # Fine grain over both, in an order of its own per quarter of the image.
        image += np.tile(grain[i].reshape(SIZE // 2, SIZE // 2), (2, 2))[:, :, None] * 16
        images[i] = cv2.addWeighted(image, 1, image, 0, 0, dtype=cv2.CV_8U)
    return images


def _noise(draws: int, stream: int, split: Split, length: int) -> npt.NDArray[np.float32]:
    """float32 (length, draws), uniform in [-0.5, 0.5)."""
    draw = uniforms(draws, _SEED + stream, int(split == "test"), np.arange(length))
    return draw.astype(np.float32) - np.float32(0.5)


def _texture(
    noise: npt.NDArray[np.float32], grid: int, colour: npt.NDArray[np.float64], strength: float
) -> npt.NDArray[np.float32]:
    """Smooth colour noise around a mean colour in [0, 1]: float32 (32, 32, 3), in 0…255."""
    points = noise[: grid * grid * 3].reshape(grid, grid, 3) * np.float32(2 * strength)
    points = points + (25 + 205 * colour).astype(np.float32)
    return np.asarray(cv2.resize(points, (SIZE, SIZE), interpolation=cv2.INTER_LINEAR), np.float32)


def _outline(name: str) -> Outline:
    """Corners (x, y) of a shape with circumradius 1: some closed lines, each (corners, 2), filled by even-odd."""
    if name == "circle":
        return [_arc(0, 360) * 0.9]
    if name == "square":
        return [_arc(45, 405, 4)]
    if name == "triangle":
        return [_arc(-90, 270, 3)]
    if name == "star":
        tips, notches = _arc(-90, 270, 5), _arc(-54, 306, 5) * 0.4
        return [np.stack([tips, notches], axis=1).reshape(-1, 2)]
    if name == "cross":
        a, b = 1.0, 0.3
        quarter = np.array([(b, -a), (b, -b), (a, -b)])
        turns = [np.array([[0, -1], [1, 0]]), np.eye(2)]
        parts = [quarter]
        for _ in range(3):
            parts.append(parts[-1] @ turns[0].T)
        return [np.concatenate(parts)]
    if name == "ring":
        return [_arc(0, 360) * 0.95, _arc(0, 360) * 0.5]
    if name == "bar":
        return [np.array([(-1.0, -0.27), (1.0, -0.27), (1.0, 0.27), (-1.0, 0.27)])]
    if name == "crescent":
        outer, inner = _arc(50, 310, 24), _arc(290, 70, 24) * 0.82
        return [np.concatenate([outer, inner + np.array([0.36, 0.0])]) + np.array([0.1, 0.0])]
    if name == "heart":
        t = np.linspace(0, 2 * np.pi, 40, endpoint=False)
        x = 16 * np.sin(t) ** 3
        y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
        return [np.stack([x, -y], axis=1) / 16.5]
    assert name == "arrow", name
    half = [(-1.0, 0.22), (0.1, 0.22), (0.1, 0.7), (1.0, 0.0)]
    return [np.array(half + [(x, -y) for x, y in reversed(half[:-1])])]


def _arc(start: float, stop: float, corners: int = 32) -> npt.NDArray[np.float64]:
    """Points on the unit circle, in degrees; a full turn does not repeat its first point: (corners, 2)."""
    closed = abs(stop - start) >= 360
    angle = np.deg2rad(np.linspace(start, stop, corners, endpoint=not closed))
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)
