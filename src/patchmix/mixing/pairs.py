"""Mixes of two images. The partner of image i is N − 1 − i, as in SDMP and RegionCL.

So mixed images i and N − 1 − i have the same two sources; the middle image of an odd batch is its own partner.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from patchmix.mixing.patchmix import Mix, Mixed, check_images, check_patch_size


class PairMix(Mix):
    """Keeps λ of each image, here λ ~ Beta(α, α), and takes the rest, `fraction` = 1 − λ (N,), from its partner."""

    def __init__(self, alpha: float = 1.0, generator: torch.Generator | None = None) -> None:
        if not alpha > 0:
            name = type(self).__name__
            raise ValueError(f"alpha of {name} is {alpha}; it must be above 0 (1 draws the amount uniformly)")
        self.alpha, self.generator = alpha, generator

    def draw(self, n: int) -> Tensor:
        return 1.0 - beta(n, self.alpha, self.generator)

    def __call__(self, images: Tensor, fraction: Tensor | None = None) -> Mixed:
        n, *_ = check_images(images, type(self).__name__)
        return self.mix(images, self.draw(n) if fraction is None else fraction.cpu())

    def mix(self, images: Tensor, fraction: Tensor) -> Mixed:
        raise NotImplementedError


class Mixup(PairMix):
    """Zhang et al., ICLR 2018: x̃ = λ·x + (1 − λ)·x′ with λ ~ Beta(α, α), one λ per image."""

    def mix(self, images: Tensor, fraction: Tensor) -> Mixed:
        fraction, exact = fraction.to(images.device, non_blocking=True), _as_float(images)
        mixed = torch.lerp(exact, partners(exact), fraction.view(-1, 1, 1, 1).to(exact.dtype))
        return Mixed(_as_dtype(mixed, images.dtype), pair_share(fraction))


class CutMix(PairMix):
    """Yun et al., ICCV 2019: a box of one image is replaced by the same box of another.

    Its sides are W·√(1 − λ), H·√(1 − λ), λ ~ Beta(α, α), around a uniform center, cut off at the border. The share
    counts the box's pixels; it is not the λ that was drawn.
    """

    def mix(self, images: Tensor, fraction: Tensor) -> Mixed:
        size = torch.tensor(images.shape[-2:]).unsqueeze(1)  # (2, 1): height, width
        center = torch.rand(2, len(images), generator=self.generator) * size
        length = (fraction.sqrt() * size).round().clamp(max=size - 1)  # something of the image itself stays
        start = (center - length / 2).round()
        return _paste(partners(images), images, start.clamp(min=0).long(), (start + length).clamp(max=size).long())


class ResizeMix(PairMix):
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
        """τ², up to whole pixels."""
        low, high = self.area or self.scale
        drawn = low + (high - low) * torch.rand(n, generator=self.generator)
        return drawn if self.area else drawn.square()

    def mix(self, images: Tensor, fraction: Tensor) -> Mixed:
        size = torch.tensor(images.shape[-2:]).unsqueeze(1)  # (2, 1): height, width
        length = (fraction.sqrt() * size).round().clamp(max=size - 1).clamp(min=1).long()
        start = (torch.rand(2, len(images), generator=self.generator) * (size - length + 1)).long()
        start, length = (edge.to(images.device, non_blocking=True) for edge in (start, length))

        # Each pixel of a box looks up its position in the partner: one sampling for boxes of any size.
        exact, shape = _as_float(images), (len(images), *images.shape[-2:])
        (top, left), (h, w) = start.unsqueeze(2), length.unsqueeze(2)  # (N, 1) each
        y = 2.0 * (torch.arange(images.shape[2], device=h.device) + 0.5 - top) / h - 1.0  # (N, H)
        x = 2.0 * (torch.arange(images.shape[3], device=w.device) + 0.5 - left) / w - 1.0  # (N, W)
        grid = torch.stack((x.unsqueeze(1).expand(shape), y.unsqueeze(2).expand(shape)), dim=-1).to(exact.dtype)
        with torch.autocast(images.device.type, enabled=False):
            small = F.grid_sample(partners(exact), grid, padding_mode="border", align_corners=False)
        return _paste(_as_dtype(small, images.dtype), images, start, start + length)


class RegionSwap(Mix):
    """RegionCL, Xu et al., ECCV 2022: two images exchange one region of whole patches, the same for the whole batch.

    Its sides are fractions of the image's; the defaults are RegionCL's, three to five cells of seven.
    """

    def __init__(
        self, patch_size: int, sides: tuple[float, float] = (3 / 7, 5 / 7), generator: torch.Generator | None = None
    ) -> None:
        check_patch_size(patch_size)
        if not 0.0 < sides[0] <= sides[1] < 1.0:
            raise ValueError(f"sides of RegionSwap are {sides}; they must rise within (0, 1), e.g. (0.15, 0.45)")
        self.patch_size, self.sides, self.generator = patch_size, sides, generator

    def draw(self, images: Tensor) -> tuple[slice, slice]:
        """Rows and columns of the region, in patches."""
        _, _, height, width = check_images(images, "RegionSwap", self.patch_size)
        if height == width == self.patch_size:
            raise ValueError(
                f"images of {height} × {width} px are one patch, which has no regions; use smaller patches"
            )
        return self._draw_side(height // self.patch_size), self._draw_side(width // self.patch_size)

    def _draw_side(self, patches: int) -> slice:
        low, high = (max(1, min(round(side * patches), patches - 1)) for side in self.sides)  # something stays
        length = int(torch.randint(low, high + 1, (), generator=self.generator))
        start = int(torch.randint(patches - length + 1, (), generator=self.generator))
        return slice(start, start + length)

    def __call__(self, images: Tensor, region: tuple[slice, slice] | None = None) -> Mixed:
        rows, columns = region or self.draw(images)
        edges = torch.tensor([[rows.start, columns.start], [rows.stop, columns.stop]]) * self.patch_size
        return _paste(partners(images), images, *edges.unsqueeze(2).expand(2, 2, len(images)))


class OneOf(Mix):
    """One of several mixes, drawn for each step by `for_one_step`, or for each call."""

    def __init__(self, mixes: Sequence[PairMix], generator: torch.Generator | None = None) -> None:
        self.mixes, self.generator = tuple(mixes), generator

    def for_one_step(self) -> PairMix:
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


def _paste(source: Tensor, images: Tensor, start: Tensor, end: Tensor) -> Mixed:
    """`images` with one box each of `source`, from `start` up to `end`: row and column in pixels, (2, N) each."""
    start, end = (edge.to(images.device, non_blocking=True) for edge in (start, end))
    height, width = images.shape[-2:]
    (top, left), (bottom, right) = start.view(2, -1, 1, 1, 1), end.view(2, -1, 1, 1, 1)
    y, x = torch.arange(height, device=images.device).unsqueeze(1), torch.arange(width, device=images.device)
    inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)  # (N, 1, H, W)
    share = pair_share((end - start).prod(dim=0) / (height * width))
    return Mixed(torch.where(inside, source, images), share)


def _as_float(images: Tensor) -> Tensor:
    """What is computed with: float64 stays, the others become float32."""
    return images if images.dtype == torch.float64 else images.float()


def _as_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Computed floats as the dtype of the images; rounded for integer images."""
    return values.to(dtype) if dtype.is_floating_point else values.round().to(dtype)
