"""What is evaluated during pre-training: the health of the features, LiDAR, and kNN where images have labels.

A run that started from good weights also has a guard, which compares the features with the start: by leave-one-out kNN
of training images where they have labels (worse is what differs by more than the noise of these images), otherwise by
the effective rank, as long as images keep some of the neighbors that they had at the start.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchmix import distributed
from patchmix.data.contract import Source
from patchmix.data.loader import one_pass
from patchmix.data.views import View, Views, to_float
from patchmix.evaluate.features import extract
from patchmix.evaluate.knn import HEADLINE_K, QUERY_ROWS, knn_predict, nearest
from patchmix.evaluate.labeled import Part, Subset
from patchmix.evaluate.protocol import accuracy
from patchmix.interop.backbone import pooled
from patchmix.train.loop import Evaluator

# Below these a representation counts as collapsed; a random ViT and every healthy run are far above.
COLLAPSED_RANK = 2.0
COLLAPSED_COSINE = 0.99
LIDAR_IMAGES, LIDAR_VIEWS = 256, 8
FEWEST_KEPT = 0.1  # of the neighbors; below, features of unlabeled images count as worse than the start's
LEAST_RANK = 0.8  # of the start's; a somewhat lower one is no sign of worse features
_USED = ("knn_train", "knn_margin", "rank", "neighbors_kept")  # by the guard


def monitor(
    train: Source, test: Source | None, *, bank: int, queries: int, guard: "Guard | None" = None, **how: Any
) -> Evaluator:
    """The health of the features of at most `bank` training images, and kNN of at most `queries` test images.

    Without labeled test images, the first training images are classified by the others. For a guard also how many
    neighbors are kept, and kNN of all these training images (leave-one-out). A label of -1 is none. how: see `extract`.
    """
    bank_images, query_images = Subset(train, bank), None
    if test is not None and test.labels is not None and (test.labels >= 0).any():
        query_images = Subset(Part(test, np.flatnonzero(test.labels >= 0)), queries)

    def evaluate(encoder: nn.Module) -> Iterator[tuple[str, float]]:
        found = extract(encoder, bank_images, **how)
        yield from health(found.vectors)
        if guard is not None:
            yield "neighbors_kept", guard.neighbors_kept(found.vectors)
        if found.labels is None or int((labeled := found.labels >= 0).sum()) < 2:
            return
        voters = found.vectors[labeled], found.labels[labeled]
        k = min(HEADLINE_K, len(voters[1]) - 1)
        if guard is not None:
            own = knn_predict(*voters, voters[0], ks=[k], leave_one_out=True)[k]
            yield "knn_train", accuracy(own, voters[1])
            yield "knn_margin", guard.margin(own[:, 0] == voters[1])
        vectors, labels = (each[:queries] for each in voters)
        if query_images is not None:
            queried = extract(encoder, query_images, **how)
            assert queried.labels is not None
            vectors, labels = queried.vectors, queried.labels
        predicted = knn_predict(*voters, vectors, ks=[k], leave_one_out=query_images is None)[k]
        yield "knn", accuracy(predicted, labels)

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
    rank, cosine = values.get("rank", math.inf), values.get("mean_cosine", 0.0)
    if rank < COLLAPSED_RANK:
        return f"the features look collapsed: effective rank {rank:.1f} (all features lie on a line)"
    if cosine > COLLAPSED_COSINE:
        return f"the features look collapsed: random images have mean cosine {cosine:.3f}"
    return None


@dataclass
class Guard:
    """Takes the monitor's values at every point, and calls `keep(step)` where the features are the best so far.

    `state` goes into checkpoints: what a resumed run must know of the best point and of the start, whose images had
    "neighbors", int64 (N, k), and were "correct", bool (N,).
    """

    state: dict[str, Any]
    keep: Callable[[int], None]

    def neighbors_kept(self, features: Tensor) -> float:
        """The share of the neighbors at the start that still are. The first call sets the start. features: (N, D)."""
        unit, k = F.normalize(features.float(), dim=1), min(HEADLINE_K, len(features) - 1)
        parts = [nearest(unit, unit[at : at + QUERY_ROWS], k, first=at)[1] for at in range(0, len(unit), QUERY_ROWS)]
        now = torch.cat(parts)
        start: Tensor = self.state.setdefault("neighbors", now)
        same = sum(int((start == now.roll(shift, dims=1)).sum()) for shift in range(k))  # all pairs; each at most once
        return same / now.numel()

    def margin(self, correct: Tensor) -> float:
        """Half the 95 % interval of the accuracy's difference from the start, over the images. correct: (N,).

        Only images whose answer has changed count (a paired comparison). The first call sets the start.
        """
        change = correct.double() - self.state.setdefault("correct", correct).double()
        return 1.96 * math.sqrt(float(change.var(correction=0)) / len(change))

    def __call__(self, step: int, values: dict[str, float]) -> str | None:
        """What to warn of, if anything."""
        state, point = self.state, {"step": step, **{name: values[name] for name in _USED if name in values}}
        state.setdefault("start", point)
        state["last"] = point
        if "best" not in state or score(point, state["start"]) > score(state["best"], state["start"]):
            state["best"] = point
            self.keep(step)
        below = below_start(state)
        return f"the features are below those of the start: {below}" if below else None


def below_start(state: Mapping[str, Any]) -> str | None:
    """In which way the latest features are worse than the start's; None if they are not."""
    start, last = state["start"], state["last"]
    if "knn_train" in start:
        worse = last["knn_train"] < start["knn_train"] - last.get("knn_margin", 0.0)
        return f"kNN {100 * start['knn_train']:.1f} → {100 * last['knn_train']:.1f} %" if worse else None
    if last["neighbors_kept"] < FEWEST_KEPT:
        return f"{100 * last['neighbors_kept']:.0f} % of the nearest neighbors kept, fewer than {FEWEST_KEPT:.0%}"
    fallen = last["rank"] < LEAST_RANK * start["rank"]
    return f"effective rank {start['rank']:.1f} → {last['rank']:.1f}" if fallen else None


def guard_verdict(state: Mapping[str, Any]) -> str | None:
    """The last line of a run that ends below its start, and a line of its report; None where it does not."""
    below = below_start(state) if "last" in state else None
    if below is None:
        return None
    step, last = state["best"]["step"], state["last"]["step"]
    what = "the starting weights, as no point was better" if step == 0 else f"that of step {step}, the best point"
    return f"the run ends below its start ({below}): encoder.safetensors is {what} (not step {last})"


def score(point: dict[str, Any], start: dict[str, Any]) -> tuple[float, ...]:
    """The better of two points has the larger score."""
    if "knn_train" in start:
        return (point["knn_train"],)
    kept = point["neighbors_kept"]
    return (1.0, point["rank"]) if kept >= FEWEST_KEPT else (0.0, kept)
