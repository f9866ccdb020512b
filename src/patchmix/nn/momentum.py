"""Moving averages: the momentum encoder, and the center of self-distillation."""

import copy
from collections.abc import Callable

import torch
from timm.layers.drop import DropPath
from torch import Tensor, nn

from patchmix import distributed
from patchmix.nn.tokens import project


class MomentumCopy(nn.Module):
    """Ξ: starts equal to its base Θ, takes no gradient, drops no paths. Its batch norms have their own statistics.

    base: encoder and heads; momentum: μ as a function of progress.
    """

    def __init__(self, *base: nn.Module, momentum: Callable[[float], float]) -> None:
        super().__init__()
        self.network = copy.deepcopy(nn.ModuleList(base)).requires_grad_(False)
        for module in self.network.modules():
            if isinstance(module, DropPath):
                module.drop_prob = 0.0
        self.base = base  # in a tuple, so that its parameters are not registered twice
        self.momentum = momentum

    @torch.no_grad()
    def project(self, *batches: Tensor | None) -> list[Tensor]:
        """Each batch through the copies of the encoder and its heads: (N, C, H, W) → (N, D)."""
        encoder, *heads = self.network
        return project(batches, encoder, *heads)

    @torch.no_grad()
    def update(self, progress: float) -> float:
        """Ξ ← μ·Ξ + (1 − μ)·Θ, all parameters in one fused call. Returns μ."""
        momentum = self.momentum(progress)
        base: list[Tensor] = [parameter for module in self.base for parameter in module.parameters()]
        torch._foreach_lerp_(list(self.network.parameters()), base, 1.0 - momentum)
        return momentum


class Center(nn.Module):
    """c ← m·c + (1 − m)·mean of the teacher's outputs over the global batch (DINO, Eq. 4).

    A pass is centered by the outputs of earlier steps: `observe` collects, `update` moves the center after the step.
    """

    value: Tensor

    def __init__(self, dim: int, momentum: float) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(dim))
        self.momentum = momentum
        self._sum: Tensor | None = None
        self._count = 0

    @torch.no_grad()
    def observe(self, outputs: Tensor) -> None:
        """outputs: (…, K); equally many rows on every process."""
        rows = outputs.float().flatten(0, -2)
        total = rows.sum(dim=0)
        self._sum = total if self._sum is None else self._sum + total
        self._count += len(rows)

    @torch.no_grad()
    def update(self) -> None:
        if self._sum is None:
            return
        mean = distributed.all_reduce_sum(self._sum) / (self._count * distributed.world_size())
        self.value.lerp_(mean, 1.0 - self.momentum)
        self._sum, self._count = None, 0
