"""Eqs. 13-15 as double sums."""

from __future__ import annotations

import math

from torch import Tensor


def sim(h: Tensor, z: Tensor) -> float:
    return float((h @ z) / (h.norm() * z.norm()))


def log_probability(h: Tensor, z: Tensor, j: int, tau: float) -> float:
    total = sum(math.exp(sim(h, z[t]) / tau) for t in range(len(z)))
    return math.log(math.exp(sim(h, z[j]) / tau) / total)


def mix_to_origin(h: Tensor, z: Tensor, m: int, tau: float) -> float:
    n = len(h)
    total = 0.0
    for i in range(n):
        for j in range(m):
            total += log_probability(h[i], z, (i + j) % n, tau)
    return -total / (n * m)


def mix_to_mix(h: Tensor, z: Tensor, m: int, tau: float) -> float:
    n = len(h)
    total = 0.0
    for i in range(n):
        for j in range(2 * m - 1):
            weight = 1 - abs(m - j - 1) / m
            total += weight * log_probability(h[i], z, (i - m + 1 + j) % n, tau)
    return -total / n


def origin_to_origin(h: Tensor, z: Tensor, tau: float) -> float:
    n = len(h)
    return -sum(log_probability(h[i], z, i, tau) for i in range(n)) / n


def soft(h: Tensor, z: Tensor, target: Tensor, tau: float) -> float:
    """Any target, term by term."""
    total = 0.0
    for i in range(len(h)):
        for j in range(len(z)):
            if target[i, j] != 0:
                total += float(target[i, j]) * log_probability(h[i], z, j, tau)
    return -total / len(h)
