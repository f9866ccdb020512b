"""Mixes of two images. The partner of image i is N − 1 − i, as in SDMP and RegionCL.

So mixed images i and N − 1 − i have the same two sources; the middle image of an odd batch is its own partner.
`fraction` (N,) is how much of each mixed image comes from its partner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from patchmix.mixing.patchmix import Mix, Mixed, check_images, check_patch_size


class _BetaMix(Mix):
    """Keeps λ ~ Beta(α, α) of each image."""

    def __init__(self, alpha: float = 1.0, generator: torch.Generator | None = None) -> None:
        if not alpha > 0:
            name = type(self).__name__
            raise ValueError(f"alpha of {name} is {alpha}; it must be above 0 (1 draws the amount uniformly)")
        self.alpha, self.generator = alpha, generator

    def draw(self, n: int) -> Tensor:
        """fraction = 1 − λ: (N,)."""
        return 1.0 - beta(n, self.alpha, self.generator)


class Mixup(_BetaMix):
    """Zhang et al., ICLR 2018: x̃ = λ·x + (1 − λ)·x′ with λ ~ Beta(α, α), one λ per image."""

    def __call__(self, images: Tensor, fraction: Tensor | None = None) -> Mixed:
        n, *_ = check_images(images, "Mixup")
        fraction = (self.draw(n) if fraction is None else fraction).to(images.device, non_blocking=True)
        exact = _exact(images.dtype)
        mixed = torch.lerp(images.to(exact), partners(images).to(exact), fraction.view(-1, 1, 1, 1).to(exact))
        return Mixed(_as_dtype(mixed, images.dtype), pair_share(fraction))


class CutMix(_BetaMix):
    """Yun et al., ICCV 2019: a box of one image is replaced by the same box of another.

    Its sides are W·√(1 − λ), H·√(1 − λ), λ ~ Beta(α, α), around a uniform center, cut off at the border. The share
    counts the box's pixels; it is not the λ that was drawn.
    """

    def __call__(self, images: Tensor, fraction: Tensor | None = None) -> Mixed:
        n, _, height, width = check_images(images, "CutMix")
        side = (self.draw(n) if fraction is None else fraction.cpu()).sqrt()
        center = torch.rand(2, n, generator=self.generator)
        edges = []
        for size, position in ((height, center[0]), (width, center[1])):
            length = (side * size).round().clamp(max=size - 1)  # something of the image itself stays
            start = (position * size - length / 2).round()
            edges.append((start.clamp(min=0).long(), (start + length).clamp(max=size).long()))
        (top, bottom), (left, right) = edges
        return _paste(
            partners(images),
            images,
            *(edge.to(images.device, non_blocking=True) for edge in (top, left, bottom, right)),
        )


class ResizeMix(Mix):
    """Qin et al., 2020: the whole partner, resized by τ ~ U(0.1, 0.8) of its sides, is pasted at a uniform position.

    With `area`, it is the fraction of the image pasted over, τ², that is uniform.
    """

    def __init__(
        self,
        scale: tuple[float, float] = (0.1, 0.8),
        generator: torch.Generator | None = None,
        area: tuple[float, float] | None = None,
    ) -> None:
        for name, (low, high) in {"scale": scale, "area": area or scale}.items():
            if not 0.0 < low <= high < 1.0:
                raise ValueError(f"{name} of ResizeMix is {(low, high)}; it must rise within (0, 1), e.g. (0.1, 0.8)")
        self.scale, self.area, self.generator = scale, area, generator

    def draw(self, n: int) -> Tensor:
        """fraction = τ², up to whole pixels: (N,)."""
        low, high = self.area or self.scale
        drawn = low + (high - low) * torch.rand(n, generator=self.generator)
        return drawn if self.area else drawn.square()

    def __call__(self, images: Tensor, fraction: Tensor | None = None) -> Mixed:
        n, _, height, width = check_images(images, "ResizeMix")
        side = (self.draw(n) if fraction is None else fraction.cpu()).sqrt()
        h, w = ((side * size).round().clamp(1, max(size - 1, 1)).long() for size in (height, width))
        position = torch.rand(2, n, generator=self.generator)
        top, left = (position[0] * (height - h + 1)).long(), (position[1] * (width - w + 1)).long()
        h, w, top, left = (edge.to(images.device, non_blocking=True) for edge in (h, w, top, left))

        # Each pixel of a box looks up its position in the partner: one sampling for boxes of any size.
        y = 2.0 * (torch.arange(height, device=h.device) + 0.5 - top.unsqueeze(1)) / h.unsqueeze(1) - 1.0  # (N, H)
        x = 2.0 * (torch.arange(width, device=w.device) + 0.5 - left.unsqueeze(1)) / w.unsqueeze(1) - 1.0  # (N, W)
        exact, shape = _exact(images.dtype), (n, height, width)
        grid = torch.stack((x.unsqueeze(1).expand(shape), y.unsqueeze(2).expand(shape)), dim=-1).to(exact)
        with torch.autocast(images.device.type, enabled=False):
            small = F.grid_sample(partners(images).to(exact), grid, padding_mode="border", align_corners=False)
        return _paste(_as_dtype(small, images.dtype), images, top, left, top + h, left + w)


@dataclass(frozen=True)
class Region:
    """A rectangle in patches; bottom and right are exclusive."""

    top: int
    left: int
    bottom: int
    right: int


class RegionSwap(Mix):
    """RegionCL, Xu et al., ECCV 2022: two images exchange one region of whole patches, the same for the whole batch.

    Its sides are fractions of the image's; the defaults are RegionCL's, three to five cells of seven.
    """

    def __init__(
        self,
        patch_size: int,
        sides: tuple[float, float] = (3 / 7, 5 / 7),
        generator: torch.Generator | None = None,
    ) -> None:
        check_patch_size(patch_size)
        if not 0.0 < sides[0] <= sides[1] < 1.0:
            raise ValueError(f"sides of RegionSwap are {sides}; they must rise within (0, 1), e.g. (0.15, 0.45)")
        self.patch_size, self.sides, self.generator = patch_size, sides, generator

    def draw(self, images: Tensor) -> Region:
        _, _, height, width = check_images(images, "RegionSwap", self.patch_size)
        top, bottom = self._draw_side(height // self.patch_size)
        left, right = self._draw_side(width // self.patch_size)
        return Region(top, left, bottom, right)

    def _draw_side(self, patches: int) -> tuple[int, int]:
        low = max(1, round(self.sides[0] * patches))
        high = max(low, round(self.sides[1] * patches))
        length = int(torch.randint(low, high + 1, (), generator=self.generator))
        start = int(torch.randint(patches - length + 1, (), generator=self.generator))
        return start, start + length

    def __call__(self, images: Tensor, region: Region | None = None) -> Mixed:
        region = self.draw(images) if region is None else region
        p, (n, _, height, width) = self.patch_size, images.shape
        rows = slice(region.top * p, region.bottom * p)
        columns = slice(region.left * p, region.right * p)
        mixed = images.clone(memory_format=torch.contiguous_format)
        mixed[:, :, rows, columns] = partners(images[:, :, rows, columns])
        area = (region.bottom - region.top) * (region.right - region.left) * p * p / (height * width)
        return Mixed(mixed, pair_share(torch.full((n,), area, device=images.device)))


AnyMix = TypeVar("AnyMix", bound=Mix)


class OneOf(Mix, Generic[AnyMix]):
    """One of several mixes, drawn for each step by `for_one_step`, or for each call."""

    def __init__(self, mixes: Sequence[AnyMix], generator: torch.Generator | None = None) -> None:
        if not mixes:
            raise ValueError("there is no mix to draw from; give at least one")
        self.mixes, self.generator = tuple(mixes), generator

    def for_one_step(self) -> AnyMix:
        return self.mixes[int(torch.randint(len(self.mixes), (), generator=self.generator))]

    def __call__(self, images: Tensor) -> Mixed:
        return self.for_one_step()(images)


def partners(x: Tensor) -> Tensor:
    """The partner of each image: x[N − 1 − i]."""
    return x.flip(0)


def pair_share(fraction: Tensor) -> Tensor:
    """(N,) → (N, N) shares, whose rows sum to 1."""
    fraction = fraction.float()
    return torch.diag(1.0 - fraction) + torch.diag(fraction).flip(1)


def beta(n: int, alpha: float, generator: torch.Generator | None) -> Tensor:
    """n draws of Beta(α, α), on the CPU, kept off 0 and 1 so that both images stay visible."""
    gamma = torch._standard_gamma(torch.full((2, n), alpha, dtype=torch.float64), generator=generator)
    return (gamma[0] / gamma.sum(dim=0).clamp_min(1e-300)).clamp(1e-3, 1.0 - 1e-3).float()


def _paste(source: Tensor, images: Tensor, top: Tensor, left: Tensor, bottom: Tensor, right: Tensor) -> Mixed:
    """`images` with one box each of `source`: (N,) edges in pixels, bottom and right exclusive."""
    height, width = images.shape[-2:]
    share = pair_share((bottom - top) * (right - left) / (height * width))
    y = torch.arange(height, device=images.device).view(1, 1, -1, 1)
    x = torch.arange(width, device=images.device).view(1, 1, 1, -1)
    top, left, bottom, right = (edge.view(-1, 1, 1, 1) for edge in (top, left, bottom, right))
    return Mixed(torch.where((y >= top) & (y < bottom) & (x >= left) & (x < right), source, images), share)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in."""
    return dtype if dtype == torch.float64 else torch.float32


def _as_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Computed floats as the dtype of the images; rounded for integer images."""
    return values.to(dtype) if dtype.is_floating_point else values.round().to(dtype)
