"""Mixup (Zhang et al., ICLR 2018): the weighted sum of two images."""

from __future__ import annotations

import torch
from torch import Tensor

from patchmix.mixing.mixed import Mixed
from patchmix.mixing.pairs import as_dtype, beta, check_alpha, check_images, pair_share, partners


class Mixup:
    """x̃ = λ·x + (1 − λ)·x′ with λ ~ Beta(α, α), one λ an image."""

    def __init__(self, alpha: float = 1.0, generator: torch.Generator | None = None) -> None:
        check_alpha(alpha, "Mixup")
        self.alpha, self.generator = alpha, generator

    def for_one_step(self) -> Mixup:
        return self

    def draw(self, n: int) -> Tensor:
        """1 − λ, how much of each mixed image its partner gives: (N,)."""
        return 1.0 - beta(n, self.alpha, self.generator)

    def __call__(self, images: Tensor, given: Tensor | None = None) -> Mixed:
        """images: (N, C, H, W), never written to; `given`: (N,) in place of a draw."""
        n, *_ = check_images(images, "Mixup")
        given = (self.draw(n) if given is None else given).to(images.device)
        exact = images.dtype if images.dtype == torch.float64 else torch.float32
        weight = given.view(-1, 1, 1, 1).to(exact)
        mixed = torch.lerp(images.to(exact), partners(images).to(exact), weight)
        return Mixed(as_dtype(mixed, images.dtype), pair_share(given))
