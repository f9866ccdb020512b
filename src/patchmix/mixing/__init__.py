"""Image mixes: a batch of views in, mixed images and the share of every original in them out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from patchmix.mixing.blockmask import block_masks
from patchmix.mixing.mixed import Mix, Mixed, overlap
from patchmix.mixing.pairs import CutMix, Mixup, OneOf, Region, RegionSwap, ResizeMix, partners
from patchmix.mixing.patchmix import PatchMix

__all__ = ["MIXES", "CutMix", "Mix", "Mixed", "Mixup", "OneOf", "PatchMix", "Region", "RegionSwap", "ResizeMix"]
__all__ += ["block_masks", "create_mix", "overlap", "partners"]

MIXES = ("patchmix", "mixup", "cutmix", "cutmix+mixup", "resizemix", "regionswap")  # the paper's Table "mix"


def create_mix(
    name: str, *, patch_size: int, num_mix: int | Sequence[int] = 3, generator: torch.Generator | None = None
) -> Mix:
    """A mix by its name. `patch_size` is for PatchMix and RegionSwap, `num_mix` for PatchMix; the others mix two."""
    if name == "patchmix":
        return PatchMix(patch_size, num_mix, generator)
    if name == "mixup":
        return Mixup(generator=generator)
    if name == "cutmix":
        return CutMix(generator=generator)
    if name == "cutmix+mixup":
        return OneOf([CutMix(generator=generator), Mixup(generator=generator)], generator)
    if name == "resizemix":
        return ResizeMix(generator=generator)
    if name == "regionswap":
        return RegionSwap(patch_size, generator=generator)
    raise ValueError(f"mix is {name!r}; it must be one of {', '.join(MIXES)}")
