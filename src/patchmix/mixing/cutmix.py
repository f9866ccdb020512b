"""CutMix (Yun et al., ICCV 2019): a box of one image replaced by the same box of another."""

from __future__ import annotations

import torch
from torch import Tensor

from patchmix.mixing.mixed import Mixed
from patchmix.mixing.pairs import beta, check_alpha, check_images, inside, pair_share, partners


class CutMix:
    """A box of sides W·√(1 − λ), H·√(1 − λ), λ ~ Beta(α, α), around a uniform centre, cut off at the border.

    The share is the box's count of pixels, not the λ it was drawn for.
    """

    def __init__(self, alpha: float = 1.0, generator: torch.Generator | None = None) -> None:
        check_alpha(alpha, "CutMix")
        self.alpha, self.generator = alpha, generator

    def for_one_step(self) -> CutMix:
        return self

    def draw(self, n: int) -> Tensor:
        """1 − λ, how much of each image a box that lies wholly inside covers: (N,)."""
        return 1.0 - beta(n, self.alpha, self.generator)

    def __call__(self, images: Tensor, given: Tensor | None = None) -> Mixed:
        """images: (N, C, H, W), never written to; `given`: (N,) in place of a draw."""
        n, _, height, width = check_images(images, "CutMix")
        side = (self.draw(n) if given is None else given.cpu()).sqrt()
        centre = torch.rand(2, n, generator=self.generator)
        edges = []
        for size, position in ((height, centre[0]), (width, centre[1])):
            length = (side * size).round().clamp(max=size - 1)  # something of the image itself stays
            start = (position * size - length / 2).round()
            edges.append((start.clamp(min=0).long(), (start + length).clamp(max=size).long()))
        (top, bottom), (left, right) = edges
        area = (bottom - top) * (right - left) / (height * width)
        box = inside(height, width, *(e.to(images.device) for e in (top, left, bottom, right)))
        return Mixed(torch.where(box, partners(images), images), pair_share(area.to(images.device)))
