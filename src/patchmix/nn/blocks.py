"""A block of a ViT that keeps less for the backward pass."""

from __future__ import annotations

import torch
from timm.layers.mlp import Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def through(block: nn.Module, x: Tensor, *, recompute: bool) -> Tensor:
    """block(x); with `recompute` only its input is kept, and the backward pass computes the rest again."""
    if not torch.is_grad_enabled():
        out: Tensor = block(x)
    elif recompute:
        out = checkpoint(block, x, use_reentrant=False)
    elif type(block) is Block and type(block.mlp) is Mlp:
        x = x + block.drop_path1(block.ls1(block.attn(block.norm1(x))))
        out = x + block.drop_path2(block.ls2(_lean_mlp(block.norm2, block.mlp, x)))
    else:
        out = block(x)
    return out


def _lean_mlp(norm: nn.Module, mlp: Mlp, x: Tensor) -> Tensor:
    """mlp(norm(x)) without keeping what norm and activation give, two fifths of its memory: both are quick to redo.

    A checkpoint stops as soon as its last layer's input is there, so no matrix is multiplied twice.
    """
    random = mlp.training and mlp.drop1.p > 0

    def first(x: Tensor) -> Tensor:
        out: Tensor = mlp.fc1(norm(x))
        return out

    def second(hidden: Tensor) -> Tensor:
        out: Tensor = mlp.drop2(mlp.fc2(mlp.norm(mlp.drop1(mlp.act(hidden)))))
        return out

    hidden = checkpoint(first, x, use_reentrant=False, preserve_rng_state=False)
    out: Tensor = checkpoint(second, hidden, use_reentrant=False, preserve_rng_state=random)
    return out
