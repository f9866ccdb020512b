"""Values that change with progress, the share of the training done so far (0 ≤ progress ≤ 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from `start` to `end`."""

    start: float
    end: float

    def __call__(self, progress: float) -> float:
        return self.end + (self.start - self.end) * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


@dataclass(frozen=True)
class WarmupCosine:
    """Linear from 0 to `peak` over the first `warmup` of the training, then half a cosine to `end`.

    `step` is one step's share of the training: the last warm-up step has the peak value.
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
