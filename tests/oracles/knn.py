"""kNN as its definition reads, one query and one neighbor at a time, in double precision."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float64]


def vote(
    bank: Vectors, labels: list[int], query: Vectors, *, k: int, temperature: float, without: int | None = None
) -> dict[int, float]:
    """The votes of each class that got one. `without`: an image of the bank that may not vote."""

    def cosine(a: Vectors, b: Vectors) -> float:
        return float(a @ b) / (math.sqrt(float(a @ a)) * math.sqrt(float(b @ b)))

    neighbors = [(cosine(image, query), label) for image, label in zip(bank, labels, strict=True)]
    if without is not None:
        del neighbors[without]
    neighbors.sort(key=lambda pair: -pair[0])
    votes: dict[int, float] = {}
    for similarity, label in neighbors[:k]:
        votes[label] = votes.get(label, 0.0) + math.exp(similarity / temperature)
    return votes


def ranking(votes: dict[int, float], top: int, classes: int) -> list[int]:
    """The `top` most voted classes, then -1 where there are none left; at most as many as there are classes."""
    ranked = sorted(votes, key=lambda label: -votes[label])
    return (ranked + [-1] * top)[: min(top, classes)]
