"""A linear classifier on a frozen encoder: the paper's protocol, and a fast one on stored features.

Shapes: N images, D = the encoder's width, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchmix import distributed
from patchmix.data.loader import Batch, Loader
from patchmix.data.views import View, Views, to_float
from patchmix.device import autocast_dtype, resolve_device
from patchmix.evaluate import sweep
from patchmix.evaluate.features import LAYERS, Features, Pool, pooled
from patchmix.evaluate.labelled import Labelled, held_out, open_labelled
from patchmix.evaluate.results import Result, append_result
from patchmix.evaluate.stored import Reader
from patchmix.evaluate.supervised import BestScores, fit, top_accuracies, usual_batch, work_folder
from patchmix.interop.backbone import Backbone
from patchmix.methods.method import Method
from patchmix.schedules import Cosine
from patchmix.train.loop import Plan

EPOCHS = 100.0
LR = 0.05  # the authors use 0.02 … 0.05; not scaled by the batch size
CROP_AREA = (0.08, 1.0)
CHOOSE_ON = 0.1  # of the training images, to choose a candidate of the fast protocol on
TESTED_EPOCHS = 50  # at most; small sets have hundreds of tiny epochs


def evaluate_linear(
    backbone: Backbone,
    data: str | Path,
    *,
    protocol: Literal["paper", "fast"] = "paper",
    epochs: float | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    pool: Pool = "token",
    resize: int | None = None,
    device: str = "auto",
    workers: int = 0,
    seed: int = 0,
    cache: bool = True,
    out: Path | None = None,
) -> Result:
    """Trains a linear classifier on the frozen encoder and tests it.

    protocol: "paper": 100 epochs, random resized crops and flips, SGD with Nesterov momentum 0.9, learning rate 0.05
        with a cosine schedule, no weight decay, batch 256 (up to 64 px) or 1024; hours on ImageNet. With `out` it
        keeps checkpoints in a folder there, and the same call goes on where one was stopped. "fast": features of the
        plain images, computed once; 20 classifiers, learning rate × weight decay, trained together, the best chosen
        on a tenth of the training images, trained anew on all; seconds. Both are right in their way, but their
        numbers differ: the result says which it was.
    epochs, lr, batch_size: of the paper's protocol; None takes the values above. `epochs` goes for the fast one, too.
    pool, resize, device, workers, cache, out: as in `evaluate_knn`.
    Metrics: "top1" and "top5" after the last epoch; "best_top1" is the best epoch's as chosen on the test images,
    which flatters. Without a test split, a fifth of the images is held out to test on.
    """
    if protocol not in ("paper", "fast"):
        raise ValueError(f"protocol is {protocol!r}; it must be paper or fast")
    if epochs is not None and epochs <= 0:
        raise ValueError(f"epochs is {epochs}; it must be above 0, the paper's is {EPOCHS:g}")
    target = resolve_device(device)
    with distributed.process_group(target):
        labelled = open_labelled(data, many_passes=protocol == "paper")
        had_test = labelled.test is not None
        labelled = labelled.with_test()
        reader = Reader(backbone, device=target, pool=pool, resize=resize, workers=workers, cache=cache)
        assert labelled.test is not None
        test = reader.read(labelled.test)
        common = {
            "layer": LAYERS[pool],
            **reader.settings(),
            "seed": seed,
            "test": "test split" if had_test else "a fifth held out",
        }
        if protocol == "fast":
            if lr is not None or batch_size is not None:
                raise ValueError("the fast protocol tries learning rates by itself; leave out lr and batch size")
            metrics, settings, details = _fast(reader, labelled, test, epochs=epochs, seed=seed)
        else:
            metrics, settings, details = _paper(
                reader, labelled, test, epochs=epochs, lr=lr, batch_size=batch_size, workers=workers, seed=seed, out=out
            )
        result = Result(
            protocol="linear" if protocol == "paper" else "linear-fast",
            metrics=metrics,
            images=len(test.vectors),
            data=str(data),
            fingerprint=labelled.fingerprint(),
            encoder=reader.encoder_name,
            weights=reader.digest,
            settings=settings | common,
            details=details,
        )
        if out is not None and distributed.is_main():
            append_result(out, result)
        return result


Found = tuple[dict[str, float], dict[str, Any], dict[str, Any]]  # metrics, settings, details


# ---------------------------------------------------------------------------------------------------- the paper's way


class LinearMethod(Method):
    """A linear layer that learns, behind an encoder that does not."""

    def __init__(self, encoder: VisionTransformer, classes: int, pool: Pool = "token") -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(False)
        self.pool = pool
        self.head = nn.Linear(encoder.num_features, classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)
        self.scores = BestScores(["top1"])

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """batch: images (N, 3, H, W) and labels (N,)."""
        images, labels = batch
        self.encoder.eval()  # the loop puts it into training mode after each evaluation
        with torch.no_grad():
            features = pooled(self.encoder, images, self.pool)
        logits = self.head(features).float()
        hits = (logits.argmax(dim=1) == labels).float().mean()
        return {"loss": F.cross_entropy(logits, labels), "train_top1": hits}

    def after_step(self, progress: float) -> None:
        self.scores.steps += 1


def _paper(
    reader: Reader,
    labelled: Labelled,
    test: Features,
    *,
    epochs: float | None,
    lr: float | None,
    batch_size: int | None,
    workers: int,
    seed: int,
    out: Path | None,
) -> Found:
    backbone, device = reader.backbone, reader.device
    epochs, lr = EPOCHS if epochs is None else epochs, LR if lr is None else lr
    world_size = distributed.world_size()
    batch_size = batch_size or usual_batch(reader.image_size, len(labelled.train), multiple=world_size)
    settings: dict[str, Any] = {
        "epochs": float(epochs),
        "lr": lr,
        "batch": batch_size,
        "optimizer": "SGD, Nesterov momentum 0.9, cosine, no weight decay",
        "augmentation": f"random resized crop {CROP_AREA[0]:g}…{CROP_AREA[1]:g}, flip",
    }
    identity = {
        "settings": settings | reader.settings() | {"seed": seed, "pool": reader.pool},
        "weights": reader.digest,
        "architecture": repr(backbone.architecture),
        "data": labelled.fingerprint(),
    }
    view = View(reader.image_size, CROP_AREA, flip=0.5, jitter=0.0, gray=0.0, blur=0.0)
    loader = Loader(
        labelled.train,
        Views([view], seed=seed),
        batch_size=batch_size,
        seed=seed,
        workers=workers,
        rank=distributed.rank(),
        world_size=world_size,
        pin_memory=device.type == "cuda",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        method = LinearMethod(backbone.encoder(), labelled.classes, reader.pool)
    method.to(device)
    # Nesterov's momentum in param groups as the loop wants them: nothing is decayed.
    groups = [{"params": list(method.head.parameters()), "decayed": False}]
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)
    labels = test.labels
    assert labels is not None

    def prepare(batch: Batch) -> tuple[Tensor, Tensor]:
        assert batch.labels is not None
        return to_float(batch.views[0], backbone.mean, backbone.std), batch.labels

    def evaluate(encoder: nn.Module) -> Iterator[tuple[str, float]]:
        """The encoder is frozen: the test features are always those of the beginning."""
        blocks = [method.head(block.to(device)).float().cpu() for block in test.vectors.split(4096)]  # type: ignore[no-untyped-call]
        yield from method.scores.note(top_accuracies(torch.cat(blocks), labels), loader.steps_per_epoch)

    last = fit(
        method,
        loader,
        Plan(
            lr=Cosine(lr, 0.0),
            weight_decay=lambda progress: 0.0,
            batch_size=batch_size,
            epochs=epochs,
            autocast=autocast_dtype(device),
            seed=seed,
            monitor_every=1.0,
        ),
        optimizer=optimizer,
        device=device,
        prepare=prepare,
        evaluator=evaluate,
        folder=work_folder(out, "linear", identity),
        identity=identity,
    )
    metrics = {name: value for name, value in last.items() if name in ("top1", "top5", "best_top1")}
    return metrics, settings, {"best_epoch": last["best_top1_epoch"], "best": "chosen on the test images"}


# -------------------------------------------------------------------------------------------------------- the fast way


def _fast(reader: Reader, labelled: Labelled, test: Features, *, epochs: float | None, seed: int) -> Found:
    """Sweep, choose on a held-out part of the training images, train the chosen one anew on all of them."""
    train = reader.read(labelled.train)
    assert train.labels is not None and test.labels is not None
    candidates = sweep.grid()
    held = torch.from_numpy(held_out(train.labels.numpy(), CHOOSE_ON))
    rounds = sweep.usual_epochs(len(train.vectors)) if epochs is None else max(1, round(epochs))

    options: dict[str, Any] = {
        "classes": labelled.classes,
        "epochs": rounds,
        "seed": seed,
        "device": reader.device,
    }
    rows = (~held).nonzero().flatten()
    models = sweep.fit_candidates(train.vectors, train.labels, candidates, rows=rows, **options)
    scores = sweep.score(models, train.vectors[held], train.labels[held])
    best = sweep.best_of(scores)

    tested: dict[int, sweep.Score] = {}

    def note(epoch: int, classifiers: sweep.Classifiers) -> None:
        assert test.labels is not None
        if epoch % math.ceil(rounds / TESTED_EPOCHS) == 0 or epoch == rounds:
            tested[epoch] = sweep.score(classifiers, test.vectors, test.labels)[0]

    sweep.fit_candidates(train.vectors, train.labels, [candidates[best]], on_epoch=note, **options)
    metrics = {"top1": tested[rounds].top1}
    if labelled.classes > 5:
        metrics["top5"] = tested[rounds].top5
    best_epoch = max(tested, key=lambda epoch: tested[epoch].top1)
    metrics["best_top1"] = tested[best_epoch].top1
    settings = {
        "epochs": float(rounds),
        "candidates": len(candidates),
        "chosen_on": f"{int(held.sum())} held-out training images",
        "augmentation": "none",
    }
    details = {
        "relative_lr": candidates[best].lr,
        "weight_decay": candidates[best].decay,
        "held_out_top1": scores[best].top1,
        "best_epoch": float(best_epoch),
        "best": "chosen on the test images",
    }
    return metrics, settings, details
