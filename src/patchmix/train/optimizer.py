"""AdamW with weight decay on matrices only."""

from __future__ import annotations

import torch
from torch import nn


def build_optimizer(
    module: nn.Module, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> torch.optim.AdamW:
    """Two groups: what is decayed, and biases and other 1-d parameters, which are not.

    Learning rate and weight decay are set before every step by `set_hyperparameters`.
    """
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    plain = [p for name, p in trainable if p.ndim <= 1 or name.endswith(".bias")]
    decayed = [p for name, p in trainable if not (p.ndim <= 1 or name.endswith(".bias"))]
    groups = [
        {"params": decayed, "weight_decay": 0.0, "decayed": True},
        {"params": plain, "weight_decay": 0.0, "decayed": False},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)


def set_hyperparameters(optimizer: torch.optim.Optimizer, *, lr: float, weight_decay: float) -> None:
    """A group's own "lr_scale" (layer-wise decay) multiplies the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
        group["weight_decay"] = weight_decay if group["decayed"] else 0.0
