"""Transfer to COCO: Mask R-CNN is trained on a pre-trained ViT, or a trained detector is evaluated."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from patchmix import distributed
from patchmix.data.loader import Batch
from patchmix.data.views import to_float
from patchmix.device import resolve_device
from patchmix.evaluate.detection.coco import CocoImages, names_of, open_split
from patchmix.evaluate.detection.inference import Entry, detect_all, gather_text, predict, save_pictures
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
from patchmix.evaluate.protocol import SupervisedMethod, encoder_name, fit, results_folder, work_folder
from patchmix.evaluate.results import Result, append_result
from patchmix.interop.backbone import Architecture, Backbone
from patchmix.interop.loading import load_backbone
from patchmix.nn.vit import create_encoder
from patchmix.settings import Detect

_NOT_RECORDED = {  # in results and checkpoints
    *("weights", "data", "out", "eval_only", "predict", "threshold", "pictures", "model", "start", "train", "val"),
    *("train_images", "train_annotations", "val_images", "val_annotations", "encoder", "device", "workers"),
}
Detections = tuple[list[Entry], Scores]
_LOSSES = {  # torchvision's names and ours
    "loss_objectness": "proposal_object",
    "loss_rpn_box_reg": "proposal_box",
    "loss_classifier": "class",
    "loss_box_reg": "box",
    "loss_mask": "mask",
}


def detect(settings: Detect, backbone: Backbone | None = None) -> Result | list[Path]:
    """Trains Mask R-CNN on an encoder with COCO's objects, and evaluates it by box and mask AP.

    With `eval_only` a trained detector is evaluated, with `predict` its detections are drawn (see `predict`).
    WEIGHTS "scratch" begins with a random encoder of the architecture `model`, or, with `start`, with a detector that
    was trained before: its shape (image size, window, …) overrules the settings; where its classes are others, only
    the layers that name classes begin anew. One line is added to results.jsonl, and a folder detect-… beside it gets
    the log, checkpoints, detector.safetensors, and the detections as COCO's result files and as pictures. Metrics:
    box_ap, box_ap50, box_ap75, box_ap_small, box_ap_medium, box_ap_large and the same with mask_, in 0…1;
    `details["classes"]` has the AP of every class. `backbone` takes the place of `settings.weights`.
    """
    if settings.predict:
        distributed.check_alone("patchmix detect --predict")
        return predict(settings)
    if settings.data is None:
        raise ValueError("--data is missing; give a COCO folder, or --predict IMAGE to draw on images")
    device = resolve_device(settings.device)
    with distributed.process_group(device):
        if settings.eval_only:
            return _evaluate_trained(settings, settings.data, device)
        scratch = backbone is None and settings.weights == "scratch"
        out = settings.out if scratch or backbone is not None else results_folder(settings.weights, settings.out)
        if out is None:
            raise ValueError(f"--out is missing; {settings.weights} has no folder of its own for the results")
        if not scratch and settings.start is not None:
            raise ValueError("a detector brings its own encoder; give either an encoder or a detector to start from")
        if scratch:
            backbone = _random_encoder(settings.model, settings.seed)
        elif backbone is None:
            backbone = load_backbone(settings.weights, encoder=settings.encoder)
        return _train_and_evaluate(settings, settings.data, backbone, device, out)


def _train_and_evaluate(settings: Detect, data: Path, backbone: Backbone, device: torch.device, out: Path) -> Result:
    train = open_split(data, settings.train, images=settings.train_images, annotations=settings.train_annotations)
    val = open_split(data, settings.val, images=settings.val_images, annotations=settings.val_annotations)
    if train.categories != val.categories:
        raise ValueError(
            f"{train.name} and {val.name} have different classes ({_first_difference(train, val)}); "
            "both must list the same categories"
        )
    val.with_objects()  # raises where there are none: nothing to evaluate on
    train = train.with_objects()
    origin = None if settings.start is None else load_detector(settings.start)
    file = _new_detector(backbone, origin, train, settings)
    started = file.digest()
    record = {key: value for key, value in asdict(settings).items() if key not in _NOT_RECORDED}
    record |= {"scale": list(settings.scale)} | vars(file.shape)
    identity = {
        "settings": record,
        "detector": file.header(),
        "weights": started,
        "data": [train.fingerprint(), val.fingerprint()],
    }
    folder = work_folder(out, "detect", identity)
    assert folder is not None
    values, detections, trained = _train(file, train, val, settings, device=device, folder=folder, identity=identity)
    if distributed.is_main():
        trained.save(folder / FILE)
    name = encoder_name(backbone) if origin is None else f"detector {Path(settings.start or '').name}"
    weights = backbone.digest() if origin is None else started
    record = record | {"train": train.name, "train_images": len(train), "val": val.name}
    details = {
        "detector": str(folder / FILE),
        "best_box_ap": values["best_box_ap"],
        "best_box_ap_epoch": values["best_box_ap_epoch"],
        "best": "chosen on the validation images",
    }
    return _result(detections, val, settings, folder, out, name, weights, record, details)


def _evaluate_trained(settings: Detect, data: Path, device: torch.device) -> Result:
    file = load_detector(Path(settings.weights))
    val = open_split(data, settings.val, images=settings.val_images, annotations=settings.val_annotations)
    if val.categories != file.categories:
        raise ValueError(
            f"{val.name} has other classes than {settings.weights} was trained with "
            f"({_first_difference(val, file)}); evaluate on annotations with the same categories"
        )
    val.with_objects()
    detections = evaluate(file.detector().to(device), file, val, device, settings.workers)
    name, record = f"detector {Path(settings.weights).name}", vars(file.shape) | {"val": val.name, "trained": False}
    out, details = settings.out, {"detector": settings.weights}
    return _result(detections, val, settings, out, out, name, file.digest(), record, details)


def _result(
    detections: Detections,
    val: CocoImages,
    settings: Detect,
    folder: Path | None,
    out: Path | None,
    encoder: str,
    weights: str,
    record: dict[str, Any],
    details: dict[str, Any],
) -> Result:
    """The result, written to `out`; in `folder` the detections as COCO's result files, and some of them drawn."""
    entries, scores = detections
    origin = str(settings.data), val.fingerprint(), encoder, weights
    result = Result("detect", scores.metrics, len(val), *origin, record, details | {"classes": scores.classes})
    if folder is not None and out is not None and distributed.is_main():
        save_detections(folder, entries)
        save_pictures(folder / "pictures", val, entries, count=settings.pictures)
        append_result(out, result)
    distributed.barrier()
    return result


class DetectMethod(SupervisedMethod):
    """A detector that learns from images with objects. Its `encoder`, which is evaluated, is the whole detector."""

    encoder: Detector

    def __init__(self, detector: Detector) -> None:
        super().__init__(detector, ["box_ap", "mask_ap"])

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """batch: images (N, 3, S, S), visible sizes, targets. The loss is the sum of torchvision's five."""
        images, sizes, targets = batch
        losses = self.encoder(images, sizes, targets)
        assert isinstance(losses, dict)
        parts: dict[str, Tensor] = {_LOSSES[name]: value for name, value in losses.items()}
        return {"loss": torch.stack([value.float() for value in parts.values()]).sum(), **parts}


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


def evaluate(detector: Detector, file: DetectorFile, val: CocoImages, device: torch.device, workers: int) -> Detections:
    """Detections and their scores, the same on every process."""
    size, mean, std = file.shape.image_size, file.mean, file.std
    entries = detect_all(detector, val, image_size=size, mean=mean, std=std, device=device, workers=workers)
    # pycocotools takes minutes for COCO's validation images: one process runs it and sends its scores.
    text = json.dumps(vars(score(val, entries))) if distributed.is_main() else ""
    return entries, Scores(**json.loads(gather_text(text, device)))


def _train(
    file: DetectorFile,
    train: CocoImages,
    val: CocoImages,
    settings: Detect,
    *,
    device: torch.device,
    folder: Path,
    identity: dict[str, Any],
) -> tuple[dict[str, float], Detections, DetectorFile]:
    """Trains to the end, from the newest checkpoint in `folder` if there is one; last values, detections, weights."""
    options = {name: getattr(settings, name) for name in ("drop_path", "rois_per_image", "recompute")}
    detector = file.detector(**options)
    method = DetectMethod(detector).to(device).train()
    last: list[Detections] = []

    def prepare(batch: Batch) -> Any:
        pixels, sizes, targets = unpack(batch.views)
        return to_float(pixels, file.mean, file.std), sizes, targets

    def evaluator(detector: nn.Module) -> Iterator[tuple[str, float]]:
        assert isinstance(detector, Detector)
        if int(method.scores.steps) == 0:
            return  # COCO's 5,000 images take minutes, and an untrained detector finds nothing
        last[:] = [evaluate(detector, file, val, device, settings.workers)]
        yield from {"box_ap": 0.0, "mask_ap": 0.0, **last[0][1].metrics}.items()

    size, seed = file.shape.image_size, settings.seed
    values = fit(
        method,
        train,
        TrainingViews(train, size=size, scale=settings.scale, flip=settings.flip, mean=file.mean, seed=seed),
        prepare=prepare,
        evaluator=evaluator,
        optimizer=torch.optim.AdamW(layer_groups(detector, settings.layer_decay), lr=0.0),
        lr=settings.lr,
        warmup=lambda steps: min(settings.warmup_steps, steps // 10) / steps,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
        batch_size=settings.batch_size,
        accumulate=settings.accumulate,
        epochs=settings.epochs,
        evaluate_every=settings.evaluate_every,
        seed=seed,
        device=device,
        workers=settings.workers,
        folder=folder,
        identity=identity,
    )
    return values, last[0], replace(file, weights={key: value.cpu() for key, value in detector.state_dict().items()})


def _random_encoder(name: str, seed: int) -> Backbone:
    """For training without pre-training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = create_encoder(name)
    return Backbone(Architecture.of(name, encoder), encoder.state_dict(), origin={"random": True, "seed": seed})


def _new_detector(
    encoder: Backbone, origin: DetectorFile | None, training: CocoImages, settings: Detect
) -> DetectorFile:
    """The detector to begin with: the same weights for the same seed, on every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        classes = len(training.categories)
        if origin is None:
            shape = Shape(**{field.name: getattr(settings, field.name) for field in fields(Shape)})
            architecture, unit = encoder.architecture, max(32, shape.patch_size or encoder.architecture.patch_size)
            if shape.image_size % unit:
                raise ValueError(f"image_size is {shape.image_size}; it must be a multiple of {unit}")
            fresh = build_detector(architecture, classes, shape, encoder_weights=encoder.weights)
            return DetectorFile(
                architecture, shape, training.categories, fresh.state_dict(), encoder.mean, encoder.std, encoder.origin
            )
        if origin.categories == training.categories:
            return replace(origin, origin=origin.origin | {"continued": True})
        fresh = build_detector(origin.architecture, classes, origin.shape)
        weights = fresh.state_dict() | without_class_layers(origin.weights)
        return replace(origin, categories=training.categories, weights=weights)


def _first_difference(one: CocoImages | DetectorFile, other: CocoImages | DetectorFile) -> str:
    left, right = names_of(one.categories), names_of(other.categories)
    number = min(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))
    return f"id {number} is {left.get(number, 'missing')} and {right.get(number, 'missing')}"
