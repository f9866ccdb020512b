"""A measured value beside its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from patchmix.study.bench import Spread


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Of two series that were measured in turns, round by round."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


@dataclass(frozen=True)
class Result:
    name: str
    value: Spread
    at_least: float | None = None
    at_most: float | None = None
    parts: dict[str, float] = field(default_factory=dict)  # shares that explain it

    @property
    def target(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return "" if self.at_most is None else f"≤ {self.at_most:g}"

    @property
    def reached(self) -> bool | None:
        """None where there is no target."""
        if self.at_least is not None:
            return self.value.median >= self.at_least
        return None if self.at_most is None else self.value.median <= self.at_most

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "target": self.target, "reached": self.reached}
