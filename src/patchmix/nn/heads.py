"""Projection and prediction heads (Table "head"), and the prototypes of DINO and iBOT."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchmix import distributed


class BatchNorm(nn.BatchNorm1d):
    """Batch norm of (N, C) or (N, C, H, W) whose batch statistics are those of the global batch.

    torch's SyncBatchNorm refuses CPU tensors.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.ndim in (2, 4), input.shape

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or distributed.world_size() == 1:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            wide = x.float().transpose(1, -1)  # channels last
            rows = wide.flatten(0, -2)
            count = len(rows) * distributed.world_size()
            mean = distributed.all_reduce_sum(rows.sum(dim=0)) / count
            variance = distributed.all_reduce_sum((rows - mean).square().sum(dim=0)) / count
            with torch.no_grad():
                assert self.running_mean is not None and self.running_var is not None
                assert self.num_batches_tracked is not None and self.momentum is not None
                self.num_batches_tracked += 1
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(variance * count / (count - 1), self.momentum)
            out = (wide - mean) * torch.rsqrt(variance + self.eps)
            if self.affine:
                out = out * self.weight + self.bias
        return out.transpose(1, -1).to(x.dtype)


def mlp_head(layers: int, in_dim: int, hidden: int, out_dim: int) -> nn.Sequential:
    """`layers` linear layers without bias, each followed by batch norm: with ReLU inside, without affine at the end."""
    widths = [in_dim, *[hidden] * (layers - 1)]
    modules: list[nn.Module] = []
    for narrow, wide in pairwise(widths):
        modules += [nn.Linear(narrow, wide, bias=False), BatchNorm(wide), nn.ReLU(inplace=True)]
    return nn.Sequential(*modules, nn.Linear(widths[-1], out_dim, bias=False), BatchNorm(out_dim, affine=False))


def two_layer_head(in_dim: int, hidden: int, out_dim: int, *, bias: bool) -> nn.Sequential:
    """Linear, batch norm, ReLU, linear, as in BYOL and SwAV: the output has no batch norm, and a bias on demand."""
    return nn.Sequential(
        nn.Linear(in_dim, hidden), BatchNorm(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, out_dim, bias=bias)
    )


def decayed(parameter: nn.Parameter) -> nn.Parameter:
    """Marks a 1-d parameter that is decayed anyway: in its authors' code it has two dimensions."""
    parameter.decayed = True  # type: ignore[attr-defined]
    return parameter


class PrototypeHead(nn.Module):
    """A three-layer MLP with GELU, unit length, then K prototypes by a weight-normalized linear layer: (…, D) → (…, K).

    DINO, Section 3.1 and appendix C. With `fixed_length` all prototypes have length 1; otherwise lengths are learned.
    While `frozen`, prototypes get a gradient of zero (not none: processes exchange it), and the optimizer skips them.
    """

    def __init__(self, in_dim: int, hidden: int, bottleneck: int, out_dim: int, *, fixed_length: bool = True) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(in_dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        for module in self.mlp:
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        self.prototypes = nn.Parameter(nn.Linear(bottleneck, out_dim, bias=False).weight.detach())
        self.lengths = None if fixed_length else decayed(nn.Parameter(torch.ones(out_dim)))
        self.frozen = False

    def fixed_parameters(self) -> list[nn.Parameter]:
        last_layer = [self.prototypes] if self.lengths is None else [self.prototypes, self.lengths]
        return last_layer if self.frozen else []

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.embed(x))

    def embed(self, x: Tensor) -> Tensor:
        """(…, D) → (…, bottleneck), of unit length."""
        return F.normalize(self.mlp(x), dim=-1)

    def logits(self, z: Tensor) -> Tensor:
        """(…, bottleneck) → (…, K); linear in z."""
        weight = F.normalize(self.prototypes, dim=1)
        if self.lengths is not None:
            weight = weight * self.lengths.unsqueeze(1)
        if self.frozen:
            weight = weight.detach() + 0.0 * weight
        return F.linear(z, weight)
