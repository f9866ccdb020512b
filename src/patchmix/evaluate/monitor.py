"""What is evaluated during pre-training: the health of the features, LiDAR, and kNN where images have labels."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchmix import distributed
from patchmix.data.contract import Source
from patchmix.data.loader import one_pass
from patchmix.data.views import View, Views, to_float
from patchmix.evaluate.features import Features, extract
from patchmix.evaluate.guard import Neighbors
from patchmix.evaluate.knn import HEADLINE_K, knn_predict
from patchmix.evaluate.labeled import Subset
from patchmix.evaluate.protocol import accuracy
from patchmix.interop.backbone import pooled
from patchmix.train.loop import Evaluator

# Below these a representation counts as collapsed; a random ViT and every healthy run are far above.
COLLAPSED_RANK = 2.0
COLLAPSED_COSINE = 0.99
LIDAR_IMAGES, LIDAR_VIEWS = 256, 8


def monitor(
    train: Source,
    test: Source | None,
    *,
    bank: int,
    queries: int,
    image_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
    neighbors: Neighbors | None = None,
) -> Evaluator:
    """The health of the features of at most `bank` training images, and kNN of at most `queries` test images.

    Without labeled test images, the first training images are classified by the others. With `neighbors`, also what a
    Guard takes: how many neighbors are kept, and kNN of all these training images (leave-one-out).
    """
    bank_images = Subset(train, bank)
    query_images = None if test is None or test.labels is None else Subset(test, queries)

    def features(encoder: nn.Module, subset: Subset) -> Features:
        return extract(encoder, subset, image_size=image_size, mean=mean, std=std, device=device)

    def evaluate(encoder: nn.Module) -> Iterator[tuple[str, float]]:
        found = features(encoder, bank_images)
        yield from health(found.vectors)
        if neighbors is not None:
            yield "neighbors_kept", neighbors.kept(found.vectors)
        if found.labels is None:
            return
        queried = Features(found.vectors[:queries], found.labels[:queries], found.indices[:queries])
        if query_images is not None:
            queried = features(encoder, query_images)
        assert queried.labels is not None
        k, alone = min(HEADLINE_K, len(found.vectors) - 1), query_images is None
        if neighbors is not None:
            own = knn_predict(found.vectors, found.labels, found.vectors, ks=[k], leave_one_out=True)[k]
            yield "knn_train", accuracy(own, found.labels)
            yield "knn_margin", neighbors.margin(own[:, 0] == found.labels)
        predicted = knn_predict(found.vectors, found.labels, queried.vectors, ks=[k], leave_one_out=alone)[k]
        yield "knn", accuracy(predicted, queried.labels)

    return evaluate


def lidar_monitor(
    train: Source,
    views: Sequence[View],
    embed: Callable[[nn.Module, Tensor], Tensor],
    *,
    images: int = LIDAR_IMAGES,
    seed: int,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
) -> Evaluator:
    """LiDAR of some images, always in the same views; `embed` turns an encoder's features into embeddings."""
    subset = Subset(train, images)
    several = Views([views[i % len(views)] for i in range(LIDAR_VIEWS)], seed=seed)

    def evaluate(encoder: nn.Module) -> Iterator[tuple[str, float]]:
        part = [torch.empty(0, 0, 0)]  # each process computes one, and each gets all
        share = {"rank": distributed.rank(), "world_size": distributed.world_size()}
        for batch in one_pass(subset, several, batch_size=64, **share):
            if len(batch.indices):
                floats = [to_float(view.to(device), mean, std) for view in batch.views]
                embedded = [embed(encoder, pooled(encoder, view, "token")).float().cpu() for view in floats]
                part.append(torch.stack(embedded, dim=1))
        yield "lidar", lidar(torch.cat(distributed.gather_rows(torch.cat(part[1:] or part), device)))

    return evaluate


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
    """RankMe (Garrido et al. 2023): exp of the entropy of the normalized singular values."""
    return _exp_entropy(torch.linalg.svdvals(features.double()))


def lidar(embeddings: Tensor, delta: float = 1e-4) -> float:
    """LiDAR (Thilak et al. 2024): the effective rank of Σ_w^-½ Σ_b Σ_w^-½, where every image is a class of its own.

    It counts directions in which images differ more than the views of an image do. embeddings: (n images, q views, D).
    """
    n, q, dim = embeddings.shape
    means = embeddings.double().mean(dim=1)
    between = (means - means.mean(dim=0)) / math.sqrt(max(n - 1, 1))  # Σ_b = betweenᵀ · between
    within = (embeddings.double() - means[:, None]).flatten(0, 1) / math.sqrt(n * (q - 1))
    sigma_w = within.T @ within + delta * torch.eye(dim, dtype=torch.float64)
    # With Σ_w = L·Lᵀ, the eigenvalues are those of L⁻¹·Σ_b·L⁻ᵀ: the squared singular values of L⁻¹·betweenᵀ.
    whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(sigma_w), between.T, upper=False)
    return _exp_entropy(torch.linalg.svdvals(whitened).square())


def _exp_entropy(values: Tensor) -> float:
    p = values / values.sum().clamp_min(1e-12) + 1e-12
    return float(torch.exp(-(p * p.log()).sum()))


def collapse_warning(values: dict[str, float]) -> str | None:
    """One line that says why the representation looks collapsed, or None."""
    rank, cosine = values.get("rank"), values.get("mean_cosine")
    if rank is not None and rank < COLLAPSED_RANK:
        return f"the representation is collapsing: effective rank {rank:.1f} (all features lie on a line)"
    if cosine is not None and cosine > COLLAPSED_COSINE:
        return f"the representation is collapsing: random images have mean cosine {cosine:.3f}"
    return None
