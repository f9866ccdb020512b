"""Is the representation healthy? Spread, rank and mutual similarity of features, and kNN where labels exist."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

# Below these a representation counts as collapsed; a random ViT and every healthy run are far above.
COLLAPSED_RANK = 2.0
COLLAPSED_COSINE = 0.99


def health(features: Tensor) -> Iterator[tuple[str, float]]:
    """Feature standard deviation, effective rank and mean cosine of pairs. features: (N, D)."""
    features = features.double()
    unit = F.normalize(features, dim=1)
    n = len(unit)
    yield "feature_std", float(features.std(dim=0).mean()) if n > 1 else 0.0
    yield "rank", effective_rank(features)
    # The mean over all pairs i ≠ j of cos(i, j) follows from the length of the mean unit vector.
    mean_norm = float(unit.mean(dim=0).square().sum())
    yield "mean_cosine", (n * mean_norm - 1.0) / (n - 1) if n > 1 else 1.0


def effective_rank(features: Tensor) -> float:
    """RankMe (Garrido et al. 2023): exp of the entropy of the normalised singular values."""
    singular = torch.linalg.svdvals(features.double())
    p = singular / singular.sum().clamp_min(1e-12) + 1e-12
    return float(torch.exp(-(p * p.log()).sum()))


def collapse_warning(values: dict[str, float]) -> str | None:
    """One line that says why the representation looks collapsed, or None."""
    rank, cosine = values.get("rank"), values.get("mean_cosine")
    if rank is not None and rank < COLLAPSED_RANK:
        return f"the representation is collapsing: effective rank {rank:.1f} (all features lie on a line)"
    if cosine is not None and cosine > COLLAPSED_COSINE:
        return f"the representation is collapsing: random images have mean cosine {cosine:.3f}"
    return None
