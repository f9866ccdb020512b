"""Images that cost about what photos cost: soft shapes with some texture, and a JPEG of each."""

from __future__ import annotations

import io

import cv2
import numpy as np
from PIL import Image


def picture(seed: int, height: int, width: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    image = np.zeros((height, width, 3), np.float32)
    for cells, weight, colors in ((4, 25.0, 3), (12, 15.0, 3), (24, 25.0, 1), (min(height, width) // 3, 8.0, 1)):
        noise = random.normal(0, weight, (cells, cells, colors)).astype(np.float32)
        image += cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC).reshape(height, width, colors)
    return np.clip(image + 128, 0, 255).astype(np.uint8)


def jpeg(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=90)
    return file.getvalue()
