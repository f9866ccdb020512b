"""Image mixes: a batch of views in, mixed images and the share of every original in them out."""

from patchmix.mixing.blockmask import block_masks
from patchmix.mixing.cutmix import CutMix
from patchmix.mixing.mixed import Mix, Mixed, overlap
from patchmix.mixing.mixup import Mixup
from patchmix.mixing.named import MIXES, create_mix
from patchmix.mixing.oneof import OneOf
from patchmix.mixing.pairs import partners
from patchmix.mixing.patchmix import PatchMix
from patchmix.mixing.regionswap import Region, RegionSwap
from patchmix.mixing.resizemix import ResizeMix

__all__ = [
    "MIXES",
    "CutMix",
    "Mix",
    "Mixed",
    "Mixup",
    "OneOf",
    "PatchMix",
    "Region",
    "RegionSwap",
    "ResizeMix",
    "block_masks",
    "create_mix",
    "overlap",
    "partners",
]
