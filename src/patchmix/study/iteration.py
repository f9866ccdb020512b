"""One training iteration outside of the loop, for those who measure it: the same calls, with the phases told apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from patchmix.methods.method import Method
from patchmix.study.measure import Phases, wait_for
from patchmix.train.loop import seed_pass, set_hyperparameters

PHASES = ("forward", "keys", "mixing", "backward", "optimiser", "EMA")


class TimedMix:
    """A mix whose time is told apart from the forward pass around it."""

    def __init__(self, mix: Any, phases: Phases) -> None:
        self._mix, self._phases = mix, phases

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mix, name)

    def for_one_step(self) -> TimedMix:
        return TimedMix(self._mix.for_one_step(), self._phases)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._phases.of("mixing"):
            return self._mix(*args, **kwargs)


class Iteration:
    """What the loop does in a step, on views that are there already.

    Telling phases apart makes a GPU wait between them; without `phases` nothing is in the way. Of a `compiled` method
    keys and mixing belong to the forward pass: its graph is not cut open to time them.
    """

    def __init__(
        self,
        method: Method,
        optimizer: torch.optim.Optimizer,
        views: Sequence[Tensor],
        *,
        autocast: torch.dtype | None = None,
        phases: Phases | None = None,
        compiled: bool = False,
    ) -> None:
        self.method, self.optimizer, self.views = method, optimizer, list(views)
        self.device = self.views[0].device
        self._autocast, self._phases = autocast, phases
        self._step = 0
        if phases is not None and not compiled:
            if hasattr(method, "mix"):
                method.mix = TimedMix(method.mix, phases)  # type: ignore[assignment]
            if hasattr(method, "keys"):
                method.keys = phases.wrap("keys", method.keys)  # type: ignore[assignment, arg-type]

    def __call__(self) -> float:
        """One step; returns the loss."""
        phases = self._phases or Phases(torch.device("cpu"))
        method, progress = self.method, 1e-3
        with phases.of("EMA"):
            method.before_step(progress)
        set_hyperparameters(self.optimizer, lr=1e-5, weight_decay=0.04)
        seed_pass(0, self._step, method.generator)
        with (
            phases.of("forward"),
            torch.autocast(self.device.type, dtype=self._autocast, enabled=self._autocast is not None),
        ):
            loss = method(self.views)["loss"]
        with phases.of("backward"):
            loss.backward()
        with phases.of("optimiser"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        with phases.of("EMA"):
            method.after_step(progress)
        self._step += 1
        wait_for(self.device)
        return float(loss.detach())
