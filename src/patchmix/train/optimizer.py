"""AdamW, Muon, and their hyperparameters during training."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.optim import param_groups_layer_decay  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT


def build_optimizer(
    module: nn.Module,
    *,
    name: str = "adamw",
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    encoder: nn.Module | None = None,
    encoder_lr: float = 1.0,
    layer_decay: float = 1.0,
    head_warmup: float = 0.0,
    autocast: torch.dtype | None = None,
) -> torch.optim.AdamW:
    """AdamW in two groups: matrices, which are decayed, and biases and other 1-d parameters, which are not.

    With "muon", the matrices of transformer blocks are a third group, which Muon updates; it computes in the dtype of
    `autocast`, as the model does. The groups are split where the parameters of `encoder`, a part of `module`, learn
    with another rate or later (see `set_hyperparameters`).
    """
    inside = {} if encoder is None else {id(parameter): encoder_lr for parameter in encoder.parameters()}
    if encoder is not None and layer_decay < 1:
        for group in layer_groups(encoder, layer_decay):
            inside |= {id(parameter): encoder_lr * layer_decay * group["lr_scale"] for parameter in group["params"]}
    groups: dict[tuple[str, float, float], list[nn.Parameter]] = {("decayed", 1.0, 0.0): [], ("plain", 1.0, 0.0): []}
    for parameter_name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = "decayed"
        if (parameter.ndim <= 1 or parameter_name.endswith(".bias")) and not getattr(parameter, "decayed", False):
            kind = "plain"
        elif name == "muon" and parameter.ndim == 2 and ".blocks." in parameter_name:
            kind = "muon"
        start = head_warmup if id(parameter) in inside else 0.0
        groups.setdefault((kind, inside.get(id(parameter), 1.0), start), []).append(parameter)
    settings = [
        {"params": parameters, "weight_decay": 0.0, "decayed": kind != "plain", "muon": kind == "muon"}
        | {"lr_scale": scale, "start": start}
        for (kind, scale, start), parameters in groups.items()
    ]
    create = torch.optim.AdamW if name == "adamw" else partial(MuonAdamW, dtype=autocast or torch.float32)
    return create(settings, lr=0.0, betas=betas, eps=eps, fused=True)


def layer_groups(encoder: nn.Module, layer_decay: float) -> list[dict[str, Any]]:
    """timm's groups: a layer's learning rate is `layer_decay` to the power of the layers above it."""
    timm_model: Any = encoder
    groups: list[dict[str, Any]] = param_groups_layer_decay(
        timm_model,
        weight_decay=1.0,  # a mark: the loop sets the value, in the groups that are decayed
        no_weight_decay_list=timm_model.no_weight_decay(),
        layer_decay=layer_decay,
    )
    return [group | {"decayed": group["weight_decay"] > 0} for group in groups]


def groups_with_head(module: nn.Module, encoder: nn.Module, layer_decay: float) -> list[dict[str, Any]]:
    """As in fine-tuning; the layers of `module` above its encoder learn with the whole learning rate."""
    groups = layer_groups(encoder, layer_decay)
    for group in groups:
        group["lr_scale"] *= layer_decay  # timm's last layer is the encoder's last block
    inside = {id(parameter) for parameter in encoder.parameters()}
    above = [p for p in module.parameters() if p.requires_grad and id(p) not in inside]
    return groups + [
        {"params": [p for p in above if (p.ndim > 1) == decayed], "weight_decay": 0.0, "decayed": decayed}
        for decayed in (True, False)
    ]


class MuonAdamW(torch.optim.AdamW):
    """Muon (Jordan et al. 2024) for groups with `muon`, AdamW for the others, both with the same learning rate.

    The update of a matrix is its momentum, orthogonalized, and scaled to the size that AdamW's updates usually have
    (Liu et al. 2025, "Muon is Scalable for LLM Training"). q, k and v are three matrices. `dtype` is what matrices are
    orthogonalized in; torch.optim.Muon always takes bf16, one matrix after the other, which is slow on CPUs.
    """

    momentum = 0.95

    def __init__(self, params: ParamsT, *, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        super().__init__(params, **options)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for group in self.param_groups:
            alike: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = {}
            for parameter in group["params"] if group["muon"] else ():
                if parameter.grad is not None:
                    matrices = self._momentum(parameter, parameter.grad)
                    alike.setdefault(matrices.shape, []).append((parameter, matrices))
                    parameter.grad = None  # done: AdamW skips it
            for shape, updated in alike.items():
                stacked = orthogonalize(torch.cat([matrices for _, matrices in updated]), dtype=self.dtype)
                scale = -0.2 * group["lr"] * max(shape[1:]) ** 0.5
                for (parameter, _), update in zip(updated, stacked.chunk(len(updated)), strict=True):
                    parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                    parameter.add_(update.reshape(parameter.shape), alpha=scale)
        return super().step(closure)

    def _momentum(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Nesterov's momentum of this gradient, as matrices (B, R, C): of q, k and v, or one."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["step"] += 1
        average = state["momentum_buffer"].lerp_(gradient, 1.0 - self.momentum)
        nesterov = gradient.lerp(average, self.momentum)
        rows, columns = nesterov.shape
        return nesterov.view(-1, columns, columns) if rows == 3 * columns else nesterov.unsqueeze(0)


def orthogonalize(matrices: Tensor, steps: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """U·Vᵀ of each U·S·Vᵀ, up to singular values between 0.7 and 1.2, by Muon's Newton-Schulz iteration: (B, R, C)."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)).to(dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = (((gram @ gram).mul_(2.0315).add_(gram, alpha=-4.7750)) @ x).add_(x, alpha=3.4445)
    return torch.as_tensor(x.mT if tall else x, dtype=matrices.dtype)


def set_hyperparameters(
    optimizer: torch.optim.Optimizer, *, lr: float, weight_decay: float, progress: float = 1.0
) -> None:
    """A group's own "lr_scale" (layer-wise decay) multiplies the learning rate.

    A group with a "start" learns from that progress on; its learning rate then rises over as long again.
    """
    for group in optimizer.param_groups:
        start = group.get("start", 0.0)
        rise = min(1.0, max(0.0, progress / start - 1.0)) if start else 1.0
        group["lr"] = lr * rise * group.get("lr_scale", 1.0)
        group["weight_decay"] = weight_decay if group["decayed"] else 0.0
