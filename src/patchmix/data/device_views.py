"""A batch of uint8 views → normalized float images on the device, where colors may be changed as well.

With `--views device` the workers only crop, resize and flip; the parameters of the colors come along as numbers. The
operations are those of pixels.py in their order, in float32 and without 8 bits in between. Flipping commutes with all
of them. Nothing loops over images, and nothing makes the host wait for the device: all shapes are known beforehand.

Shapes: N images in a batch, V views, h = w = a view's size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from patchmix.data.contract import Indices
from patchmix.data.loader import Batch
from patchmix.data.pixels import BLUR_REACH, LUMA
from patchmix.data.views import Parameters, View, Views, as_channels, normalize_, to_float

# What a view does to an image's colors, as a row of numbers. An image without jitter has factors 1 and hue 0.
_ORDER = slice(0, 4)  # 0 brightness, 1 contrast, 2 saturation, 3 hue
_FACTORS = slice(4, 7)  # of the first three
_HUE, _GRAY, _SIGMA, _SOLARIZE = 7, 8, 9, 10  # turns of the color circle; 0 or 1; pixels, 0 for none; 0 or 1


@dataclass(frozen=True)
class Prepare:
    """A batch → the images that a method takes: per view float32 (N, in_chans, h, w), on the batch's device."""

    mean: Sequence[float]
    std: Sequence[float]
    in_chans: int = 3
    max_sigma: float = 2.0  # of any view's blur

    def __call__(self, batch: Batch) -> list[Tensor]:
        return [as_channels(self._normalized(batch, number), self.in_chans) for number in range(len(batch.views))]

    def _normalized(self, batch: Batch, number: int) -> Tensor:
        if batch.colors is None:  # changed by the workers
            return to_float(batch.views[number], self.mean, self.std)
        pixels = change_colors(batch.views[number], batch.colors[:, number], max_sigma=self.max_sigma)
        return normalize_(pixels, self.mean, self.std)


class Crops(Views):
    """The transform of pre-training with `--views device`: the crops and flips of `Views`, their colors unchanged."""

    def __init__(self, views: Sequence[View], *, seed: int) -> None:
        # Every parameter has its own random number, so leaving some operations out changes no other.
        super().__init__([replace(view, jitter=0, gray=0, blur=0, solarize=0) for view in views], seed=seed)
        self._whole = Views(views, seed=seed)

    def colors(self, *, epoch: int, indices: Indices) -> npt.NDArray[np.float32]:
        """What is left to do: (N, V, 11), for `change_colors`."""
        any_size = np.ones((len(indices), 2), np.int64)  # only crops depend on it
        return np.stack([color_rows(drawn) for drawn in self._whole.draw(any_size, epoch, indices)], axis=1)


def color_rows(drawn: Parameters) -> npt.NDArray[np.float32]:
    """The parameters of N images in one view as `change_colors` takes them: (N, 11)."""
    factors = [np.where(drawn.jitter, f, 1.0) for f in (drawn.brightness, drawn.contrast, drawn.saturation)]
    hue = np.where(drawn.jitter, drawn.hue, 0) / 256
    columns = [*drawn.order.T, *factors, hue, drawn.gray, drawn.sigma, drawn.solarize]
    return np.stack(columns, axis=1).astype(np.float32)


def change_colors(images: Tensor, rows: Tensor, *, max_sigma: float) -> Tensor:
    """A loader's (N, h, w, C), rows (N, 11) → float32 (N, C, h, w) in 0…255, contiguous; sigmas ≤ `max_sigma`.

    What is not RGB gets brightness, contrast and blur only.
    """
    pixels = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    if images.dtype != torch.uint8:
        pixels = pixels * 255
    order, factors = rows[:, _ORDER], rows[:, _FACTORS]
    if pixels.shape[1] != 3:
        for place in range(4):
            pixels = _blend(pixels, order[:, place], factors, active=order[:, place] < 2)
        return _blur(pixels, rows[:, _SIGMA], math.ceil(BLUR_REACH * max_sigma))
    # Turning the hue costs most. All images do it at once, between the operations before and after it.
    turn_at = order.argmax(dim=1)
    for place in (0, 1, 2):
        pixels = _blend(pixels, order[:, place], factors, active=turn_at > place)
    pixels = _turn_hue(pixels, _per_image(rows[:, _HUE]))
    for place in (1, 2, 3):
        pixels = _blend(pixels, order[:, place], factors, active=turn_at < place)
    pixels = torch.lerp(_luma(pixels), pixels, 1 - _per_image(rows[:, _GRAY]))
    pixels = _blur(pixels, rows[:, _SIGMA], math.ceil(BLUR_REACH * max_sigma))
    return torch.where(_per_image(rows[:, _SOLARIZE]) > 0, torch.minimum(pixels, 255 - pixels), pixels)


def _per_image(values: Tensor) -> Tensor:
    """(N,) → (N, 1, 1, 1)."""
    return values.view(-1, 1, 1, 1)


def _luma(pixels: Tensor) -> Tensor:
    """(N, 3, h, w) → (N, 1, h, w)."""
    red, green, blue = pixels.chunk(3, dim=1)
    r, g, b = (float(weight) for weight in LUMA)
    return (red * r).add_(green, alpha=g).add_(blue, alpha=b)


def _blend(pixels: Tensor, operation: Tensor, factors: Tensor, *, active: Tensor) -> Tensor:
    """Brightness, contrast or saturation, for each image its own: towards black, its mean gray or each pixel's gray.

    operation, active: (N,); factors: (N, 3). Images that are not active stay as they are.
    """
    chosen = factors.gather(1, operation.clamp(max=2).long()[:, None])[:, 0]
    factor, operation = _per_image(torch.where(active, chosen, 1.0)), _per_image(operation)
    rgb = pixels.shape[1] == 3
    luma = _luma(pixels) if rgb else pixels
    mean = luma.mean(dim=(2, 3), keepdim=True)  # of each channel, where these are no colors
    towards = torch.where(operation == 1, mean, luma * (operation == 2))
    blended = torch.lerp(towards, pixels, factor)
    return blended.clamp_(0, 255) if rgb else blended


def _turn_hue(pixels: Tensor, turn: Tensor) -> Tensor:
    """Through HSV and back, without its saturation; `turn`: (N, 1, 1, 1), in whole turns of the color circle."""
    red, green, blue = pixels.chunk(3, dim=1)
    value = pixels.amax(dim=1, keepdim=True)
    chroma = value - pixels.amin(dim=1, keepdim=True)
    unit = chroma.clamp(min=1e-6)  # gray has no hue: then any one does
    by_green = torch.where(value == green, (blue - red) / unit + 2, (red - green) / unit + 4)
    sixths = torch.where(value == red, (green - blue) / unit, by_green) + 6 * turn  # of the circle
    shifts = torch.arange(5, 0, -2, device=pixels.device).view(3, 1, 1)  # of red, green and blue
    sixths = (sixths + shifts).remainder_(6)  # (N, 3, h, w)
    return value - chroma * torch.minimum(sixths, 4 - sixths).clamp_(0, 1)


def _blur(pixels: Tensor, sigma: Tensor, reach: int) -> Tensor:
    """Gaussian blur, mirrored at the border; `sigma`: (N,), and what has 0 stays as it is."""
    count, channels, height, width = pixels.shape
    steps = torch.arange(-reach, reach + 1, device=pixels.device)
    spread = sigma[:, None].clamp(min=1e-3)  # (N, 1)
    weights = torch.exp(-0.5 * (steps / spread) ** 2) * (steps.abs() <= torch.ceil(BLUR_REACH * spread))
    weights = weights / weights.sum(dim=1, keepdim=True)
    # Each plane is a channel with a kernel of its own.
    kernels = weights[:, None].expand(count, channels, 2 * reach + 1).reshape(count * channels, 1, 1, -1)
    planes = pixels.reshape(1, count * channels, height, width)
    with torch.autocast(pixels.device.type, enabled=False):  # bf16 would leave 8 bits of the sums
        planes = planes.index_select(3, _mirrored(width, reach, pixels.device))
        planes = F.conv2d(planes, kernels, groups=count * channels)
        planes = planes.index_select(2, _mirrored(height, reach, pixels.device))
        planes = F.conv2d(planes, kernels.transpose(2, 3), groups=count * channels)
    return planes.view(count, channels, height, width)


def _mirrored(size: int, reach: int, device: torch.device) -> Tensor:
    """Where the pixels -reach … size + reach - 1 of a row are: … 2 1 0 1 2 …, as often as it takes."""
    period = max(2 * (size - 1), 1)
    places = torch.arange(-reach, size + reach, device=device).remainder(period)
    return torch.minimum(places, period - places)
