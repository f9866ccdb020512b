"""Image mixes: a batch of views in, mixed images and the share of every original in them out."""

from collections.abc import Sequence

import torch

from patchmix.mixing.pairs import CutMix, Mixup, OneOf, RegionSwap, ResizeMix, partners
from patchmix.mixing.patchmix import Mix, Mixed, PatchMix, overlap

__all__ = ["MIXES", "PAIR_MIXES", "CutMix", "Mix", "Mixed", "Mixup", "OneOf", "PatchMix", "RegionSwap", "ResizeMix"]
__all__ += ["create_mix", "overlap", "partners"]

MIXES = ("patchmix", "mixup", "cutmix", "cutmix+mixup", "resizemix", "regionswap")  # the paper's Table "mix"
PAIR_MIXES: dict[str, type[Mixup | CutMix | ResizeMix]] = {"resizemix": ResizeMix, "cutmix": CutMix, "mixup": Mixup}


def create_mix(
    name: str, *, patch_size: int, num_mix: int | Sequence[int] = 3, generator: torch.Generator | None = None
) -> Mix:
    """A mix by its name. `patch_size` is for PatchMix and RegionSwap, `num_mix` for PatchMix; the others mix two.

    Examples:
        >>> create_mix("cutmix", patch_size=16)(torch.rand(4, 3, 32, 32)).share.sum(dim=1)
        tensor([1., 1., 1., 1.])
    """
    if name not in MIXES:
        raise ValueError(f"mix is {name!r}; it must be one of {', '.join(MIXES)}")
    if name == "patchmix":
        return PatchMix(patch_size, num_mix, generator)
    if name == "regionswap":
        return RegionSwap(patch_size, generator=generator)
    mixes = [PAIR_MIXES[part](generator=generator) for part in name.split("+")]
    return OneOf(mixes, generator) if len(mixes) > 1 else mixes[0]
