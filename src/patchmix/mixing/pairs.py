"""What the mixes of two images have in common: every image is paired with its mirror place in the batch.

The partner of image i is N − 1 − i, as in SDMP and RegionCL: mixed images i and N − 1 − i have the same two sources.
In an odd batch the image in the middle is its own partner, and stays wholly its own.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pair_share(given: Tensor) -> Tensor:
    """(N,) how much of each mixed image its partner gives → (N, N) shares, whose rows sum to 1."""
    given = given.float()
    return torch.diag(1.0 - given) + torch.diag(given).flip(1)


def partners(x: Tensor) -> Tensor:
    """What stands at each one's partner's place: x[N − 1 − i]."""
    return x.flip(0)


def beta(n: int, alpha: float, generator: torch.Generator | None) -> Tensor:
    """n draws of Beta(α, α), on the CPU, kept off 0 and 1 so that both images stay visible."""
    gamma = torch._standard_gamma(torch.full((2, n), alpha, dtype=torch.float64), generator=generator)
    return (gamma[0] / gamma.sum(dim=0).clamp_min(1e-300)).clamp(1e-3, 1.0 - 1e-3).float()


def inside(height: int, width: int, top: Tensor, left: Tensor, bottom: Tensor, right: Tensor) -> Tensor:
    """One box an image: (N,) edges in pixels, bottom and right exclusive → (N, 1, H, W), true inside."""
    y = torch.arange(height, device=top.device).view(1, 1, -1, 1)
    x = torch.arange(width, device=top.device).view(1, 1, 1, -1)
    top, left, bottom, right = (edge.view(-1, 1, 1, 1) for edge in (top, left, bottom, right))
    return (y >= top) & (y < bottom) & (x >= left) & (x < right)


def check_images(images: Tensor, mix: str) -> tuple[int, int, int, int]:
    if images.ndim != 4:
        raise ValueError(f"images have {images.ndim} dimensions {tuple(images.shape)}; {mix} takes (N, C, H, W)")
    n, c, height, width = images.shape
    return n, c, height, width


def check_alpha(alpha: float, mix: str) -> None:
    if not alpha > 0:
        raise ValueError(f"alpha of {mix} is {alpha}; it must be above 0 (1 draws the amount uniformly)")


def as_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Computed floats as the dtype of the images; whole-number images are rounded."""
    return values.to(dtype) if dtype.is_floating_point else values.round().to(dtype)
