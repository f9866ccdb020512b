"""What every mix returns, and how much two mixed batches have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mixed:
    """A mixed batch. `share[i, j]` is how much of original j is in mixed image i; rows sum to 1."""

    images: Tensor  # (N, C, H, W)
    share: Tensor  # (N, N), float32


class Mix(Protocol):
    """What every mix offers; two calls within a step need no more in common than `for_one_step` fixes."""

    def for_one_step(self) -> Mix:
        """The mix with everything settled that both views of a step must agree on."""
        ...

    def __call__(self, images: Tensor) -> Mixed: ...


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """How much mixed image i of one batch has in common with mixed image j of another: Σ_k min(a_ik, b_jk).

    For PatchMix with M ≤ N this is the paper's weight ω = 1 − |d|/M (Eqs. 11 and 12), wrapped around the
    batch where N < 2M − 1. a, b: (N, K) shares whose rows sum to 1; returns (N, N).
    """
    # Σ min(a, b) = ½ Σ (a + b − |a − b|): an L1 distance, without an N × N × K intermediate.
    with torch.autocast(a.device.type, enabled=False):
        return 1.0 - 0.5 * torch.cdist(a.float(), b.float(), p=1.0)
