"""RegionSwap (RegionCL, Xu et al., ECCV 2022): two images exchange one region of whole patches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from patchmix.mixing.mixed import Mixed
from patchmix.mixing.pairs import check_images, pair_share, partners


@dataclass(frozen=True)
class Region:
    """Where the region lies, in patches; bottom and right are exclusive."""

    top: int
    left: int
    bottom: int
    right: int


class RegionSwap:
    """One region a call, the same for the whole batch; its sides are a share of the image's sides.

    The defaults are RegionCL's, one to three cells of seven (32 px at 224 px), in whole patches.
    """

    def __init__(
        self,
        patch_size: int,
        sides: tuple[float, float] = (1 / 7, 3 / 7),
        generator: torch.Generator | None = None,
    ) -> None:
        if patch_size < 1:
            raise ValueError(f"patch_size is {patch_size}; it must be at least 1")
        if not 0.0 < sides[0] <= sides[1] < 1.0:
            raise ValueError(f"sides of RegionSwap are {sides}; they must rise within (0, 1), e.g. (0.15, 0.45)")
        self.patch_size, self.sides, self.generator = patch_size, sides, generator

    def for_one_step(self) -> RegionSwap:
        return self

    def draw(self, images: Tensor) -> Region:
        _, _, height, width = check_images(images, "RegionSwap")
        for side, size in (("height", height), ("width", width)):
            if size % self.patch_size or size == 0:
                raise ValueError(f"image {side} is {size}; it must be a multiple of patch_size {self.patch_size}")
        top, bottom = self._side(height // self.patch_size)
        left, right = self._side(width // self.patch_size)
        return Region(top, left, bottom, right)

    def _side(self, patches: int) -> tuple[int, int]:
        low = max(1, round(self.sides[0] * patches))
        high = max(low, round(self.sides[1] * patches))
        length = int(torch.randint(low, high + 1, (), generator=self.generator))
        start = int(torch.randint(patches - length + 1, (), generator=self.generator))
        return start, start + length

    def __call__(self, images: Tensor, region: Region | None = None) -> Mixed:
        """images: (N, C, H, W), never written to."""
        region = self.draw(images) if region is None else region
        p, (n, _, height, width) = self.patch_size, images.shape
        rows = slice(region.top * p, region.bottom * p)
        columns = slice(region.left * p, region.right * p)
        mixed = images.clone(memory_format=torch.contiguous_format)
        mixed[:, :, rows, columns] = partners(images[:, :, rows, columns])
        area = (region.bottom - region.top) * (region.right - region.left) * p * p / (height * width)
        return Mixed(mixed, pair_share(torch.full((n,), area, device=images.device)))
