"""The contract between a method and the training loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


class Method(nn.Module):
    """One paper, one file. The loop calls, each step: `before_step`, `forward`, backward, optimiser, `after_step`.

    `forward` returns a dict with "loss"; the other entries are logged by name. For a contrast called "x" the entries
    "x/chance" and "x/floor" say what its value can be compared with.
    """

    encoder: nn.Module  # what is evaluated, exported, shipped
    generator: torch.Generator  # the method's own randomness; re-seeded before each pass from (seed, pass, rank)
    shared_generator: torch.Generator  # the same on every process: re-seeded from (seed, pass)
    scalars: dict[str, float]  # numbers beside the losses that are worth a curve: momentum, temperature

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()
        self.shared_generator = torch.Generator()
        self.scalars = {}

    def before_step(self, progress: float) -> None:
        """`progress` is the share of the training done so far, from 0 up to 1."""

    def forward(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        raise AssertionError("a method defines forward(views)")

    def fixed_parameters(self) -> Iterable[nn.Parameter]:
        """What the optimiser leaves alone in this step, moments included. It must have a gradient all the same."""
        return ()

    def after_step(self, progress: float) -> None:
        """After the optimiser step: moving averages, centres."""


def check_unit_interval(name: str, value: float, *, low_open: bool = False) -> None:
    """A ValueError unless 0 ≤ value ≤ 1, or 0 < value ≤ 1."""
    if not 0.0 <= value <= 1.0 or (low_open and value == 0.0):
        raise ValueError(f"{name} is {value}; it must lie in {'(0' if low_open else '[0'}, 1]")
