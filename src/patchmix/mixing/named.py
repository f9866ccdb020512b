"""The mixes of the paper's Table "mix", by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from patchmix.mixing.cutmix import CutMix
from patchmix.mixing.mixed import Mix
from patchmix.mixing.mixup import Mixup
from patchmix.mixing.oneof import OneOf
from patchmix.mixing.patchmix import PatchMix
from patchmix.mixing.regionswap import RegionSwap
from patchmix.mixing.resizemix import ResizeMix

MIXES = ("patchmix", "mixup", "cutmix", "cutmix+mixup", "resizemix", "regionswap")


def create_mix(
    name: str, *, patch_size: int, num_mix: int | Sequence[int] = 3, generator: torch.Generator | None = None
) -> Mix:
    """`patch_size` is PatchMix's and RegionSwap's, `num_mix` PatchMix's; the others mix two images."""
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
