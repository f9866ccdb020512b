"""Block-wise masks of patches (BEiT, Algorithm 1; used by iBOT): rectangles until the wanted share is masked."""

import math

import torch
from torch import Tensor

ATTEMPTS = 30  # rectangles tried per image; one that adds nothing or too much is left out
LOWEST_ASPECT = 0.3  # BEiT: aspect ratios between 0.3 and 1/0.3, uniform in the logarithm


def block_masks(
    n: int,
    rows: int,
    columns: int,
    *,
    probability: float = 0.5,
    ratio: tuple[float, float] = (0.1, 0.5),
    generator: torch.Generator | None = None,
) -> Tensor:
    """(N, rows·columns), true where masked: with `probability` a share drawn from U(ratio), otherwise nothing.

    The share is an upper bound that rectangles come close to; all images are worked on at once.
    """
    uniform = torch.rand(2, n, generator=generator)
    wanted = (ratio[0] + (ratio[1] - ratio[0]) * uniform[0]) * rows * columns
    left_over = torch.where(uniform[1] < probability, wanted, 0.0)
    masked = torch.zeros(n, rows, columns, dtype=torch.bool)
    smallest = float((min(rows, columns) // 3) ** 2)
    y, x = torch.arange(rows).view(1, -1, 1), torch.arange(columns).view(1, 1, -1)
    for area_at, aspect_at, top_at, left_at in torch.rand(ATTEMPTS, 4, n, generator=generator):
        area = smallest + area_at * (left_over - smallest)
        aspect = torch.exp((2.0 * aspect_at - 1.0) * math.log(1.0 / LOWEST_ASPECT))
        h = (area.clamp_min(0.0) * aspect).sqrt().round()
        w = (area.clamp_min(0.0) / aspect).sqrt().round()
        top = (top_at * (rows - h + 1)).floor().view(-1, 1, 1)
        left = (left_at * (columns - w + 1)).floor().view(-1, 1, 1)
        block = (y >= top) & (y < top + h.view(-1, 1, 1)) & (x >= left) & (x < left + w.view(-1, 1, 1))
        added = (block & ~masked).sum(dim=(1, 2))
        fits = (added > 0) & (added <= left_over) & (h < rows) & (w < columns)  # no whole rows or columns
        masked |= block & fits.view(-1, 1, 1)
        left_over = left_over - torch.where(fits, added, 0)
    return masked.flatten(1)
