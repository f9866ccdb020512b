"""Whether a run that started from good weights still has good features: a comparison with its start.

By leave-one-out kNN of training images where they have labels: worse is what differs by more than the noise of these
images. Otherwise by the effective rank, as long as images keep some of the neighbors that they had at the start.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from patchmix.evaluate.knn import HEADLINE_K, QUERY_ROWS, nearest

FEWEST_KEPT = 0.1  # of the neighbors; below, features of unlabeled images count as worse than the start's
LEAST_RANK = 0.8  # of the start's; a somewhat lower one is no sign of worse features


class Neighbors:
    """What the same images had at the start, kept in `state`: "neighbors", int64 (N, k), and "correct", bool (N,)."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def kept(self, features: Tensor) -> float:
        """The share of the neighbors at the start that still are. The first call sets the start. features: (N, D)."""
        unit, k = F.normalize(features.float(), dim=1), min(HEADLINE_K, len(features) - 1)
        parts = [nearest(unit, unit[at : at + QUERY_ROWS], k, first=at)[1] for at in range(0, len(unit), QUERY_ROWS)]
        now = torch.cat(parts)
        start: Tensor = self.state.setdefault("neighbors", now)
        same = sum(int((start == now.roll(shift, dims=1)).sum()) for shift in range(k))  # all pairs; each at most once
        return same / now.numel()

    def margin(self, correct: Tensor) -> float:
        """Half the 95 % interval of the accuracy's difference from the start, over the images. correct: (N,).

        Only images whose answer has changed count (a paired comparison). The first call sets the start.
        """
        change = correct.double() - self.state.setdefault("correct", correct).double()
        return 1.96 * math.sqrt(float(change.var(correction=0)) / len(change))


class Guard:
    """Takes the monitor's values at every point, and calls `keep(step)` where the features are the best so far.

    `state` is plain data that goes into checkpoints: what a resumed run must know of the start and of the best.
    """

    def __init__(self, state: dict[str, Any], keep: Callable[[int], None]) -> None:
        self.state = state
        self.keep = keep

    def __call__(self, step: int, values: dict[str, float]) -> str | None:
        """What to warn of, if anything."""
        state, point = self.state, {"step": step, **{name: values[name] for name in _USED if name in values}}
        state.setdefault("start", point)
        state["last"] = point
        if "best" not in state or score(point, state["start"]) > score(state["best"], state["start"]):
            state["best"] = point
            self.keep(step)
        below = below_start(state)
        return f"the features are below those of the start: {below}" if below else None


def below_start(state: Mapping[str, Any]) -> str | None:
    """In which way the latest features are worse than the start's; None if they are not."""
    start, last = state["start"], state["last"]
    if "knn_train" in start:
        worse = last["knn_train"] < start["knn_train"] - last.get("knn_margin", 0.0)
        return f"kNN {100 * start['knn_train']:.1f} → {100 * last['knn_train']:.1f} %" if worse else None
    if last["neighbors_kept"] < FEWEST_KEPT:
        return f"{100 * last['neighbors_kept']:.0f} % of the nearest neighbors kept, fewer than {FEWEST_KEPT:.0%}"
    fallen = last["rank"] < LEAST_RANK * start["rank"]
    return f"effective rank {start['rank']:.1f} → {last['rank']:.1f}" if fallen else None


def guard_verdict(state: Mapping[str, Any]) -> str | None:
    """The last line of a run that ends below its start, and a line of its report; None where it does not."""
    below = below_start(state) if "last" in state else None
    if below is None:
        return None
    step, last = state["best"]["step"], state["last"]["step"]
    what = "the starting weights, as no point was better" if step == 0 else f"that of step {step}, the best point"
    return f"the run ends below its start ({below}): encoder.safetensors is {what} (not step {last})"


_USED = ("knn_train", "knn_margin", "rank", "neighbors_kept")


def score(point: dict[str, Any], start: dict[str, Any]) -> tuple[float, ...]:
    """What of two points is better has more of this."""
    if "knn_train" in start:
        return (point["knn_train"],)
    kept = point["neighbors_kept"]
    return (1.0, point["rank"]) if kept >= FEWEST_KEPT else (0.0, kept)
