"""Projection and prediction heads (Table "head")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from patchmix import distributed


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm1d whose batch statistics are those of the global batch, on any device and backend.

    torch's SyncBatchNorm refuses CPU tensors; this one needs only an all-reduce.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or distributed.world_size() == 1:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            wide = x.float()
            count = wide.shape[0] * distributed.world_size()
            mean = distributed.all_reduce_sum(wide.sum(dim=0)) / count
            variance = distributed.all_reduce_sum((wide - mean).square().sum(dim=0)) / count
            self._track(mean.detach(), variance.detach() * count / (count - 1))
            out = (wide - mean) * torch.rsqrt(variance + self.eps)
            if self.affine:
                out = out * self.weight + self.bias
        return out.to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None and self.momentum is not None
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)


def mlp_head(layers: int, in_dim: int, hidden: int, out_dim: int) -> nn.Sequential:
    """`layers` linear layers without bias, each followed by batch norm: with ReLU inside, without affine at the end."""
    sizes = [in_dim, *[hidden] * (layers - 1), out_dim]
    modules: list[nn.Module] = []
    for i in range(layers):
        last = i == layers - 1
        modules.append(nn.Linear(sizes[i], sizes[i + 1], bias=False))
        modules.append(BatchNorm(sizes[i + 1], affine=not last))
        if not last:
            modules.append(nn.ReLU(inplace=True))
    return nn.Sequential(*modules)
