"""AdamW, Muon, and their hyperparameters during training."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def build_optimizer(
    module: nn.Module,
    *,
    name: str = "adamw",
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """AdamW in two groups: matrices, which are decayed, and biases and other 1-d parameters, which are not.

    With "muon", the matrices of transformer blocks are a third group, which Muon updates.
    """
    groups: dict[str, list[nn.Parameter]] = {"decayed": [], "plain": [], "muon": []}
    for parameter_name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        plain = parameter.ndim <= 1 or parameter_name.endswith(".bias")
        if plain and not getattr(parameter, "decayed", False):
            groups["plain"].append(parameter)
        elif name == "muon" and parameter.ndim == 2 and ".blocks." in parameter_name:
            groups["muon"].append(parameter)
        else:
            groups["decayed"].append(parameter)
    settings = [
        {"params": parameters, "weight_decay": 0.0, "decayed": kind != "plain", "muon": kind == "muon"}
        for kind, parameters in groups.items()
        if parameters or kind != "muon"
    ]
    create = torch.optim.AdamW if name == "adamw" else MuonAdamW
    return create(settings, lr=0.0, betas=betas, eps=eps, fused=True)


class MuonAdamW(torch.optim.AdamW):
    """Muon (Jordan et al. 2024) for groups with `muon`, AdamW for the others, both with the same learning rate.

    The update of a matrix is its momentum, orthogonalized, and scaled to the size that AdamW's updates usually have
    (Liu et al. 2025, "Muon is Scalable for LLM Training"). q, k and v are three matrices. torch.optim.Muon computes
    in bf16, which takes CPUs twenty times as long as the fp32 used here.
    """

    momentum = 0.95

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"] if group["muon"] else ():
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["weight_decay"])
                    parameter.grad = None  # done: AdamW skips it
        return super().step(closure)

    def _update(self, parameter: Tensor, lr: float, weight_decay: float) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["step"] = torch.zeros(())
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["step"] += 1
        average = state["momentum_buffer"].lerp_(gradient, 1.0 - self.momentum)
        nesterov = gradient.lerp(average, self.momentum)
        rows, columns = nesterov.shape
        matrices = nesterov.view(-1, columns, columns) if rows == 3 * columns else nesterov.unsqueeze(0)  # q, k, v
        update = orthogonalize(matrices).view_as(parameter)
        parameter.mul_(1.0 - lr * weight_decay)
        parameter.add_(update, alpha=-0.2 * lr * max(matrices.shape[1:]) ** 0.5)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """U·Vᵀ of each U·S·Vᵀ, up to singular values between 0.7 and 1.2, by Muon's Newton-Schulz iteration: (B, R, C)."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


def set_hyperparameters(optimizer: torch.optim.Optimizer, *, lr: float, weight_decay: float) -> None:
    """A group's own "lr_scale" (layer-wise decay) multiplies the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
        group["weight_decay"] = weight_decay if group["decayed"] else 0.0
