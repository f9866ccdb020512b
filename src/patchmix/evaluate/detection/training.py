"""Training a detector through the one loop: its method, its parameter groups, its schedule."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from patchmix import distributed
from patchmix.data.loader import Batch, Loader
from patchmix.data.views import to_float
from patchmix.device import autocast_dtype
from patchmix.evaluate.detection.coco import CocoImages
from patchmix.evaluate.detection.files import DetectorFile
from patchmix.evaluate.detection.inference import Entry, detect_all, gather_text
from patchmix.evaluate.detection.model import Detector
from patchmix.evaluate.detection.scoring import Scores, score
from patchmix.evaluate.detection.settings import DetectSettings
from patchmix.evaluate.detection.views import TrainingViews, unpack
from patchmix.evaluate.supervised import Scores as BestScores
from patchmix.evaluate.supervised import fit
from patchmix.methods.method import Method
from patchmix.schedules import WarmupCosine
from patchmix.train.loop import Plan

MILESTONES = (8 / 9, 26 / 27)  # of the training; ViTDet's 163,889 and 177,546 of 184,375 steps
_LOSSES = {  # torchvision's names and ours
    "loss_objectness": "proposal_object",
    "loss_rpn_box_reg": "proposal_box",
    "loss_classifier": "class",
    "loss_box_reg": "box",
    "loss_mask": "mask",
}


class DetectMethod(Method):
    """A detector that learns from images with objects. Its `encoder` is the whole detector: that is what is judged."""

    encoder: Detector

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.encoder = detector
        self.scores = BestScores(["box_ap", "mask_ap"])

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """batch: images (N, 3, S, S), visible sizes, targets. The loss is the sum of torchvision's five."""
        images, sizes, targets = batch
        losses = self.encoder(images, sizes, targets)
        assert isinstance(losses, dict)
        parts: dict[str, Tensor] = {_LOSSES[name]: value for name, value in losses.items()}
        return {"loss": torch.stack([value.float() for value in parts.values()]).sum(), **parts}

    def after_step(self, progress: float) -> None:
        self.scores.steps += 1


@dataclass(frozen=True)
class WarmupSteps:
    """Linear from 0 to `peak` over the first `warmup` of the training, then a tenth of it at each milestone."""

    peak: float
    warmup: float = 0.0
    step: float = 0.0

    def __call__(self, progress: float) -> float:
        if progress < self.warmup:
            return WarmupCosine(self.peak, 0.0, warmup=self.warmup, step=self.step)(progress)
        return self.peak * 0.1 ** sum(progress >= milestone for milestone in MILESTONES)


def layer_groups(detector: Detector, layer_decay: float) -> list[dict[str, Any]]:
    """The encoder's block i of d learns with `layer_decay`^(d − i) of the learning rate, its embeddings with
    `layer_decay`^(d + 1), all else with the whole. Norms, biases and embeddings have no weight decay."""
    depth = len(detector.backbone.tokens.encoder.blocks)
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in detector.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = 1.0
        inner = name.removeprefix("backbone.tokens.encoder.")
        if inner != name:
            block = re.match(r"blocks\.(\d+)\.", inner)
            scale = layer_decay ** (depth - int(block[1]) if block else depth + 1)
        decayed = parameter.ndim > 1 and not inner.endswith(("pos_embed", "cls_token", "reg_token"))
        groups.setdefault((scale, decayed), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": 0.0, "lr_scale": scale, "decayed": decayed}
        for (scale, decayed), parameters in groups.items()
    ]


@dataclass
class Outcome:
    """What the last evaluation found."""

    entries: list[Entry]
    scores: Scores


def train_detector(
    method: DetectMethod,
    file: DetectorFile,
    train: CocoImages,
    val: CocoImages,
    settings: DetectSettings,
    *,
    device: torch.device,
    workers: int,
    folder: Path,
    identity: dict[str, Any],
) -> tuple[dict[str, float], Outcome]:
    """Trains to the end, from the newest checkpoint in `folder` if there is one; the last values and detections."""
    loader = Loader(
        train,
        TrainingViews(
            train,
            size=file.shape.image_size,
            scale=settings.scale,
            flip=settings.flip,
            mean=file.mean,
            seed=settings.seed,
        ),
        batch_size=settings.batch_size,
        seed=settings.seed,
        workers=workers,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        accumulate=settings.accumulate,
        pin_memory=device.type == "cuda",
    )
    total = max(1, round(settings.epochs * loader.steps_per_epoch))
    warmup = min(settings.warmup_steps, total // 10) / total
    lr: Any
    if settings.schedule == "cosine":
        lr = WarmupCosine(settings.lr, 0.0, warmup=warmup, step=1.0 / total)
    else:
        lr = WarmupSteps(settings.lr, warmup=warmup, step=1.0 / total)
    outcomes: list[Outcome] = []

    def prepare(batch: Batch) -> Any:
        pixels, sizes, targets = unpack(batch.views)
        return to_float(pixels, file.mean, file.std), sizes, targets

    def evaluate(detector: nn.Module) -> Iterator[tuple[str, float]]:
        assert isinstance(detector, Detector)
        if int(method.scores.steps) == 0:
            return  # nothing is to be learnt from an untrained detector, and COCO's 5,000 images take minutes
        outcome = judge(detector, file, val, device=device, batch_size=settings.eval_batch_size, workers=workers)
        outcomes[:] = [outcome]
        yield from method.scores.note({"box_ap": 0.0, "mask_ap": 0.0, **outcome.scores.metrics}, loader.steps_per_epoch)

    values = fit(
        method,
        loader,
        Plan(
            lr=lr,
            weight_decay=lambda progress: settings.weight_decay,
            batch_size=settings.batch_size,
            epochs=settings.epochs,
            accumulate=settings.accumulate,
            clip_grad=settings.clip_grad,
            autocast=autocast_dtype(device),
            seed=settings.seed,
            monitor_every=settings.evaluate_every,
        ),
        optimizer=torch.optim.AdamW(layer_groups(method.encoder, settings.layer_decay), lr=0.0),
        device=device,
        prepare=prepare,
        evaluator=evaluate,
        folder=folder,
        identity=identity,
    )
    return values, outcomes[0]


def judge(
    detector: Detector, file: DetectorFile, val: CocoImages, *, device: torch.device, batch_size: int, workers: int
) -> Outcome:
    """Detections and their scores, the same on every process."""
    entries = detect_all(
        detector,
        val,
        image_size=file.shape.image_size,
        mean=file.mean,
        std=file.std,
        device=device,
        batch_size=batch_size,
        workers=workers,
    )
    # pycocotools takes minutes for COCO's validation images: one process does it and tells the others.
    told = json.dumps(vars(score(val, entries))) if distributed.is_main() else ""
    return Outcome(entries, Scores(**json.loads(gather_text(told, device))))
