"""One of several mixes, drawn anew for every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from patchmix.mixing.mixed import Mix, Mixed

AnyMix = TypeVar("AnyMix", bound=Mix)


class OneOf(Generic[AnyMix]):
    """`for_one_step` draws one mix, for both views of a step; a call draws one for itself."""

    def __init__(self, mixes: Sequence[AnyMix], generator: torch.Generator | None = None) -> None:
        if not mixes:
            raise ValueError("there is no mix to draw from; give at least one")
        self.mixes, self.generator = tuple(mixes), generator

    def for_one_step(self) -> AnyMix:
        return self.mixes[int(torch.randint(len(self.mixes), (), generator=self.generator))]

    def __call__(self, images: Tensor) -> Mixed:
        return self.for_one_step()(images)
