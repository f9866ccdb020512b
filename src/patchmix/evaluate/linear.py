"""A linear classifier on a frozen encoder: the paper's protocol, and a fast one on stored features.

Shapes: N images, D = the encoder's width, K classes.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchmix import distributed
from patchmix.data.views import View, Views
from patchmix.evaluate import attentive, protocol, sweep
from patchmix.evaluate.features import FeatureExtractor, Features
from patchmix.evaluate.labeled import held_out
from patchmix.evaluate.results import Result
from patchmix.interop.backbone import Backbone, Pool, pooled
from patchmix.settings import Linear

EPOCHS = 100.0
CROP_AREA = (0.08, 1.0)
CHOOSE_ON = 0.1  # of the training images, to choose a candidate of the fast protocol on
ONE_SHOT = sweep.Candidate(0.3, 1e-2)  # where every class has one image, so that there is nothing to choose on
TESTED_EPOCHS = 50  # at most; small sets have hundreds of tiny epochs

Outcome = tuple[dict[str, float], dict[str, Any], dict[str, Any]]  # metrics, settings, details


def linear(settings: Linear, backbone: Backbone | None = None) -> Result:
    """Trains a linear classifier on the frozen encoder and tests it.

    Protocol "paper": 100 epochs of random resized crops and flips. "fast": features computed once; 20 classifiers,
    learning rate × weight decay, the best chosen on a tenth of the training images and trained again on all. Metrics:
    "top1" and "top5" after the last epoch; "best_top1" is the best epoch's as chosen on the test images, which is
    optimistic. `backbone` takes the place of `settings.weights`.
    """
    if not (fast := settings.protocol == "fast"):
        if settings.pool in ("attentive", "pixels"):
            raise ValueError(f"--pool {settings.pool} learns from stored features; add --protocol fast")
        if protocol.wants_few_labels(settings):
            raise ValueError("--shots and --fraction need the fast protocol; add --protocol fast")
    elif settings.base_lr is not None or settings.batch_size is not None:
        raise ValueError("the fast protocol tries learning rates by itself; leave out --base-lr and --batch-size")
    with protocol.open_task(settings, backbone, needs_test=True, many_passes=not fast) as task:
        return linear_of(task)


def linear_of(task: protocol.Task) -> Result:
    """`linear` of an open task, which has test images."""
    settings, data, draws, extractor = task.settings, task.data, task.draws(), task.extractor()
    assert isinstance(settings, Linear) and data.test is not None
    test = extractor.features(data.test)
    name = "linear"
    if settings.protocol == "fast":
        how: dict[str, Any] = {"classes": data.classes, "seed": settings.seed, "device": task.device}
        how["epochs"] = settings.epochs and max(1, round(settings.epochs))
        name, fit_and_test = "linear-fast", _fast
        if settings.pool == "attentive":
            name, fit_and_test, how["heads"] = "attentive", _attentive, task.backbone.architecture.heads
        train = extractor.features(data.train)
        outcomes = [fit_and_test(train.at(positions), test, **how) for positions in draws]
    else:
        outcomes = [_paper(settings, task, extractor, test)]
    metrics, (record, *_), (details, *more) = zip(*outcomes, strict=True)
    record |= extractor.record() | {"seed": settings.seed, "test": data.tested_on}
    details = {} if more else details
    if "best_epoch" in details:
        details["best"] = "chosen on the test images"
    return task.result(name, metrics, len(test.vectors), record, details)


def usual_base_lr(dim: int) -> float:
    """The authors' learning rate for ViT-T, -S and -B."""
    return 0.05 if dim <= 192 else 0.02 if dim <= 384 else 0.01


class LinearMethod(protocol.SupervisedMethod):
    """A linear layer that learns, behind an encoder that does not."""

    encoder: VisionTransformer
    tracked = ("top1",)

    def __init__(self, encoder: VisionTransformer, classes: int, pool: Pool = "token") -> None:
        super().__init__(encoder.requires_grad_(False))
        self.pool = pool
        self.head = nn.Linear(encoder.num_features, classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """batch: images (N, 3, H, W) and labels (N,)."""
        images, labels = batch
        self.encoder.eval()  # the loop puts it into training mode after each evaluation
        with torch.no_grad():
            features = pooled(self.encoder, images, self.pool)
        logits = self.head(features).float()
        hits = (logits.argmax(dim=1) == labels).float().mean()
        return {"loss": F.cross_entropy(logits, labels), "train_top1": hits}


def _paper(settings: Linear, task: protocol.Task, extractor: FeatureExtractor, test: Features) -> Outcome:
    assert settings.pool in ("token", "mean")
    data, device, size, seed = task.data, task.device, extractor.image_size, settings.seed
    batch_size = settings.batch_size or protocol.usual_batch(size, len(data.train), multiple=distributed.world_size())
    epochs = float(settings.epochs or EPOCHS)
    lr = (settings.base_lr or usual_base_lr(task.backbone.architecture.dim)) * batch_size / 256
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        method = LinearMethod(task.backbone.encoder(), data.classes, settings.pool).to(device)
    groups = [{"params": list(method.head.parameters()), "decayed": False}]
    labels = test.labels
    assert labels is not None

    def evaluator(encoder: nn.Module) -> Iterator[tuple[str, float]]:
        """The encoder is frozen: the test features are always those of the beginning."""
        blocks = [method.head(block.to(device)).float().cpu() for block in test.vectors.split(4096)]  # type: ignore[no-untyped-call]
        yield from protocol.top_accuracies(torch.cat(blocks), labels).items()

    last, _ = task.fit(
        "linear",
        method,
        Views([View(size, CROP_AREA, flip=0.5, jitter=0.0, gray=0.0, blur=0.0)], seed=seed),
        {"epochs": epochs, "lr": lr, "batch_size": batch_size, "seed": seed}
        | {"pool": settings.pool, "image_size": size, "resize": extractor.resize},
        evaluator=evaluator,
        optimizer=torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True),
    )
    metrics = {name: value for name, value in last.items() if not name.endswith("_epoch")}
    record: dict[str, Any] = {"epochs": epochs, "lr": lr, "batch": batch_size}
    record["optimizer"] = "SGD, Nesterov momentum 0.9, cosine, no weight decay"
    record["augmentation"] = f"random resized crop {CROP_AREA[0]:g}…{CROP_AREA[1]:g}, flip"
    return metrics, record, {"best_epoch": last["best_top1_epoch"]}


def _fast(train: Features, test: Features, *, epochs: int | None, **how: Any) -> Outcome:
    assert train.labels is not None and test.labels is not None
    epochs = epochs or sweep.usual_epochs(len(train.vectors))
    best, details = ONE_SHOT, dict[str, Any]()
    record: dict[str, Any] = {"candidates": 1}
    if (held := _chosen_on(train.labels)) is not None:
        rows = (~held).nonzero().flatten()
        models = sweep.fit_candidates(train.vectors, train.labels, sweep.GRID, rows=rows, epochs=epochs, **how)
        scores = sweep.score(models, train.vectors[held], train.labels[held])
        chosen = sweep.best_of(scores)
        best, details = sweep.GRID[chosen], {"held_out_top1": scores[chosen].top1}
        record = {"candidates": len(scores), "chosen_on": f"{int(held.sum())} held-out training images"}
    tested: dict[int, sweep.Metrics] = {}

    def note(epoch: int, classifiers: sweep.Classifiers) -> None:
        assert test.labels is not None
        if epoch % math.ceil(epochs / TESTED_EPOCHS) == 0 or epoch == epochs:
            tested[epoch] = sweep.score(classifiers, test.vectors, test.labels)[0]

    sweep.fit_candidates(train.vectors, train.labels, [best], epochs=epochs, on_epoch=note, **how)
    best_epoch = max(tested, key=lambda epoch: tested[epoch].top1)
    metrics = {"top1": tested[epochs].top1, "top5": tested[epochs].top5, "best_top1": tested[best_epoch].top1}
    if how["classes"] <= 5:
        del metrics["top5"]
    details |= {"relative_lr": best.lr, "weight_decay": best.decay, "best_epoch": float(best_epoch)}
    return metrics, {"epochs": float(epochs), **record, "augmentation": "none"}, details


def _attentive(train: Features, test: Features, *, epochs: int | None, **how: Any) -> Outcome:
    """As `_fast`, with the learning rate chosen on held-out images."""
    assert train.labels is not None and test.labels is not None
    how["epochs"] = epochs or attentive.usual_epochs(len(train.vectors))
    lr, candidates, details = attentive.LRS[0], 1, {}
    if (held := _chosen_on(train.labels)) is not None:
        rest, truth, scores = (~held).nonzero().flatten(), train.labels[held], dict[float, float]()
        for each in attentive.LRS:
            probe = attentive.fit(train.vectors, train.labels, lr=each, rows=rest, **how)
            scores[each] = protocol.top_accuracies(attentive.logits(probe, train.vectors[held]), truth)["top1"]
        lr = max(scores, key=lambda each: scores[each])
        candidates, details = len(scores), {"held_out_top1": scores[lr]}
    probe = attentive.fit(train.vectors, train.labels, lr=lr, **how)
    metrics = protocol.top_accuracies(attentive.logits(probe, test.vectors), test.labels)
    record = {"epochs": float(how["epochs"]), "candidates": candidates, "optimizer": "AdamW"}
    return metrics, record | {"augmentation": "none"}, {"lr": lr, **details}


def _chosen_on(labels: Tensor) -> Tensor | None:
    """Which training images candidates are chosen on, bool (N,); None where every class has one image."""
    return torch.from_numpy(held_out(labels.numpy(), CHOOSE_ON)) if int(labels.bincount().max()) > 1 else None
