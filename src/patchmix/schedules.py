"""Values that change with progress, the fraction of the training done so far (0 ≤ progress ≤ 1)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


def stage(values: Sequence[int], progress: float) -> int:
    """The value of the stage that the training is in: each of them takes an equal part of it."""
    return values[min(int(progress * len(values) + 1e-9), len(values) - 1)]


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from `start` to `end`; smoothly, or in a number of equal stages."""

    start: float
    end: float
    stages: int = 0

    def __call__(self, progress: float) -> float:
        if self.stages:
            progress = math.floor(progress * self.stages + 1e-9) / self.stages
        return self.end + (self.start - self.end) * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


@dataclass(frozen=True)
class Linear:
    """Linear from `start` to `end` over the first `duration` of the training, then constant."""

    start: float
    end: float
    duration: float

    def __call__(self, progress: float) -> float:
        rise = min(1.0, progress / self.duration) if self.duration else 1.0
        return self.start + (self.end - self.start) * rise


@dataclass(frozen=True)
class WarmupCosine:
    """Linear from 0 to `peak` over the first `warmup` of the training, then half a cosine to `end`.

    `step` is one step's fraction of the training: the last warm-up step has the peak value.
    """

    peak: float
    end: float
    warmup: float = 0.0
    step: float = 0.0

    def __call__(self, progress: float) -> float:
        if progress < self.warmup - 0.5 * self.step:
            rise = self.warmup - self.step
            return self.peak * min(1.0, progress / rise) if rise > 0 else self.peak
        after = (progress - self.warmup) / (1.0 - self.warmup) if self.warmup < 1.0 else 1.0
        return Cosine(self.peak, self.end)(max(after, 0.0))
