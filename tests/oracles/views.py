"""Views by torchvision and Pillow, one image and one operation at a time, with given parameters."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageOps
from torchvision.transforms import functional as TF

from patchmix.data.views import Parameters


def render(image: np.ndarray, size: int, p: Parameters, i: int) -> np.ndarray:
    """Image i of a batch in one view: uint8 (size, size, 3)."""
    top, left, height, width = p.box[i].tolist()
    picture = Image.fromarray(image).crop((left, top, left + width, top + height))
    picture = picture.resize((size, size), Image.Resampling.BICUBIC)
    if p.jitter[i]:
        hue = p.hue[i] / 256
        adjust = [
            lambda x: TF.adjust_brightness(x, p.brightness[i]),
            lambda x: TF.adjust_contrast(x, p.contrast[i]),
            lambda x: TF.adjust_saturation(x, p.saturation[i]),
            lambda x: TF.adjust_hue(x, hue - 1 if hue > 0.5 else hue),
        ]
        for operation in p.order[i]:
            picture = adjust[operation](picture)
    if p.gray[i]:
        picture = TF.rgb_to_grayscale(picture, num_output_channels=3)
    if p.sigma[i] > 0:
        picture = TF.gaussian_blur(picture, kernel_size=[2 * int(np.ceil(4 * p.sigma[i])) + 1] * 2, sigma=p.sigma[i])
    if p.solarize[i]:
        picture = ImageOps.solarize(picture, 128)
    if p.flip[i]:
        picture = ImageOps.mirror(picture)
    return np.asarray(picture)


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bicubic with antialiasing, pixel by pixel; along the rows first, with 8 bits in between.

    Pillow 13 begins with the columns where that is cheaper. Only overshoot at hard edges shows the difference.
    """
    return _along_rows(_along_rows(image, width).swapaxes(0, 1), height).swapaxes(0, 1)


def _along_rows(image: np.ndarray, target: int) -> np.ndarray:
    size = image.shape[1]
    scale = size / target
    stretch = max(scale, 1.0)
    out = np.empty((image.shape[0], target, 3), np.uint8)
    for i in range(target):
        center = (i + 0.5) * scale
        inside = range(max(0, int(center - 2 * stretch + 0.5)), min(size, int(center + 2 * stretch + 0.5)))
        weights = np.array([_bicubic((x + 0.5 - center) / stretch) for x in inside])
        value = np.tensordot(weights / weights.sum(), image[:, inside.start : inside.stop].astype(float), (0, 1))
        out[:, i] = np.clip(np.floor(value + 0.5), 0, 255)
    return out


def _bicubic(x: float) -> float:
    x = abs(x)
    if x < 1:
        return 1.5 * x**3 - 2.5 * x**2 + 1
    return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0
