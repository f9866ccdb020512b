"""Weighted k-nearest-neighbour classification: cosine similarity s, votes weighted by exp(s / τ′)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

TEMPERATURE = 0.07  # τ′
HEADLINE_K = 20
BLOCK_ELEMENTS = 1 << 26  # similarities held at a time: 256 MB


@torch.inference_mode()
def knn_predict(
    bank: Tensor,
    labels: Tensor,
    queries: Tensor,
    *,
    ks: Sequence[int] = (HEADLINE_K,),
    temperature: float = TEMPERATURE,
    leave_one_out: bool = False,
    top: int = 5,
) -> dict[int, Tensor]:
    """The `top` most voted classes of every query, for every k in one pass.

    bank: (B, D) with labels (B,), queries: (Q, D); with `leave_one_out` the queries are the bank itself and no image
    votes for itself. Returns for each k a tensor (Q, min(top, classes)), the best class first.
    """
    available = len(bank) - int(leave_one_out)
    largest = max(ks)
    if largest > available:
        raise ValueError(f"k is {largest}, but only {available} labelled images can vote; take a smaller k")
    bank, queries = F.normalize(bank.float(), dim=1), F.normalize(queries.float(), dim=1)
    classes = int(labels.max()) + 1
    predictions: dict[int, list[Tensor]] = {k: [] for k in ks}
    block = max(1, BLOCK_ELEMENTS // len(bank))
    for start in range(0, len(queries), block):
        similarity = queries[start : start + block] @ bank.T  # (b, B)
        if leave_one_out:
            rows = torch.arange(len(similarity), device=similarity.device)
            similarity[rows, start + rows] = -torch.inf
        nearest, where = similarity.topk(largest, dim=1)  # sorted
        votes = torch.exp((nearest - 1.0) / temperature)  # −1 changes no ranking and avoids overflow
        voted = labels[where]  # (b, largest)
        for k in ks:
            tally = votes.new_zeros(len(votes), classes).scatter_add_(1, voted[:, :k], votes[:, :k])
            predictions[k].append(tally.topk(min(top, classes), dim=1).indices)
    return {k: torch.cat(parts) for k, parts in predictions.items()}


def accuracy(predictions: Tensor, labels: Tensor, top: int = 1) -> float:
    """The share of rows whose label is among the first `top` predictions."""
    hits = (predictions[:, :top] == labels.unsqueeze(1)).any(dim=1)
    return float(hits.float().mean())
