"""Fine-tuning of the whole encoder with labels: the paper's third protocol, made of timm's own pieces.

Shapes: N images, K classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from timm.data.mixup import Mixup
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay  # type: ignore[attr-defined]
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from patchmix import distributed
from patchmix.data.contract import Source
from patchmix.data.loader import Batch, Loader
from patchmix.data.views import as_channels, to_float
from patchmix.device import autocast_dtype, resolve_device
from patchmix.evaluate.augmentation import CROP_AREA, Erasing, TimmAugmentation, global_randomness, seed_globally
from patchmix.evaluate.features import extract, usual_resize
from patchmix.evaluate.labelled import open_labelled
from patchmix.evaluate.results import Result, append_result
from patchmix.evaluate.stored import encoder_name
from patchmix.evaluate.supervised import BestScores, fit, top_accuracies, usual_batch, work_folder
from patchmix.files import replacing
from patchmix.interop.backbone import Backbone
from patchmix.interop.exporting import timm_arguments
from patchmix.methods.method import Method
from patchmix.schedules import WarmupCosine
from patchmix.train.loop import Plan

_TINY_DIM = 192  # up to this width an encoder takes ViT-T's learning rate


@dataclass(frozen=True)
class FinetuneSettings:
    """The authors' values. The learning rate is `base_lr` × batch / 256; None is 5e-4, and 1e-3 for ViT-T."""

    epochs: float = 100.0
    warmup_epochs: float = 10.0  # at most a tenth of the epochs
    base_lr: float | None = None
    min_lr: float = 1e-6
    batch_size: int | None = None  # None: 256 up to 64 px, else 1024
    weight_decay: float = 0.05
    layer_decay: float = 0.75
    drop_path: float = 0.1
    rand_augment: str = "rand-m9-mstd0.5-inc1"
    erasing: float = 0.25
    mixup: float = 0.8
    cutmix: float = 1.0
    label_smoothing: float = 0.1
    ema_decay: float = 0.9999
    seed: int = 0

    def check(self) -> None:
        rules = [
            ("epochs", self.epochs > 0, "above 0"),
            ("warmup_epochs", self.warmup_epochs >= 0, "at least 0"),
            ("base_lr", self.base_lr is None or self.base_lr > 0, "above 0"),
            ("batch_size", self.batch_size is None or self.batch_size >= 2, "at least 2"),
            ("weight_decay", self.weight_decay >= 0, "at least 0"),
            ("layer_decay", 0 < self.layer_decay <= 1, "in (0, 1]; 1 trains all layers alike"),
            ("drop_path", 0 <= self.drop_path < 1, "in [0, 1)"),
            ("erasing", 0 <= self.erasing <= 1, "in [0, 1]"),
            ("mixup", self.mixup >= 0, "at least 0; 0 is off"),
            ("cutmix", self.cutmix >= 0, "at least 0; 0 is off"),
            ("label_smoothing", 0 <= self.label_smoothing < 1, "in [0, 1)"),
            ("ema_decay", 0 <= self.ema_decay < 1, "in [0, 1)"),
        ]
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {rule}")


def evaluate_finetune(
    backbone: Backbone,
    data: str | Path,
    *,
    settings: FinetuneSettings | None = None,
    resize: int | None = None,
    device: str = "auto",
    workers: int = 0,
    out: Path | None = None,
) -> Result:
    """Trains the encoder and a classifier on the class token with labels, and tests both them and their average.

    settings: see `FinetuneSettings`; the defaults are the authors'.
    resize, device, workers: as in `evaluate_knn`.
    out: a folder; one line is added to its results.jsonl. Checkpoints are kept in a folder there, the same call goes
        on where one was stopped, and at the end model.safetensors and model_ema.safetensors are written beside them:
        plain state dicts with the classifier. `details["timm"]` says how timm builds the model that loads them.
    Metrics: "top1" and "top5" after the last epoch, "ema_top1" and "ema_top5" of the moving average of the weights,
    and "best_top1", "best_ema_top1": the best epoch's as chosen on the test images, which flatters. Without a test
    split, a fifth of the images is held out to test on.
    """
    settings = FinetuneSettings() if settings is None else settings
    settings.check()
    target = resolve_device(device)
    with distributed.process_group(target):
        labelled = open_labelled(data, many_passes=True)
        had_test = labelled.test is not None
        labelled = labelled.with_test()
        assert labelled.test is not None
        pixels = backbone.architecture.image_size
        crop = {"image_size": pixels, "resize": usual_resize(pixels) if resize is None else resize}
        world_size = distributed.world_size()
        batch_size = settings.batch_size
        if batch_size is None:  # Mixup pairs images, so every process needs an even number
            batch_size = usual_batch(pixels, len(labelled.train), multiple=2 * world_size)
        elif batch_size % (2 * world_size):
            nearest = max(1, batch_size // (2 * world_size)) * 2 * world_size
            raise ValueError(
                f"batch size {batch_size} must be a multiple of {2 * world_size} (Mixup takes pairs in each of "
                f"{world_size} processes); take {nearest}"
            )
        lr = (settings.base_lr or usual_base_lr(backbone)) * batch_size / 256
        warmup = min(settings.warmup_epochs, 0.1 * settings.epochs)
        told = asdict(settings) | {"batch_size": batch_size, "lr": lr, "warmup_epochs": warmup, **crop}
        del told["base_lr"]
        digest = backbone.digest()
        identity = {
            "settings": told,
            "weights": digest,
            "architecture": repr(backbone.architecture),
            "data": labelled.fingerprint(),
        }
        folder = work_folder(out, "finetune", identity)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            model = classifier(backbone, labelled.classes, drop_path=settings.drop_path)
        method = FinetuneMethod(model, labelled.classes, settings).to(target).train()
        last = _train(method, labelled.train, labelled.test, backbone, told, target, workers, folder, identity)
        details: dict[str, Any] = {
            "best_epoch": last["best_top1_epoch"],
            "best_ema_epoch": last["best_ema_top1_epoch"],
            "best": "chosen on the test images",
        }
        if folder is not None:
            details["timm"] = timm_call(backbone, labelled.classes)
            details["model"] = str(folder / "model.safetensors")
            if distributed.is_main():
                save_classifiers(method, backbone, folder, labelled.train.classes)
        wanted = ("top1", "top5", "ema_top1", "ema_top5", "best_top1", "best_ema_top1")
        result = Result(
            protocol="finetune",
            metrics={name: value for name, value in last.items() if name in wanted},
            images=method.tested,
            data=str(data),
            fingerprint=labelled.fingerprint(),
            encoder=encoder_name(backbone),
            weights=digest,
            settings=told
            | {
                "optimizer": "AdamW",
                "crop_area": list(CROP_AREA),
                "test": "test split" if had_test else "a fifth held out",
            },
            details=details,
        )
        if out is not None and distributed.is_main():
            append_result(out, result)
        return result


class FinetuneMethod(Method):
    """A classifier that learns from mixed images, and its moving average."""

    def __init__(self, model: VisionTransformer, classes: int, settings: FinetuneSettings) -> None:
        super().__init__()
        self.encoder = model
        # With warm-up the average is worth something in short trainings, too.
        self.ema = ModelEmaV3(model, decay=settings.ema_decay, use_warmup=True).requires_grad_(False)
        self.scores = BestScores(["top1", "ema_top1"])
        self.tested = 0  # images of the last evaluation
        self.smoothing = settings.label_smoothing
        self.mixup: Mixup | None = None
        if settings.mixup or settings.cutmix:
            self.mixup = Mixup(  # type: ignore[no-untyped-call]
                mixup_alpha=settings.mixup,
                cutmix_alpha=settings.cutmix,
                label_smoothing=settings.label_smoothing,
                num_classes=classes,
            )

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """batch: images (N, C, H, W), which are changed, and labels (N,)."""
        images, labels = batch
        if self.mixup is None:
            return {"loss": F.cross_entropy(self.encoder(images).float(), labels, label_smoothing=self.smoothing)}
        with global_randomness():  # Mixup draws from NumPy's global generator
            seed_globally(int(torch.randint(2**62, (), generator=self.generator)))
            images, targets = self.mixup(images, labels)  # targets: (N, K)
        return {"loss": F.cross_entropy(self.encoder(images).float(), targets)}

    def after_step(self, progress: float) -> None:
        self.scores.steps += 1
        self.ema.update(self.encoder, step=int(self.scores.steps))


def usual_base_lr(backbone: Backbone) -> float:
    return 1e-3 if backbone.architecture.dim <= _TINY_DIM else 5e-4


def classifier(backbone: Backbone, classes: int, *, drop_path: float = 0.0) -> VisionTransformer:
    """The encoder with a new linear layer on its class token."""
    model = backbone.encoder(drop_path=drop_path)
    model.reset_classifier(classes)
    assert isinstance(model.head, nn.Linear)
    nn.init.trunc_normal_(model.head.weight, std=0.01)
    nn.init.zeros_(model.head.bias)
    return model


def layer_groups(model: VisionTransformer, layer_decay: float) -> list[dict[str, Any]]:
    """timm's groups: a layer's learning rate is `layer_decay` to the power of the layers above it."""
    groups: list[dict[str, Any]] = param_groups_layer_decay(
        model,
        weight_decay=1.0,  # a mark: the loop sets the value, in the groups that are decayed
        no_weight_decay_list=model.no_weight_decay(),
        layer_decay=layer_decay,
    )
    return [group | {"decayed": group["weight_decay"] > 0} for group in groups]


def _train(
    method: FinetuneMethod,
    train: Source,
    test: Source,
    backbone: Backbone,
    told: dict[str, Any],
    device: torch.device,
    workers: int,
    folder: Path | None,
    identity: dict[str, Any],
) -> dict[str, float]:
    model, size = method.encoder, backbone.architecture.image_size
    assert isinstance(model, VisionTransformer)
    loader = Loader(
        train,
        TimmAugmentation(size, rand_augment=told["rand_augment"], mean=backbone.mean, seed=told["seed"]),
        batch_size=told["batch_size"],
        seed=told["seed"],
        workers=workers,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        pin_memory=device.type == "cuda",
    )
    erase = Erasing(told["erasing"], seed=told["seed"])
    channels = backbone.architecture.in_chans

    def prepare(batch: Batch) -> tuple[Tensor, Tensor]:
        assert batch.labels is not None
        images = to_float(batch.views[0], backbone.mean, backbone.std)
        return as_channels(erase(images, epoch=batch.epoch, indices=batch.indices), channels), batch.labels

    def evaluate(encoder: nn.Module) -> Iterator[tuple[str, float]]:
        values: dict[str, float] = {}
        for prefix, network in (("", encoder), ("ema_", method.ema.module)):
            logits = extract(  # the output of a classifier is its logits
                network,
                test,
                image_size=size,
                resize=told["resize"],
                mean=backbone.mean,
                std=backbone.std,
                device=device,
                workers=workers,
            )
            assert logits.labels is not None
            values |= top_accuracies(logits.vectors, logits.labels, prefix)
        yield from method.scores.note(values, loader.steps_per_epoch)
        method.tested = len(logits.vectors)

    total = max(1, round(told["epochs"] * loader.steps_per_epoch))
    return fit(
        method,
        loader,
        Plan(
            lr=WarmupCosine(
                told["lr"], told["min_lr"], warmup=told["warmup_epochs"] / told["epochs"], step=1.0 / total
            ),
            weight_decay=lambda progress: float(told["weight_decay"]),
            batch_size=told["batch_size"],
            epochs=told["epochs"],
            autocast=autocast_dtype(device),
            seed=told["seed"],
            monitor_every=1.0,
        ),
        optimizer=torch.optim.AdamW(layer_groups(model, told["layer_decay"]), lr=0.0),
        device=device,
        prepare=prepare,
        evaluator=evaluate,
        folder=folder,
        identity=identity,
    )


# ------------------------------------------------------------------------------------------------------ what it leaves


def timm_call(backbone: Backbone, classes: int) -> dict[str, Any]:
    """The arguments of `timm.create_model` for the classifier; add `checkpoint_path`."""
    name, arguments = timm_arguments(backbone.architecture)
    return {"model_name": name, **arguments, "num_classes": classes}


def save_classifiers(method: FinetuneMethod, backbone: Backbone, folder: Path, classes: tuple[str, ...] | None) -> None:
    """model.safetensors and model_ema.safetensors: plain timm state dicts, with the classifier."""
    for name, model in (("model", method.encoder), ("model_ema", method.ema.module)):
        assert isinstance(model, VisionTransformer)
        header = {
            "timm": timm_call(backbone, model.num_classes),
            "mean": backbone.mean,
            "std": backbone.std,
            "classes": classes,
        }
        weights = {key: tensor.detach().cpu().contiguous() for key, tensor in model.state_dict().items()}
        with replacing(folder / f"{name}.safetensors") as temporary:
            save_file(weights, temporary, metadata={"format": "pt", "patchmix-classifier": json.dumps(header)})
