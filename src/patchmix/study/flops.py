"""FLOPs in closed form, 2 per multiply-add, backward = 2 × forward.

The paper's cost column (Table "cifar") counts linear and patch layers and heads at batch 2 and leaves out attention's
two matrix products; `attention=True` adds them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """What the cost depends on."""

    image_size: int
    patch_size: int
    dim: int
    depth: int
    in_chans: int = 3
    head_hidden: int = 4096
    head_out: int = 256

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


def encoder_flops(sizes: Sizes, *, attention: bool = False) -> int:
    """One image through the ViT: patch embedding and blocks with an MLP of four times the width."""
    tokens, d = sizes.patches + 1, sizes.dim
    embedding = 2 * sizes.patches * sizes.in_chans * sizes.patch_size**2 * d
    linear = 2 * tokens * 12 * d * d  # qkv 3d², projection d², MLP 8d²
    scores = 2 * 2 * tokens * tokens * d if attention else 0  # q·kᵀ and its product with v
    return embedding + sizes.depth * (linear + scores)


def projector_flops(sizes: Sizes) -> int:
    return 2 * (sizes.dim * sizes.head_hidden + sizes.head_hidden**2 + sizes.head_hidden * sizes.head_out)


def predictor_flops(sizes: Sizes) -> int:
    return 2 * 2 * sizes.head_out * sizes.head_hidden


def patchmix_flops(sizes: Sizes, *, batch: int = 2, attention: bool = False) -> int:
    """One training iteration: two online passes forward and backward, three momentum passes forward."""
    key = encoder_flops(sizes, attention=attention) + projector_flops(sizes)
    query = key + predictor_flops(sizes)
    return batch * (2 * 3 * query + 3 * key)
