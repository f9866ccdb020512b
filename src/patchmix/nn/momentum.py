"""The momentum encoder: a copy that follows its base by exponential moving average (Algorithm 2)."""

from __future__ import annotations

import copy

import torch
from timm.layers.drop import DropPath
from torch import nn


class MomentumCopy(nn.Module):
    """Ξ: starts equal to Θ, takes no gradient, drops no paths. Its batch norms keep their own running statistics."""

    def __init__(self, base: nn.ModuleList) -> None:
        super().__init__()
        self.network = copy.deepcopy(base).requires_grad_(False)
        for module in self.network.modules():
            if isinstance(module, DropPath):
                module.drop_prob = 0.0

    @torch.no_grad()
    def update(self, base: nn.Module, momentum: float) -> None:
        """Ξ ← μ·Ξ + (1 − μ)·Θ, all parameters in one fused call."""
        torch._foreach_lerp_(list(self.network.parameters()), list(base.parameters()), 1.0 - momentum)
