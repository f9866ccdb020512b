"""Pixel operations on uint8 (h, w, 3), RGB → a new one; each clips to 0…255, as torchvision's do.

Colour operations are 3 x 3 or 3 x 4 matrices for OpenCV's `transform`, which works in fixed point and saturates.
"""

from functools import lru_cache
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from patchmix.data.decode import Pixels

Matrices = npt.NDArray[np.float32]

LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R 601, as Pillow's "L"
GRAY = np.tile(LUMA, (3, 1)).astype(np.float32)  # (3, 3)

BLUR_REACH = 3.0  # a blur kernel ends at this many sigmas
_BLUR_STEPS = 128  # sigmas are told apart down to 1/128 pixel, so that kernels can be kept
_BLUR_UNIT = 256  # OpenCV's fixed point for 8-bit smoothing


def brightness_matrices(factors: npt.NDArray[np.float64]) -> Matrices:
    """(N,) → (N, 3, 3): towards black below 1, away from it above."""
    return (np.eye(3) * factors[:, None, None]).astype(np.float32)


def saturation_matrices(factors: npt.NDArray[np.float64]) -> Matrices:
    """(N,) → (N, 3, 3): towards the pixel's own grey below 1, away from it above."""
    f = factors[:, None, None]
    matrices: Matrices = (np.eye(3) * f + (1 - f) * LUMA).astype(np.float32)
    return matrices


def contrast_matrices(factors: npt.NDArray[np.float64]) -> Matrices:
    """(N,) → (N, 3, 4), for `adjust_contrast`: its last column is what a mean grey of 1 adds."""
    linear = np.eye(3) * factors[:, None, None]
    constant = np.broadcast_to((1 - factors)[:, None, None], (len(factors), 3, 1))
    return np.concatenate([linear, constant], axis=2).astype(np.float32)


def adjust_contrast(pixels: Pixels, matrix: Matrices) -> Pixels:
    """Towards the image's mean grey below 1, away from it above."""
    red, green, blue, _ = cv2.mean(pixels)
    matrix = matrix.copy()
    matrix[:, 3] *= LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
    return _pixels(cv2.transform(pixels, matrix))


def turn_hue(pixels: Pixels, steps: int) -> Pixels:
    """Turn the colour circle by `steps` of 256, 0 … 255."""
    hsv = cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV_FULL)
    rows = hsv.reshape(hsv.shape[0], -1)
    # Added to whole rows, (steps, 0, 0) repeated: contiguous, and wraps around as hue must.
    np.add(rows, _hue_row(steps, hsv.shape[1]), out=rows)
    return _pixels(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL, dst=hsv))


@lru_cache(maxsize=1024)
def _hue_row(steps: int, width: int) -> Pixels:
    return np.tile(np.array([steps, 0, 0], np.uint8), width)


def solarize(pixels: Pixels) -> Pixels:
    """Invert what is at or above 128: which is the smaller of a value and its inverse."""
    return _pixels(cv2.min(pixels, cv2.bitwise_not(pixels)))


def blur(pixels: Pixels, sigma: float) -> Pixels:
    """Gaussian blur, `sigma` in pixels, mirrored at the border; the same array back where it changes nothing."""
    kernel = _blur_kernel(round(sigma * _BLUR_STEPS))
    if kernel is None:
        return pixels
    return _pixels(cv2.sepFilter2D(pixels, -1, kernel, kernel, borderType=cv2.BORDER_REFLECT_101))


@lru_cache(maxsize=4096)
def _blur_kernel(steps: int) -> Matrices | None:
    """float32 (2 r + 1,); None where the neighbours' weight rounds to nothing."""
    sigma = max(steps, 1) / _BLUR_STEPS
    reach = int(np.ceil(BLUR_REACH * sigma))
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    weights = np.rint(weights / weights.sum() * _BLUR_UNIT)
    # Rounded by ourselves, with a sum of exactly 1: OpenCV rounds each weight to 1/256, which would change the
    # brightness.
    weights[reach] += _BLUR_UNIT - weights.sum()
    used = np.flatnonzero(weights)
    if len(used) == 1:
        return None
    kernel: Matrices = (weights[used[0] : used[-1] + 1] / _BLUR_UNIT).astype(np.float32)
    return kernel


def _pixels(array: Any) -> Pixels:
    """OpenCV's results are arrays of any type to a type checker."""
    result: Pixels = array
    return result
