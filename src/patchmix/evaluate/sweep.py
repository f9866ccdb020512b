"""Linear classifiers on stored features: many learning rates and regularizations trained at once.

Every candidate minimizes mean cross-entropy + decay/2 · ‖W‖² on features standardized by the training part, by SGD with
Nesterov momentum and a cosine schedule. All candidates see the same batches, so that a step is two matrix products.
Features of a backbone are strongly correlated, on which plain SGD converges very slowly: the steps are taken along the
principal axes of the features, each divided by its axis's variance. That changes the path, not the minimum.

Shapes: N images, D features, C candidates, K classes, n images in a batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from patchmix.evaluate.features import check_finite
from patchmix.progress import progress_bar

MOMENTUM = 0.9
BATCH = 1024
_LOGITS = 1 << 25  # held at a time: 128 MB
_LEAST_VARIANCE = 1e-3  # axes with less, of the mean axis's, get no larger steps: there is noise only
_LEAST_STEPS = 600  # small sets get more epochs
_LEAST_EPOCHS = 12


class Candidate(NamedTuple):
    """`lr` is relative: the step along an axis is lr / (the features' variance along it + decay)."""

    lr: float
    decay: float


class Metrics(NamedTuple):
    top1: float
    top5: float
    loss: float


GRID = [Candidate(lr, decay) for lr in (0.03, 0.1, 0.3, 1.0) for decay in (0.0, 1e-5, 1e-4, 1e-3, 1e-2)]


@dataclass
class Classifiers:
    """C linear classifiers behind one standardization and rotation."""

    mean: Tensor  # (D,)
    rotation: Tensor  # (D, D): division by the standard deviations, then to the principal axes
    variance: Tensor  # (D,), along the axes
    weight: Tensor  # (D, C, K)
    bias: Tensor  # (C, K)

    def prepare(self, vectors: Tensor) -> Tensor:
        """Features as the encoder gives them → coordinates on the principal axes. (n, D) → (n, D)."""
        return (vectors.to(self.mean.device) - self.mean) @ self.rotation

    def logits(self, prepared: Tensor) -> Tensor:
        """(n, D) → (n, C, K), in one matrix product."""
        return (prepared @ self.weight.flatten(1)).reshape(len(prepared), *self.bias.shape) + self.bias


def usual_epochs(images: int) -> int:
    """Enough steps to converge, also where an epoch has few of them."""
    return max(_LEAST_EPOCHS, math.ceil(_LEAST_STEPS / max(1, images // BATCH)))


def fit_candidates(
    vectors: Tensor,
    labels: Tensor,
    candidates: Sequence[Candidate],
    *,
    classes: int,
    epochs: int,
    rows: Tensor | None = None,
    seed: int = 0,
    device: torch.device | None = None,
    on_epoch: Callable[[int, Classifiers], None] = lambda epoch, classifiers: None,
) -> Classifiers:
    """Trains all candidates on vectors (N, D) with labels (N,), or on some `rows` of them (their positions).

    Calls `on_epoch` with 1, 2, … after each epoch.
    """
    check_finite(vectors, "the training images")
    rows = torch.arange(len(vectors)) if rows is None else rows
    count = len(rows)
    models = _standardized(vectors[rows[:: max(1, count // 32768)]].double(), len(candidates), classes, device)
    lr = torch.tensor([c.lr for c in candidates], device=device)[:, None]  # (C, 1)
    decay = torch.tensor([c.decay for c in candidates], device=device)[:, None]
    along = 1.0 / (models.variance.clamp_min(_LEAST_VARIANCE)[:, None, None] + decay)  # (D, C, 1)
    speeds = torch.zeros_like(models.weight), torch.zeros_like(models.bias)

    size = min(BATCH, count, max(64, _LOGITS // (len(candidates) * classes)))
    steps = count // size
    generator = torch.Generator().manual_seed(seed)
    within = torch.arange(size, device=device)
    done, total = 0, epochs * steps
    with progress_bar("linear classifiers", epochs, unit="epochs") as advance:
        for epoch in range(1, epochs + 1):
            order = rows[torch.randperm(count, generator=generator)]
            for start in range(0, steps * size, size):
                chosen = order[start : start + size]
                x = models.prepare(vectors[chosen])  # (n, D)
                error = torch.softmax(models.logits(x), dim=2)  # (n, C, K): softmax - target is the gradient
                error[within, :, labels[chosen].to(device, non_blocking=True)] -= 1.0
                error /= size
                slope = (x.T @ error.flatten(1)).reshape(models.weight.shape) + decay * models.weight
                now = lr * 0.5 * (1 + math.cos(math.pi * done / total))
                for parameter, speed, gradient in (
                    (models.weight, speeds[0], slope * along),
                    (models.bias, speeds[1], error.sum(dim=0)),
                ):
                    speed.mul_(MOMENTUM).add_(gradient)
                    parameter.sub_(now * (gradient + MOMENTUM * speed))
                done += 1
            on_epoch(epoch, models)
            advance(1)
    return models


def _standardized(some: Tensor, candidates: int, classes: int, device: torch.device | None) -> Classifiers:
    """Classifiers of zeros, with the principal axes of the given vectors."""
    mean, deviation = some.mean(dim=0), some.std(dim=0, correction=0)
    scale = torch.where(deviation > 1e-6 * deviation.max(), 1 / deviation, 0.0)  # a constant feature says nothing
    x = (some - mean) * scale
    variance, axes = torch.linalg.eigh(x.T @ x / len(x))
    return Classifiers(
        mean=mean.float().to(device),
        rotation=(scale[:, None] * axes).float().to(device),
        variance=variance.float().to(device),
        weight=torch.zeros(some.shape[1], candidates, classes, device=device),
        bias=torch.zeros(candidates, classes, device=device),
    )


@torch.inference_mode()
def score(models: Classifiers, vectors: Tensor, labels: Tensor) -> list[Metrics]:
    """Of each candidate on vectors (N, D) with labels (N,)."""
    candidates, classes = models.bias.shape
    sums = torch.zeros(3, candidates, dtype=torch.float64)
    size = max(1, _LOGITS // (candidates * classes))
    for start in range(0, len(vectors), size):
        truth = labels[start : start + size].to(models.bias.device)
        logits = models.logits(models.prepare(vectors[start : start + size]))  # (n, C, K)
        ranked = logits.topk(min(5, classes), dim=2).indices
        hits = ranked == truth[:, None, None]
        losses = F.cross_entropy(logits.transpose(1, 2), truth[:, None].expand(-1, candidates), reduction="none")
        found = torch.stack([hits[:, :, 0].double(), hits.any(dim=2).double(), losses.double()])  # (3, n, C)
        sums += found.sum(dim=1).cpu()
    return [Metrics(*row) for row in (sums / len(vectors)).T.tolist()]


def best_of(scores: Sequence[Metrics]) -> int:
    """The most accurate candidate; of equally accurate ones, that of least loss."""
    return max(range(len(scores)), key=lambda i: (scores[i].top1, -scores[i].loss))
