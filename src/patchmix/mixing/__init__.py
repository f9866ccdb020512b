"""Image mixes: a batch of views in, mixed images and the share of every original in them out."""

from patchmix.mixing.mixed import Mixed, overlap
from patchmix.mixing.patchmix import PatchMix

__all__ = ["Mixed", "PatchMix", "overlap"]
