"""ResizeMix (Qin et al., 2020): the whole of one image, made smaller, pasted onto another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from patchmix.mixing.mixed import Mixed
from patchmix.mixing.pairs import as_dtype, check_images, inside, pair_share, partners


class ResizeMix:
    """The partner is resized (bilinearly) by a scale τ ~ U(0.1, 0.8) of the sides and pasted at a uniform place."""

    def __init__(self, scale: tuple[float, float] = (0.1, 0.8), generator: torch.Generator | None = None) -> None:
        if not 0.0 < scale[0] <= scale[1] < 1.0:
            raise ValueError(f"scale of ResizeMix is {scale}; it must rise within (0, 1), e.g. (0.1, 0.8)")
        self.scale, self.generator = scale, generator

    def for_one_step(self) -> ResizeMix:
        return self

    def draw(self, n: int) -> Tensor:
        """τ², how much of each mixed image its partner covers, up to whole pixels: (N,)."""
        low, high = self.scale
        return (low + (high - low) * torch.rand(n, generator=self.generator)).square()

    def __call__(self, images: Tensor, given: Tensor | None = None) -> Mixed:
        """images: (N, C, H, W), never written to; `given`: (N,) in place of a draw."""
        n, _, height, width = check_images(images, "ResizeMix")
        side = (self.draw(n) if given is None else given.cpu()).sqrt()
        h, w = ((side * size).round().clamp(1, max(size - 1, 1)).long() for size in (height, width))
        place = torch.rand(2, n, generator=self.generator)
        top, left = (place[0] * (height - h + 1)).long(), (place[1] * (width - w + 1)).long()
        area = h * w / (height * width)
        h, w, top, left = (edge.to(images.device) for edge in (h, w, top, left))

        # Every pixel of the box looks up where in the partner it lies: one sampling, whatever the boxes.
        y = 2.0 * (torch.arange(height, device=h.device) + 0.5 - top.unsqueeze(1)) / h.unsqueeze(1) - 1.0  # (N, H)
        x = 2.0 * (torch.arange(width, device=w.device) + 0.5 - left.unsqueeze(1)) / w.unsqueeze(1) - 1.0  # (N, W)
        exact = images.dtype if images.dtype == torch.float64 else torch.float32
        shape = (n, height, width)
        grid = torch.stack((x.unsqueeze(1).expand(shape), y.unsqueeze(2).expand(shape)), dim=-1).to(exact)
        with torch.autocast(images.device.type, enabled=False):
            small = F.grid_sample(partners(images).to(exact), grid, padding_mode="border", align_corners=False)
        box = inside(height, width, top, left, top + h, left + w)
        mixed = torch.where(box, as_dtype(small, images.dtype), images)
        return Mixed(mixed, pair_share(area.to(images.device)))
