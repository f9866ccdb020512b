"""The contract between a method and the training loop, and moving averages: momentum encoder, center."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from timm.layers.drop import DropPath
from torch import Tensor, nn

from patchmix import distributed
from patchmix.losses import pad_targets
from patchmix.nn import PrototypeHead, TokenDropout, project


class Method(nn.Module):
    """One paper, one file. The loop calls, each step: `before_step`, `draw`, `forward`, backward, optimizer,
    `after_step`.

    `forward` returns a dict with "loss"; the other entries are logged by name. For a contrast called "x", the entries
    "x/chance" and "x/floor" are values to compare it with.
    """

    encoder: nn.Module  # what is evaluated, exported, shipped

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()  # the method's own; re-seeded before each pass from (seed, pass, rank)
        self.shared_generator = torch.Generator()  # the same on every process: re-seeded from (seed, pass)
        self.scalars: dict[str, float] = {}  # numbers besides the losses that are worth a curve: momentum, temperature
        self.register_load_state_dict_pre_hook(_rename_centers)  # type: ignore[no-untyped-call]

    def before_step(self, progress: float) -> None:
        """`progress` is the fraction of the training done so far, from 0 up to 1."""

    def draw(self, views: Sequence[Tensor]) -> tuple[Any, ...]:
        """What `forward` takes besides the views: all that is drawn on the CPU, which a compiled graph can't do."""
        return ()

    def forward(self, views: Sequence[Tensor], *drawn: Any) -> dict[str, Tensor]:
        raise AssertionError("a method defines forward(views)")

    def drop_tokens(self, share: float) -> None:
        """From now on queries drop this share of the patch tokens."""
        dropout = getattr(self.encoder, "patch_drop", None)
        if isinstance(dropout, TokenDropout):
            dropout.share = share

    def momentum_encoder(self) -> nn.Module | None:
        return next((module.network[0] for module in self.children() if isinstance(module, MomentumCopy)), None)

    def embed(self, encoder: nn.Module, features: Tensor) -> Tensor:
        """Features of the encoder, or of its momentum copy, as the loss compares them: (N, D) → (N, projection).

        That is the output of the projection head, with running statistics; before the prototypes, where there are any.
        """
        heads = {module.network[0]: module.network[1] for module in self.children() if isinstance(module, MomentumCopy)}
        heads[self.encoder] = getattr(self, "projector", None) or self.get_submodule("head")
        head = heads[encoder].eval()
        embedded: Tensor = (head.embed if isinstance(head, PrototypeHead) else head)(features)
        head.train(self.training)
        return embedded

    def fixed_parameters(self) -> Iterable[nn.Parameter]:
        """What the optimizer skips in this step, moments included. It must have a gradient nevertheless."""
        heads = [module for module in self.children() if isinstance(module, PrototypeHead)]
        return [parameter for head in heads for parameter in head.fixed_parameters()]

    def after_step(self, progress: float) -> None:
        """After the optimizer step: updates momentum copy and centers, where there are any."""
        for module in self.children():
            if isinstance(module, MomentumCopy):
                self.scalars["momentum"] = module.update(progress)
            elif isinstance(module, Center):
                module.update()


def _rename_centers(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Checkpoints of 0.1 have "centre" in the names of DINO's and iBOT's buffers."""
    for key in [key for key in state_dict if key.startswith(f"{prefix}centre")]:
        state_dict[key.replace("centre", "center", 1)] = state_dict.pop(key)


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
        return project(batches, *self.network)

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

    def __init__(self, dim: int, momentum: float) -> None:
        super().__init__()
        self.value = nn.Buffer(torch.zeros(dim))
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


def among_all(target: Tensor) -> Tensor:
    """Targets of this process's N queries among its own N keys → among the K keys of all: (N, K), zero elsewhere."""
    n = len(target)
    return pad_targets(target, n * distributed.world_size(), n * distributed.rank())
