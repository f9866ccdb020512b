"""Transfer to COCO: Mask R-CNN is trained on a pre-trained ViT, or a trained detector is evaluated."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from patchmix import distributed
from patchmix.data.loader import Batch, Loader
from patchmix.data.views import to_float
from patchmix.device import autocast_dtype, resolve_device
from patchmix.evaluate.detection.coco import CocoImages, open_split
from patchmix.evaluate.detection.inference import Entry, detect_all, gather_text, save_pictures
from patchmix.evaluate.detection.model import (
    FILE,
    Detector,
    DetectorFile,
    Shape,
    build_detector,
    load_detector,
    without_class_layers,
)
from patchmix.evaluate.detection.scoring import Scores, save_detections, score
from patchmix.evaluate.detection.views import TrainingViews, unpack
from patchmix.evaluate.results import Result, append_result
from patchmix.evaluate.stored import encoder_name
from patchmix.evaluate.supervised import BestScores, fit, work_folder
from patchmix.interop.backbone import Architecture, Backbone
from patchmix.methods.method import Method
from patchmix.nn.vit import create_encoder
from patchmix.schedules import WarmupCosine
from patchmix.train.loop import Plan

_LOSSES = {  # torchvision's names and ours
    "loss_objectness": "proposal_object",
    "loss_rpn_box_reg": "proposal_box",
    "loss_classifier": "class",
    "loss_box_reg": "box",
    "loss_mask": "mask",
}


@dataclass(frozen=True)
class DetectSettings:
    """The paper's transfer to COCO "as MAE": Mask R-CNN with FPN, 1024 × 1024 px, 100 epochs.

    What the paper leaves open is as in MAE's benchmark and its successor ViTDet: batch 64, AdamW, large-scale jitter.
    `lr` is for `batch_size` images and is not scaled with it. A detector's `window` is in tokens; 0 is attention over
    the whole image in all blocks, otherwise `global_blocks` blocks at even depths have it. `patch_size` resamples the
    patch embedding, for encoders whose patches are not 4, 8, 16 or 32 px.
    """

    image_size: int = 1024
    patch_size: int | None = None  # None: the encoder's own
    window: int = 16
    global_blocks: int = 4
    channels: int = 256  # of every map of the pyramid and of the heads
    head_dim: int = 1024
    smallest_anchor: int = 32  # px on the canvas, at stride 4; each next level has twice that

    epochs: float = 100.0
    batch_size: int = 64
    accumulate: int = 1
    lr: float = 1e-4
    warmup_steps: int = 250
    weight_decay: float = 0.1
    layer_decay: float = 0.75
    drop_path: float = 0.1
    clip_grad: float = 0.0  # 0 is off
    scale: tuple[float, float] = (0.1, 2.0)  # of large-scale jitter; 1 fits the image to the canvas
    flip: bool = True
    rois_per_image: int = 512
    recompute: bool = False  # activation checkpointing: less memory, about a third more time
    evaluate_every: float = 10.0  # epochs; 0: at the end only
    seed: int = 0

    def check(self) -> None:
        unit = 32 if self.patch_size is None else max(32, self.patch_size)
        low, high = self.scale
        rules = [
            ("image_size", self.image_size >= 32 and self.image_size % unit == 0, f"a multiple of {unit}"),
            ("patch_size", self.patch_size in (None, 4, 8, 16, 32), "4, 8, 16 or 32, or left out"),
            ("window", self.window >= 0, "at least 0; 0 is attention over the whole image"),
            ("global_blocks", self.global_blocks >= 0, "at least 0"),
            ("channels", self.channels >= 1, "at least 1"),
            ("head_dim", self.head_dim >= 1, "at least 1"),
            ("smallest_anchor", self.smallest_anchor >= 1, "at least 1"),
            ("epochs", self.epochs > 0, "above 0"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("accumulate", self.accumulate >= 1, "at least 1"),
            ("lr", self.lr > 0, "above 0"),
            ("warmup_steps", self.warmup_steps >= 0, "at least 0"),
            ("weight_decay", self.weight_decay >= 0, "at least 0"),
            ("layer_decay", 0 < self.layer_decay <= 1, "in (0, 1]; 1 trains all layers alike"),
            ("drop_path", 0 <= self.drop_path < 1, "in [0, 1)"),
            ("clip_grad", self.clip_grad >= 0, "at least 0; 0 is off"),
            ("scale", 0 < low <= high <= 4, "two factors, 0 < low ≤ high ≤ 4"),
            ("rois_per_image", self.rois_per_image >= 4, "at least 4"),
            ("evaluate_every", self.evaluate_every >= 0, "at least 0; 0 is at the end only"),
        ]
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {rule}")

    def shape(self) -> Shape:
        return Shape(**{field.name: getattr(self, field.name) for field in fields(Shape)})

    def record(self) -> dict[str, Any]:
        """As plain data: what is stored with results and checkpoints."""
        return asdict(self) | {"scale": list(self.scale)}


def detect(
    backbone: Backbone | None,
    data: str | Path,
    out: str | Path,
    settings: DetectSettings | None = None,
    *,
    model: str = "vit_base_patch16_224",
    start: str | Path | None = None,
    train: str = "train2017",
    val: str = "val2017",
    train_images: str | None = None,
    train_annotations: str | None = None,
    val_images: str | None = None,
    val_annotations: str | None = None,
    device: str = "auto",
    workers: int = 0,
    pictures: int = 8,
) -> Result:
    """Trains Mask R-CNN on an encoder with COCO's objects, and evaluates it by box and mask AP.

    backbone: the pre-trained encoder. None begins with a random one of the architecture `model`, or, with `start`,
        with a detector that was trained before (see `load_detector`): its shape (image size, window, …) is kept and
        overrules the settings; where its classes are others, only the layers that name classes begin anew.
    data: a folder with train2017/, val2017/ and annotations/instances_{train,val}2017.json. `train` and `val` are
        other names in the same layout; `train_images`, `train_annotations`, `val_images` and `val_annotations` are
        paths below `data` in any layout.
    out: a folder; one line is added to its results.jsonl. In a folder detect-… there: settings.json, metrics.jsonl,
        checkpoints (the same call goes on where one was stopped), detector.safetensors, the detections of the last
        evaluation as COCO's result files, and `pictures` of them beside the truth.
    Metrics: box_ap, box_ap50, box_ap75, box_ap_small, box_ap_medium, box_ap_large and the same with mask_, in 0…1;
    `details["classes"]` has the AP of every class.
    """
    settings = DetectSettings() if settings is None else settings
    settings.check()
    if backbone is not None and start is not None:
        raise ValueError("a detector brings its own encoder; give either an encoder or a detector to start from")
    data, out = Path(data), Path(out)
    target = resolve_device(device)
    with distributed.process_group(target):
        training = open_split(data, train, images=train_images, annotations=train_annotations)
        testing = open_split(data, val, images=val_images, annotations=val_annotations)
        _check_same_classes(training, testing)
        testing.with_objects()  # raises where there are none: nothing to evaluate on
        training = training.with_objects()
        encoder = backbone if backbone is not None else _random_encoder(model, settings.seed)
        origin = None if start is None else load_detector(Path(start))
        file = _new_detector(encoder, origin, training, settings)
        started = file.digest()
        name = encoder_name(encoder) if origin is None else f"detector {Path(start or '').name}"
        record = settings.record() | vars(file.shape)
        identity = {
            "settings": record,
            "detector": file.header(),
            "weights": started,
            "data": [training.fingerprint(), testing.fingerprint()],
        }
        folder = work_folder(out, "detect", identity)
        assert folder is not None
        detector = build_detector(
            file.architecture,
            len(file.categories),
            file.shape,
            drop_path=settings.drop_path,
            rois_per_image=settings.rois_per_image,
            recompute=settings.recompute,
        )
        detector.load_state_dict(file.weights)
        method = DetectMethod(detector).to(target).train()
        values, detections = _train(
            method,
            file,
            training,
            testing,
            settings,
            device=target,
            workers=workers,
            folder=folder,
            identity=identity,
        )
        trained = replace(file, weights={key: value.cpu() for key, value in detector.state_dict().items()})
        result = Result(
            protocol="detect",
            metrics=detections.scores.metrics,
            images=len(testing),
            data=str(data),
            fingerprint=testing.fingerprint(),
            encoder=name,
            weights=encoder.digest() if origin is None else started,
            settings=record | {"train": training.name, "train_images": len(training), "val": testing.name},
            details={
                "detector": str(folder / FILE),
                "best_box_ap": values["best_box_ap"],
                "best_box_ap_epoch": values["best_box_ap_epoch"],
                "best": "chosen on the validation images",
                "classes": detections.scores.classes,
            },
        )
        if distributed.is_main():
            trained.save(folder / FILE)
            _write(folder, out, testing, detections, result, pictures)
        distributed.barrier()
        return result


def evaluate_only(
    detector: str | Path,
    data: str | Path,
    out: str | Path | None = None,
    *,
    val: str = "val2017",
    val_images: str | None = None,
    val_annotations: str | None = None,
    device: str = "auto",
    workers: int = 0,
    pictures: int = 8,
) -> Result:
    """Evaluates a trained detector (see `load_detector`) on `data`; with `out` it writes there what `detect` does."""
    target = resolve_device(device)
    with distributed.process_group(target):
        file = load_detector(Path(detector))
        testing = open_split(Path(data), val, images=val_images, annotations=val_annotations)
        if testing.categories != file.categories:
            raise ValueError(
                f"{testing.name} has other classes than {detector} was trained with "
                f"({_first_difference(testing, file)}); evaluate on annotations with the same categories"
            )
        testing.with_objects()
        network = file.detector().to(target)
        detections = evaluate(network, file, testing, device=target, workers=workers)
        result = Result(
            protocol="detect",
            metrics=detections.scores.metrics,
            images=len(testing),
            data=str(data),
            fingerprint=testing.fingerprint(),
            encoder=f"detector {Path(detector).name}",
            weights=file.digest(),
            settings=vars(file.shape) | {"val": testing.name, "trained": False},
            details={"detector": str(detector), "classes": detections.scores.classes},
        )
        if out is not None and distributed.is_main():
            _write(Path(out), Path(out), testing, detections, result, pictures)
        distributed.barrier()
        return result


class DetectMethod(Method):
    """A detector that learns from images with objects. Its `encoder`, which is evaluated, is the whole detector."""

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
class Detections:
    """What the last evaluation found, and how good it is."""

    entries: list[Entry]
    scores: Scores


def evaluate(
    detector: Detector, file: DetectorFile, val: CocoImages, *, device: torch.device, workers: int
) -> Detections:
    """Detections and their scores, the same on every process."""
    entries = detect_all(
        detector,
        val,
        image_size=file.shape.image_size,
        mean=file.mean,
        std=file.std,
        device=device,
        workers=workers,
    )
    # pycocotools takes minutes for COCO's validation images: one process runs it and sends its scores.
    text = json.dumps(vars(score(val, entries))) if distributed.is_main() else ""
    return Detections(entries, Scores(**json.loads(gather_text(text, device))))


def _train(
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
) -> tuple[dict[str, float], Detections]:
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
    last: list[Detections] = []

    def prepare(batch: Batch) -> Any:
        pixels, sizes, targets = unpack(batch.views)
        return to_float(pixels, file.mean, file.std), sizes, targets

    def evaluator(detector: nn.Module) -> Iterator[tuple[str, float]]:
        assert isinstance(detector, Detector)
        if int(method.scores.steps) == 0:
            return  # COCO's 5,000 images take minutes, and an untrained detector finds nothing
        last[:] = [evaluate(detector, file, val, device=device, workers=workers)]
        metrics = {"box_ap": 0.0, "mask_ap": 0.0, **last[0].scores.metrics}
        yield from method.scores.note(metrics, loader.steps_per_epoch)

    values = fit(
        method,
        loader,
        Plan(
            lr=WarmupCosine(settings.lr, 0.0, warmup=warmup, step=1.0 / total),
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
        evaluator=evaluator,
        folder=folder,
        identity=identity,
    )
    return values, last[0]


def _random_encoder(name: str, seed: int) -> Backbone:
    """For training without pre-training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = create_encoder(name)
    return Backbone(Architecture.of(name, encoder), encoder.state_dict(), origin={"random": True, "seed": seed})


def _new_detector(
    encoder: Backbone, origin: DetectorFile | None, training: CocoImages, settings: DetectSettings
) -> DetectorFile:
    """The detector to begin with: the same weights for the same seed, on every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        classes = len(training.categories)
        if origin is None:
            shape, architecture = settings.shape(), encoder.architecture
            fresh = build_detector(architecture, classes, shape, encoder_weights=encoder.weights)
            side, patch = shape.image_size, shape.patch_size or architecture.patch_size
            if side % patch:
                raise ValueError(f"image_size is {side}; it must be a multiple of the patch size {patch}")
            return DetectorFile(
                architecture, shape, training.categories, fresh.state_dict(), encoder.mean, encoder.std, encoder.origin
            )
        if origin.categories == training.categories:
            return replace(origin, origin=origin.origin | {"continued": True})
        fresh = build_detector(origin.architecture, classes, origin.shape)
        weights = fresh.state_dict() | without_class_layers(origin.weights)
        return replace(origin, categories=training.categories, weights=weights)


def _write(folder: Path, out: Path, testing: CocoImages, detections: Detections, result: Result, pictures: int) -> None:
    save_detections(folder, detections.entries)
    save_pictures(folder / "pictures", testing, detections.entries, count=pictures)
    append_result(out, result)


def _check_same_classes(training: CocoImages, testing: CocoImages) -> None:
    if training.categories != testing.categories:
        raise ValueError(
            f"{training.name} and {testing.name} have different classes ({_first_difference(training, testing)}); "
            "both must list the same categories"
        )


def _first_difference(one: CocoImages | DetectorFile, other: CocoImages | DetectorFile) -> str:
    left, right = ({category.id: category.name for category in each.categories} for each in (one, other))
    number = min(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))
    return f"id {number} is {left.get(number, 'missing')} and {right.get(number, 'missing')}"
