"""The baseline for views: torchvision's transforms on Pillow images, one image after the other."""

from __future__ import annotations

import io
import random

import numpy as np
from PIL import Image, ImageFilter
from torchvision import transforms as T

from patchmix.build import build_views
from patchmix.config import ViewsConfig
from patchmix.data.views import View


def two_views(size: int, area: tuple[float, float] = (0.05, 1.0)) -> list[View]:
    """The paper's T1 and T2, as training builds them; `area` is (0.1, 1.0) for CIFAR."""
    return build_views(ViewsConfig(area=area), size)[:2]


class GaussianBlur:
    def __init__(self, sigma: tuple[float, float]) -> None:
        self.sigma = sigma

    def __call__(self, picture: Image.Image) -> Image.Image:
        return picture.filter(ImageFilter.GaussianBlur(random.uniform(*self.sigma)))


def pipeline(view: View) -> T.Compose:
    """MoCo v3's order, as its authors and most others write it."""
    jitter = T.ColorJitter(view.brightness, view.contrast, view.saturation, view.hue)
    bicubic = T.InterpolationMode.BICUBIC
    return T.Compose(
        [
            T.RandomResizedCrop(view.size, scale=view.area, ratio=view.ratio, interpolation=bicubic),
            T.RandomApply([jitter], p=view.jitter),
            T.RandomGrayscale(view.gray),
            T.RandomApply([GaussianBlur(view.sigma)], p=view.blur),
            T.RandomSolarize(128, p=view.solarize),
            T.RandomHorizontalFlip(view.flip),
        ]
    )


def of_pixels(pipelines: list[T.Compose], image: np.ndarray) -> list[np.ndarray]:
    picture = Image.fromarray(image)
    return [np.asarray(each(picture)) for each in pipelines]


def of_bytes(pipelines: list[T.Compose], data: bytes) -> list[np.ndarray]:
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    return [np.asarray(each(picture)) for each in pipelines]
