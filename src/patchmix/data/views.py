"""Images → augmented views, with torchvision's parameters and meaning, in OpenCV.

The order is MoCo v3's: crop, jitter, gray, blur, solarize, flip. What happens to an image is a pure function of
(seed, epoch, index, view). All parameters of a batch are drawn at once; only the pixel work goes image by image.

Shapes: N images in a batch, h = w = a view's size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from patchmix.data import IMAGENET_MEAN, IMAGENET_STD
from patchmix.data import pixels as operations
from patchmix.data.contract import Indices
from patchmix.data.decode import Pixels, Reduced, is_rgb8, to_unit
from patchmix.data.randomness import uniforms

Floats = npt.NDArray[np.float64]

# How much finer than its view a crop of a reduced image must be. Reduced views lose a little of their gradients: 4 % at
# 1, 2 % at 1.5, 1 % at 2.
_MARGIN = 1.5
SMALL_IMAGES = 64  # up to here images are evaluated whole, above with the usual margin of 8/7 (256 → 224)
_ATTEMPTS = 10  # torchvision's, to find a crop that fits inside the image


@dataclass(frozen=True)
class View:
    """One column of the paper's table "augmentation"; probabilities, ranges and strengths as in torchvision."""

    size: int
    area: tuple[float, float] = (0.05, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: float = 0.8
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    gray: float = 0.2
    blur: float = 1.0
    sigma: tuple[float, float] = (0.1, 2.0)
    solarize: float = 0.0

    def __post_init__(self) -> None:
        for name in ("area", "ratio", "sigma"):
            low, high = getattr(self, name)
            if not 0 < low <= high or (name == "area" and high > 1):
                most = " <= 1" * (name == "area")
                raise ValueError(f"{name} is {(low, high)}; it must be a range with 0 < low <= high{most}")


class Transform(Protocol):
    """What a loader calls in a worker, once a batch."""

    def __call__(self, images: Sequence[Pixels], *, epoch: int, indices: Indices) -> list[Pixels]:
        """Images of any size → per view (N, h, w, C), contiguous: uint8 RGB, or floats (see `empty_batch`)."""


class Views:
    """The transform of pre-training: some views of each image."""

    def __init__(self, views: Sequence[View], *, seed: int) -> None:
        self.views = tuple(views)
        self.seed = seed

    def __call__(self, images: Sequence[Pixels | Reduced], *, epoch: int, indices: Indices) -> list[Pixels]:
        whole = [(image.height, image.width) if isinstance(image, Reduced) else image.shape[:2] for image in images]
        pixels = [image.pixels if isinstance(image, Reduced) else image for image in images]
        sizes, held = (np.array(s, np.int64).reshape(-1, 2) for s in (whole, [image.shape[:2] for image in pixels]))
        drawn = [d._replace(box=_at_scale(d.box, sizes, held)) for d in self.draw(sizes, epoch, indices)]
        return [render(view, pixels, parameters) for view, parameters in zip(self.views, drawn, strict=True)]

    def draw(self, sizes: Indices, epoch: int, indices: Indices) -> "list[Parameters]":
        """What happens to images of these sizes, (N, 2), in each view."""
        draws = [uniforms(DRAWS, self.seed, epoch, indices, number) for number in range(len(self.views))]
        return [draw_parameters(view, sizes, draw) for view, draw in zip(self.views, draws, strict=True)]

    def reduction(self, height: int, width: int, *, epoch: int, index: int) -> int:
        """The smallest scale, 1 / (1, 2, 4 or 8), that is fine enough for the image's crops in all views."""
        if min(height, width) < 2 * _MARGIN * max(view.size for view in self.views):
            return 1  # as nearly always where images are small
        sizes, largest = np.array([[height, width]], np.int64), 8
        for number, view in enumerate(self.views):
            _, _, h, w = _crop_boxes(view, sizes, uniforms(DRAWS, self.seed, epoch, index, number))[0].tolist()
            while largest > 1 and min(h, w) < largest * view.size * _MARGIN:
                largest //= 2
        return largest


class CenterCrop:
    """The transform of evaluation: shorter side → `resize` (None: `size`), then the central `size` x `size`."""

    def __init__(self, size: int, *, resize: int | None = None) -> None:
        self.size = size
        self.resize = size if resize is None else resize
        if not 1 <= self.size <= self.resize:
            raise ValueError(f"resize {self.resize} must be at least the crop's size {size}, and that at least 1")

    def __call__(self, images: Sequence[Pixels], *, epoch: int, indices: Indices) -> list[Pixels]:
        out = empty_batch(images, self.size)
        for image, place in zip(images, out, strict=True):
            (height, top), (width, left) = self.axes(image.shape[:2])
            resized = operations.resize(image, height, width)
            _put(resized[top : top + self.size, left : left + self.size], place)
        return [out]

    def axes(self, sides: Sequence[int]) -> list[tuple[int, int]]:
        """Length after resizing and begin of the crop, of each of an image's sides."""
        # torchvision truncates the longer side and rounds the crop's corner; so must we, to the pixel.
        resized = [int(self.resize * side / min(sides)) for side in sides]
        return [(side, round((side - self.size) / 2.0)) for side in resized]


def usual_resize(image_size: int) -> int:
    """The shorter side before the center crop: small images are taken whole, larger ones with ImageNet's margin."""
    return image_size if image_size <= SMALL_IMAGES else round(image_size * 256 / 224)


def empty_batch(images: Sequence[Pixels], size: int) -> Pixels:
    """Room for views of images: uint8 (N, size, size, 3) if all are 8-bit RGB, else float32 (…, C), white at 1."""
    counts = {image.shape[2] for image in images} or {3}
    if len(counts) > 1:
        raise ValueError(
            f"images have {' and '.join(map(str, sorted(counts)))} channels; all must have the same number"
        )
    dtype = np.uint8 if all(map(is_rgb8, images)) else np.float32
    return np.empty((len(images), size, size, *counts), dtype)


def _put(pixels: Pixels, place: Pixels) -> None:
    place[:] = pixels if pixels.dtype == place.dtype else to_unit(pixels)


def to_float(images: Tensor, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD) -> Tensor:
    """A loader's (N, h, w, C) on any device → normalized float32 (N, C, h, w), new and contiguous."""
    planes = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    return normalize_(planes, mean, std, white=255 if images.dtype == torch.uint8 else 1)


def normalize_(pixels: Tensor, mean: Sequence[float], std: Sequence[float], *, white: float = 255) -> Tensor:
    """float32 (N, C, h, w) in 0…white → normalized, in place."""
    if not len(mean) == len(std) == pixels.shape[1]:  # of imported weights, whose files do not say them
        raise ValueError(
            f"mean and std have {len(mean)} and {len(std)} values, the images {pixels.shape[1]} channels; give one for "
            "each channel, to a backbone by dataclasses.replace(backbone, mean=…, std=…)"
        )
    # Channel by channel, with numbers: a tensor of them would make the host wait for the device.
    for plane, m, s in zip(pixels.unbind(dim=1), mean, std, strict=True):
        plane.mul_(1 / (white * s)).add_(-m / s)
    return pixels


def as_channels(images: Tensor, in_chans: int) -> Tensor:
    """(N, C, h, w) → (N, in_chans, h, w); one channel is the mean of the normalized three."""
    if in_chans == 1:
        return images.mean(dim=1, keepdim=True)
    if images.shape[1] != in_chans:
        found = f"images have {images.shape[1]} channels, the encoder takes {in_chans}"
        raise ValueError(f"{found}; give images with {in_chans} channels")
    return images


# Where each random number of a view stands in its row of draws.
_AREA = slice(0, _ATTEMPTS)
_RATIO = slice(_ATTEMPTS, 2 * _ATTEMPTS)
_TOP, _LEFT, _FLIP, _JITTER, _GRAY, _BLUR, _SIGMA, _SOLARIZE = range(2 * _ATTEMPTS, 2 * _ATTEMPTS + 8)
_ORDER = slice(_SOLARIZE + 1, _SOLARIZE + 5)
_FACTORS = slice(_SOLARIZE + 5, _SOLARIZE + 9)
DRAWS = _SOLARIZE + 9


class Parameters(NamedTuple):
    """What happens to each of N images in one view."""

    box: Indices  # (N, 4): top, left, height, width
    jitter: npt.NDArray[np.bool_]  # (N,)
    order: Indices  # (N, 4): 0 brightness, 1 contrast, 2 saturation, 3 hue
    brightness: Floats  # (N,): factors
    contrast: Floats
    saturation: Floats
    hue: Indices  # (N,): in 1/256 of the color circle, 0…255
    gray: npt.NDArray[np.bool_]
    sigma: Floats  # (N,), 0 where there is no blur
    solarize: npt.NDArray[np.bool_]
    flip: npt.NDArray[np.bool_]


def draw_parameters(view: View, sizes: Indices, draw: Floats) -> Parameters:
    """`sizes`: (N, 2), heights and widths; `draw`: (N, DRAWS), uniform in [0, 1)."""
    factors = 2 * draw[:, _FACTORS] - 1
    sigma = view.sigma[0] + (view.sigma[1] - view.sigma[0]) * draw[:, _SIGMA]
    return Parameters(
        box=_crop_boxes(view, sizes, draw),
        jitter=draw[:, _JITTER] < view.jitter,
        order=np.argsort(draw[:, _ORDER], axis=1),
        brightness=1 + view.brightness * factors[:, 0],
        contrast=1 + view.contrast * factors[:, 1],
        saturation=1 + view.saturation * factors[:, 2],
        hue=np.rint(view.hue * factors[:, 3] * 256).astype(np.int64) % 256,
        gray=draw[:, _GRAY] < view.gray,
        sigma=np.where(draw[:, _BLUR] < view.blur, sigma, 0.0),
        solarize=draw[:, _SOLARIZE] < view.solarize,
        flip=draw[:, _FLIP] < view.flip,
    )


def _crop_boxes(view: View, sizes: Indices, draw: Floats) -> Indices:
    """torchvision's RandomResizedCrop: the first of ten tries that fits, else the central crop of legal ratio."""
    height, width = sizes[:, :1], sizes[:, 1:]  # (N, 1)
    area = height * width * (view.area[0] + (view.area[1] - view.area[0]) * draw[:, _AREA])
    low, high = np.log(view.ratio)
    ratio = np.exp(low + (high - low) * draw[:, _RATIO])
    w = np.rint(np.sqrt(area * ratio)).astype(np.int64)  # (N, 10)
    h = np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    rows, first = np.arange(len(sizes)), fits.argmax(axis=1)
    h, w, found = h[rows, first], w[rows, first], fits.any(axis=1)
    height, width = height[:, 0], width[:, 0]
    top = np.floor(draw[:, _TOP] * (height - h + 1)).astype(np.int64)
    left = np.floor(draw[:, _LEFT] * (width - w + 1)).astype(np.int64)

    narrow, wide = width < view.ratio[0] * height, width > view.ratio[1] * height
    rest_h = np.where(narrow, np.rint(width / view.ratio[0]).astype(np.int64), height)
    rest_w = np.where(wide, np.rint(height * view.ratio[1]).astype(np.int64), width)
    h, w = np.where(found, h, rest_h), np.where(found, w, rest_w)
    top, left = np.where(found, top, (height - h) // 2), np.where(found, left, (width - w) // 2)
    return np.stack([top, left, h, w], axis=1)


def _at_scale(box: Indices, sizes: Indices, held: Indices) -> Indices:
    """Boxes in images of `sizes`, (N, 2), in the pixels of what is held of them, with edges to the nearest one."""
    reduction = np.rint(sizes[:, :1] / held[:, :1])  # (N, 1)
    start = np.rint(box[:, :2] / reduction)
    end = np.minimum(np.rint((box[:, :2] + box[:, 2:]) / reduction), held)
    return np.concatenate([start, end - start], axis=1).astype(np.int64)


def render(view: View, images: Sequence[Pixels], parameters: Parameters) -> Pixels:
    """The pixel work of one view: (N, h, w, C)."""
    size = view.size
    out = empty_batch(images, size)
    brighten = operations.blend_matrices(parameters.brightness, 0)
    contrast = operations.contrast_matrices(parameters.contrast)
    saturate = operations.blend_matrices(parameters.saturation, operations.LUMA)
    # Lists, because reading a NumPy array one number at a time is slow.
    rows: Any = map(Parameters, *(column.tolist() for column in parameters))
    for i, (image, drawn) in enumerate(zip(images, rows, strict=True)):
        top, left, height, width = drawn.box
        pixels: Any = operations.resize(image[top : top + height, left : left + width], size, size)
        rgb = pixels.shape[2] == 3
        if drawn.jitter:
            for operation in drawn.order:
                if not rgb:
                    pixels = operations.adjust_bands(pixels, operation, drawn.brightness, drawn.contrast)
                elif operation == 0:
                    pixels = operations.transform(pixels, brighten[i])
                elif operation == 1:
                    pixels = operations.adjust_contrast(pixels, contrast[i])
                elif operation == 2:
                    pixels = operations.transform(pixels, saturate[i])
                elif drawn.hue:
                    pixels = operations.turn_hue(pixels, drawn.hue)
        if drawn.gray and rgb:
            pixels = operations.transform(pixels, operations.GRAY)
        if drawn.sigma:
            pixels = operations.blur(pixels, drawn.sigma)
        if drawn.solarize and rgb:
            pixels = operations.solarize(pixels)
        if drawn.flip and out.dtype == np.uint8:
            cv2.flip(pixels, 1, dst=out[i])  # several times as fast
        else:
            _put(pixels[:, ::-1] if drawn.flip else pixels, out[i])
    return out
