"""The result of every mix, and how much two mixed batches have in common."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mixed:
    """A mixed batch. `share[i, j]` is how much of original j is in mixed image i; rows sum to 1."""

    images: Tensor  # (N, C, H, W)
    share: Tensor  # (N, N), float32
    groups: Tensor | None = None  # (M, T): patch j belongs to group m, which comes from original (i + m) mod N


class Mix(Protocol):
    """images (N, C, H, W), which are not changed → Mixed, with images of the same shape, dtype and device."""

    def for_one_step(self) -> "Mix":
        """The mix with everything drawn that both views of a step must have in common."""
        return self

    def __call__(self, images: Tensor) -> Mixed: ...


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """How much mixed image i of one batch has in common with mixed image j of another: Σ_k min(a_ik, b_jk).

    For PatchMix with M ≤ N this is the paper's weight ω = 1 − |d|/M (Eqs. 11 and 12), wrapped around the
    batch where N < 2M − 1. a, b: (N, K) shares whose rows sum to 1; returns (N, N).

    Examples:
        >>> share = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0]])
        >>> overlap(share, share)
        tensor([[1.0000, 0.5000],
                [0.5000, 1.0000]])
    """
    # Σ min(a, b) = ½ Σ (a + b − |a − b|): an L1 distance, without an N × N × K intermediate.
    with torch.autocast(a.device.type, enabled=False):
        return 1.0 - 0.5 * torch.cdist(a.float(), b.float(), p=1.0)


def check_images(images: Tensor, mix: str, patch_size: int = 1) -> tuple[int, int, int, int]:
    """The shape (N, C, H, W); a ValueError if it is another, or if height and width are not whole patches."""
    if images.ndim != 4:
        raise ValueError(f"images have {images.ndim} dimensions {tuple(images.shape)}; {mix} takes (N, C, H, W)")
    n, c, height, width = images.shape
    for side, size in (("height", height), ("width", width)):
        if size % patch_size or size == 0:
            raise ValueError(f"image {side} is {size}; it must be a multiple of patch_size {patch_size}")
    return n, c, height, width


def check_patch_size(patch_size: int) -> None:
    if patch_size < 1:
        raise ValueError(f"patch_size is {patch_size}; it must be at least 1")
