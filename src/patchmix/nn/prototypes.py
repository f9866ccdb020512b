"""The head of self-distillation (DINO, Section 3.1 and appendix C; shared by iBOT), and its moving centre."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchmix import distributed


class PrototypeHead(nn.Module):
    """A three-layer MLP with GELU, unit length, then K prototypes by a weight-normalised linear layer: (…, D) → (…, K).

    With `fixed_length` all prototypes have length 1; otherwise their lengths are learned. While `frozen`, the
    prototypes get a gradient of zero (not none: processes exchange it); the optimiser is told to leave them alone.
    """

    def __init__(
        self, in_dim: int, out_dim: int, *, hidden: int = 2048, bottleneck: int = 256, fixed_length: bool = True
    ) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(in_dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        for module in self.mlp:
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        self.prototypes = nn.Parameter(F.normalize(torch.randn(out_dim, bottleneck), dim=1))
        self.lengths = None if fixed_length else nn.Parameter(torch.ones(out_dim))
        self.frozen = False

    def fixed_parameters(self) -> list[nn.Parameter]:
        if not self.frozen:
            return []
        return [self.prototypes] if self.lengths is None else [self.prototypes, self.lengths]

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.embed(x))

    def embed(self, x: Tensor) -> Tensor:
        """(…, D) → (…, bottleneck), of unit length."""
        return F.normalize(self.mlp(x), dim=-1)

    def scores(self, z: Tensor) -> Tensor:
        """(…, bottleneck) → (…, K); linear in z."""
        weight = F.normalize(self.prototypes, dim=1)
        if self.lengths is not None:
            weight = weight * self.lengths.unsqueeze(1)
        if self.frozen:
            weight = weight.detach() + 0.0 * weight
        return F.linear(z, weight)


class Centre(nn.Module):
    """c ← m·c + (1 − m)·mean of the teacher's outputs over the global batch (DINO, Eq. 4).

    A pass is centred by what earlier steps saw: `observe` collects, `update` moves the centre after the step.
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
        """outputs: (…, K); as many rows on every process."""
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
