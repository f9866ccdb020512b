"""The attentive probe as its definition reads: one image, one head and one token at a time."""

from __future__ import annotations

import math

Row = list[float]


def dot(a: Row, b: Row) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def class_scores(
    tokens: list[Row],
    *,
    mean: Row,
    scale: Row,
    query: list[Row],
    value: list[list[Row]],
    weight: list[Row],
    bias: Row,
) -> Row:
    """tokens: T × D of one image; query: H × D; value: H × D × (D/H); weight: K × D. Returns K scores."""
    standard = [[(x - m) * s for x, m, s in zip(token, mean, scale, strict=True)] for token in tokens]
    gathered: Row = []
    for q, v in zip(query, value, strict=True):
        attention = [math.exp(dot(q, token) / math.sqrt(len(token))) for token in standard]
        columns = list(zip(*v, strict=True))  # of the value projection
        for column in columns:
            values = [dot(token, list(column)) for token in standard]
            gathered.append(dot(attention, values) / sum(attention))
    return [dot(gathered, row) + b for row, b in zip(weight, bias, strict=True)]
