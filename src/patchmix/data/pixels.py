"""Pixel operations on uint8 (H, W, 3), RGB: bicubic resizing, and the colors of torchvision's ColorJitter.

Images of other depths and channels are float32 (H, W, C), with white at 1, from resizing on. RGB is clipped to 0…1.
Resizing is bicubic with antialiasing as in Pillow and torchvision (a = -0.5; OpenCV's has a = -0.75 and none). Color
operations are 3 x 3 or 3 x 4 matrices for OpenCV's `transform`, which works in fixed point and clips to 0…255.
"""

from functools import lru_cache
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from patchmix.data.decode import Pixels, is_rgb8, to_unit

Matrix = npt.NDArray[np.float32]

LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R 601, as Pillow's "L"
GRAY = np.tile(LUMA, (3, 1)).astype(np.float32)  # (3, 3)
BLUR_REACH = 3.0  # a blur kernel ends at this many sigmas
_BLUR_STEPS = 128  # sigmas are distinguished down to 1/128 pixel, so that kernels can be cached
_BLUR_UNIT = 256  # OpenCV's fixed point for 8-bit smoothing
# Up to 38 pixels a call's fixed costs dominate, and two small matrix products with cached weights are twice as fast as
# torch's uint8 kernel. Measured: to 32 px 12 against 22 µs, to 48 px 27 against 25 µs.
_SMALL = 38
# OpenBLAS may start threads for products of more than 2^18 (older versions) multiplications, here 9 per unit; in many
# workers at once that would be slow.
_ONE_THREAD = 2**18 // 9
_MOST_CHANNELS = 64  # that OpenCV is given at once; it takes 128 or, in older versions, 512
_ZERO, _WHITE = np.float32(0), np.float32(255)


def resize(image: Pixels, height: int, width: int) -> Pixels:
    """(H, W, C), contiguous or a crop of something larger → new: uint8 RGB (height, width, 3), others as floats."""
    rows, columns = image.shape[:2]
    if not is_rgb8(image):
        values = to_unit(image)
        if (rows, columns) != (height, width):
            values = _interpolate(values, height, width)
        return values if image.dtype == np.float32 and image.shape[2] != 3 else values.clip(0, 1)
    if rows == height and columns == width:
        return image.copy()
    if max(rows, columns, height, width) <= _SMALL:
        return _resize_small(image, rows, columns, height, width)
    # torch warns of memory that it must not write to.
    return _interpolate(image if image.flags.writeable else image.copy(), height, width)


def _interpolate(image: Pixels, height: int, width: int) -> Pixels:
    # (1, C, H, W) with the strides of a channels-last batch, its first one included: only then does torch return
    # channels-last too, at half the cost.
    batch = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    resized = F.interpolate(batch, size=(height, width), mode="bicubic", antialias=True)
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


def _resize_small(image: Pixels, rows: int, columns: int, height: int, width: int) -> Pixels:
    pixels = image.reshape(rows, columns * 3).astype(np.float32)
    weights = _across_weights(columns, width)
    across: Any
    if rows * columns * width <= _ONE_THREAD:
        across = pixels @ weights
    else:
        across = np.empty((rows, width * 3), np.float32)
        half = rows // 2
        np.matmul(pixels[:half], weights, out=across[:half])
        np.matmul(pixels[half:], weights, out=across[half:])
    # Pillow clips between its two passes too; without this, overshoot at hard edges would differ visibly.
    np.maximum(across, _ZERO, out=across)
    np.minimum(across, _WHITE, out=across)
    both = (_weights(rows, height) @ across).reshape(height, width, 3)
    # The cheapest way to round and saturate to 8 bits.
    return np.asarray(cv2.addWeighted(both, 1.0, both, 0.0, 0.0, dtype=cv2.CV_8U))


@lru_cache(maxsize=1024)
def _weights(size: int, target: int) -> Matrix:
    """The weight of each input pixel in each output pixel along one axis: float32 (target, size), rows sum to 1."""
    scale = size / target
    stretch = max(scale, 1.0)  # antialiasing: the kernel grows with the step
    center = (np.arange(target) + 0.5) * scale
    distance = np.abs((np.arange(size) + 0.5)[None, :] - center[:, None]) / stretch
    a = -0.5
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = (((distance - 5) * distance + 8) * distance - 4) * a
    kernel = np.where(distance < 1, near, np.where(distance < 2, far, 0.0))
    weights: Matrix = (kernel / kernel.sum(axis=1, keepdims=True)).astype(np.float32)
    return weights


@lru_cache(maxsize=1024)
def _across_weights(size: int, target: int) -> Matrix:
    """The weights along a row of interleaved RGB: float32 (3 size, 3 target)."""
    return np.ascontiguousarray(np.kron(_weights(size, target).T, np.eye(3, dtype=np.float32)))


def transform(pixels: Pixels, matrix: Matrix) -> Pixels:
    """RGB by a 3 x 3 or 3 x 4 matrix."""
    changed = np.asarray(cv2.transform(pixels, matrix))
    return changed if changed.dtype == np.uint8 else changed.clip(0, 1)


def blend_matrices(factors: npt.NDArray[np.float64], towards: Any) -> Matrix:
    """(N,) → (N, 3, 3): towards black, 0, or the pixel's own gray, LUMA, below 1, away from it above."""
    f = factors[:, None, None]
    matrices: Matrix = (np.eye(3) * f + (1 - f) * towards).astype(np.float32)
    return matrices


def contrast_matrices(factors: npt.NDArray[np.float64]) -> Matrix:
    """(N,) → (N, 3, 4), for `adjust_contrast`: the last column is what a mean gray of 1 adds."""
    linear = np.eye(3) * factors[:, None, None]
    constant = np.broadcast_to((1 - factors)[:, None, None], (len(factors), 3, 1))
    return np.concatenate([linear, constant], axis=2).astype(np.float32)


def adjust_contrast(pixels: Pixels, matrix: Matrix) -> Pixels:
    """Towards the image's mean gray below 1, away from it above."""
    red, green, blue, _ = cv2.mean(pixels)
    matrix = matrix.copy()
    matrix[:, 3] *= LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
    return transform(pixels, matrix)


def adjust_bands(pixels: Pixels, operation: int, brightness: float, contrast: float) -> Pixels:
    """Operation 0, brightness, or 1, contrast: towards 0 or each channel's mean. Others are for RGB only."""
    if operation > 1:
        return pixels
    factor = np.float32(contrast if operation else brightness)
    towards = pixels.mean(axis=(0, 1)) if operation else np.float32(0)
    return pixels * factor + towards * (1 - factor)


def turn_hue(pixels: Pixels, steps: int) -> Pixels:
    """Turn the color circle by `steps` of 256, 0 … 255."""
    if pixels.dtype != np.uint8:
        wide: Any = cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV)  # hue in degrees
        wide[:, :, 0] = (wide[:, :, 0] + steps * 360 / 256) % 360
        return np.asarray(cv2.cvtColor(wide, cv2.COLOR_HSV2RGB))
    hsv = cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV_FULL)
    rows = hsv.reshape(hsv.shape[0], -1)
    # Added to whole rows, (steps, 0, 0) repeated: contiguous, and wraps around as hue must.
    np.add(rows, _hue_row(steps, hsv.shape[1]), out=rows)
    return np.asarray(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL, dst=hsv))


@lru_cache(maxsize=1024)
def _hue_row(steps: int, width: int) -> Pixels:
    return np.tile(np.array([steps, 0, 0], np.uint8), width)


def solarize(pixels: Pixels) -> Pixels:
    """Invert values of 128 and above: the smaller of a value and its inverse."""
    return np.asarray(cv2.min(pixels, cv2.bitwise_not(pixels) if pixels.dtype == np.uint8 else 1 - pixels))


def blur(pixels: Pixels, sigma: float) -> Pixels:
    """Gaussian blur, `sigma` in pixels, mirrored at the border; returns the same array where it changes nothing."""
    kernel = _blur_kernel(round(sigma * _BLUR_STEPS))
    if kernel is None:
        return pixels
    if pixels.shape[2] > _MOST_CHANNELS:
        parts = np.array_split(pixels, -(-pixels.shape[2] // _MOST_CHANNELS), axis=2)
        return np.concatenate([blur(np.ascontiguousarray(part), sigma) for part in parts], axis=2)
    filtered = cv2.sepFilter2D(pixels, -1, kernel, kernel, borderType=cv2.BORDER_REFLECT_101)
    return np.asarray(filtered).reshape(pixels.shape)  # OpenCV drops a single channel


@lru_cache(maxsize=4096)
def _blur_kernel(steps: int) -> Matrix | None:
    """float32 (2 r + 1,); None where the neighbors' weight rounds to 0."""
    sigma = max(steps, 1) / _BLUR_STEPS
    reach = int(np.ceil(BLUR_REACH * sigma))
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    # Rounded here, to a sum of exactly 1: OpenCV rounds each weight to 1/256, which would change the brightness.
    weights = np.rint(weights / weights.sum() * _BLUR_UNIT)
    weights[reach] += _BLUR_UNIT - weights.sum()
    used = np.flatnonzero(weights)
    if len(used) == 1:
        return None
    kernel: Matrix = (weights[used[0] : used[-1] + 1] / _BLUR_UNIT).astype(np.float32)
    return kernel
