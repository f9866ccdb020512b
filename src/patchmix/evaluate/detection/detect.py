"""`patchmix detect`: Mask R-CNN is trained on a pre-trained ViT with COCO's objects, evaluated, and drawn on images."""

import colorsys
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image
from pycocotools import mask as rle
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import paste_masks_in_image

from patchmix import distributed
from patchmix.data.decode import DecodeError, Pixels, decode
from patchmix.data.folder import list_images
from patchmix.data.loader import Batch
from patchmix.data.views import to_float
from patchmix.device import autocast_dtype, resolve_device
from patchmix.evaluate import protocol
from patchmix.evaluate.detection.coco import CocoImages, Entry, mask_of, open_split, save_detections, score
from patchmix.evaluate.detection.model import FILE, Detector, DetectorFile, Shape, build_detector, load_detector
from patchmix.evaluate.detection.views import TrainingViews, fitted_views, unpack
from patchmix.evaluate.results import Result, append_result
from patchmix.files import write_text, writing
from patchmix.interop.backbone import Architecture, Backbone
from patchmix.interop.loading import load_backbone
from patchmix.nn.vit import create_encoder
from patchmix.progress import progress_bar
from patchmix.settings import Detect
from patchmix.train.optimizer import groups_with_head

Scored = tuple[list[Entry], protocol.Values, list[protocol.Values]]  # detections, metrics, a row for each class
_CLASS_LAYERS = ("roi_heads.box_predictor.", "roi_heads.mask_predictor.mask_fcn_logits.")
_GOLDEN = 0.618033988749895  # steps of the golden ratio keep neighboring hues apart


def detect(settings: Detect, backbone: Backbone | None = None) -> Result | list[Path]:
    """Trains Mask R-CNN on an encoder with COCO's objects, and evaluates it by box and mask AP.

    With `eval_only` a trained detector is evaluated, with `predict` its detections are drawn. The shape (image size,
    window, …) of a detector to `start` from overrules the settings. Metrics: box_ap, box_ap50, box_ap75, box_ap_small,
    … and the same with mask_, in 0…1. `backbone` takes the place of `settings.weights`.
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
        out = settings.out if scratch or backbone else protocol.results_folder(settings.weights, settings.out)
        if out is None:
            raise ValueError(f"--out is missing; {settings.weights} has no folder of its own for the results")
        if not scratch and settings.start is not None:
            raise ValueError("a detector brings its own encoder; give either an encoder or a detector to start from")
        if not scratch and backbone is None:
            backbone = load_backbone(settings.weights, encoder=settings.encoder)
        if backbone is not None and (in_chans := backbone.architecture.in_chans) not in (1, 3):
            raise ValueError(f"detect reads RGB images, but the encoder takes {in_chans} channels; use segment")
        return _train_and_evaluate(settings, settings.data, backbone, device, out)


def _train_and_evaluate(
    settings: Detect, data: Path, backbone: Backbone | None, device: torch.device, out: Path
) -> Result:
    train, val = open_split(data, settings.train).with_objects(), open_split(data, settings.val)
    val.with_objects()  # raises a ValueError where there is nothing to find
    _check_classes(train, val.categories, val.name)
    file, name, weights = _new_detector(backbone, train, settings)
    settings = replace(settings, **vars(file.shape))  # of a detector to start from
    record = protocol.recorded(settings) | {"scale": list(settings.scale)}
    identity = {"settings": record, "detector": file.header(), "weights": file.digest()}
    detector = file.detector(**_chosen(settings, "drop_path", "rois_per_image", "recompute"))
    method = DetectMethod(detector).to(device).train()
    last: list[Scored] = []

    def prepare(batch: Batch) -> Any:
        pixels, sizes, targets = unpack(batch.views)
        return to_float(pixels, file.mean, file.std), sizes, targets

    def evaluator(encoder: nn.Module) -> Iterator[tuple[str, float]]:
        last[:] = [evaluate(detector, file, val, device, settings.workers)]
        yield from {"box_ap": 0.0, "mask_ap": 0.0, **last[0][1]}.items()

    groups = groups_with_head(detector, detector.backbone.tokens.encoder, settings.layer_decay)
    values, folder = protocol.fit(
        "detect",
        method,
        train,
        TrainingViews(train, size=file.shape.image_size, mean=file.mean, **_chosen(settings, "scale", "flip", "seed")),
        prepare=prepare,
        evaluator=evaluator,
        optimizer=torch.optim.AdamW(groups, lr=0.0),
        out=out,
        identity=identity | {"data": [train.fingerprint(), val.fingerprint()]},
        device=device,
        workers=settings.workers,
        warmup=lambda steps: min(settings.warmup_steps, steps // 10) / steps,
        evaluate_every=settings.evaluate_every,
    )
    assert folder is not None
    if distributed.is_main():
        replace(file, weights=detector.state_dict()).save(folder / FILE)
    record = record | {"train": train.name, "train_images": len(train), "val": val.name}
    details = {"detector": str(folder / FILE)} | {key: values[key] for key in ("best_box_ap", "best_box_ap_epoch")}
    details["best"] = "chosen on the validation images"
    return _result(settings, val, last[0], (name, weights, record), details, folder, out)


def _evaluate_trained(settings: Detect, data: Path, device: torch.device) -> Result:
    file, val = load_detector(Path(settings.weights)), open_split(data, settings.val)
    out = protocol.results_folder(settings.weights, settings.out)
    folder = settings.out or (out and out / "evaluated")  # apart from the detections of the training
    val.with_objects()
    _check_classes(val, file.categories, settings.weights)
    detections = evaluate(file.detector().to(device), file, val, device, settings.workers)
    record = vars(file.shape) | {"val": val.name, "eval_only": True}
    origin = f"detector {Path(settings.weights).name}", file.digest(), record
    return _result(settings, val, detections, origin, {"detector": settings.weights}, folder, out)


def evaluate(detector: Detector, file: DetectorFile, val: CocoImages, device: torch.device, workers: int) -> Scored:
    """The detections in every image of `val`, in its order, and their scores; the same on every process."""
    view = partial(fitted_views, size=file.shape.image_size, mean=file.mean)
    detect = partial(detect_one, detector, file, device)
    found = protocol.map_images(val, view, detect, "detection", device=device, workers=workers)
    numbers = (val.entry(index)["id"] for index in range(len(val)))
    entries = [entry | {"image_id": number} for number, some in zip(numbers, found, strict=True) for entry in some]
    # pycocotools takes minutes for COCO's validation images: one process runs it and sends its scores.
    metrics, classes = distributed.gather_json(score(val, entries) if distributed.is_main() else None, device)[0]
    return entries, metrics, classes


def _result(
    settings: Detect,
    val: CocoImages,
    scored: Scored,
    origin: tuple[str, str, protocol.Values],
    details: protocol.Values,
    folder: Path | None,
    out: Path | None,
) -> Result:
    """The result, written to `out`; in `folder` the detections as COCO's result files, and some of them drawn.

    origin: name and digest of the encoder or detector, and the settings that are recorded.
    """
    entries, metrics, classes = scored
    details |= {"classes": classes}
    options = protocol.changed(settings)
    if settings.eval_only:  # the others are the detector's
        options = {name: value for name, value in options.items() if name == "val"}
    result = Result(
        "detect", metrics, len(val), str(settings.data), val.fingerprint(), *origin, details, changed=options
    )
    if folder is not None and out is not None and distributed.is_main():
        save_detections(folder, entries)
        save_pictures(folder / "pictures", val, entries, count=settings.pictures)
        append_result(out, result)
    distributed.barrier()
    return result


class DetectMethod(protocol.SupervisedMethod):
    """A detector that learns from images with objects. Its `encoder`, which is evaluated, is the whole detector."""

    encoder: Detector
    tracked = ("box_ap", "mask_ap")

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """batch: images (N, 3, S, S), visible sizes, targets. The loss is the sum of torchvision's five."""
        images, sizes, targets = batch
        losses = self.encoder(images, sizes, targets)
        assert isinstance(losses, dict)
        total = torch.stack([value.float() for value in losses.values()]).sum()
        return {"loss": total} | {name.removeprefix("loss_"): value for name, value in losses.items()}


def _chosen(settings: Detect, *names: str) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in names}


def _new_detector(backbone: Backbone | None, train: CocoImages, settings: Detect) -> tuple[DetectorFile, str, str]:
    """The detector to begin with, the same on every process, and the name and digest of what it begins with."""
    classes = len(train.categories)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        if settings.start is not None:
            file = load_detector(settings.start)
            if file.categories != train.categories:
                weights = build_detector(file.architecture, classes, file.shape).state_dict()
                weights |= {name: w for name, w in file.weights.items() if not name.startswith(_CLASS_LAYERS)}
                file = replace(file, categories=train.categories, weights=weights)
            return file, f"detector {settings.start.name}", file.digest()
        if backbone is None:
            encoder, origin = create_encoder(settings.model), {"random": True, "seed": settings.seed}
            backbone = Backbone(Architecture.of(settings.model, encoder), encoder.state_dict(), origin=origin)
        torch.manual_seed(settings.seed)
        architecture = backbone.architecture
        shape = Shape(**_chosen(settings, *(field.name for field in fields(Shape))))
        unit = max(32, shape.patch_size or architecture.patch_size)
        if shape.image_size % unit:
            raise ValueError(f"image_size is {shape.image_size}; it must be a multiple of {unit}")
        weights = build_detector(architecture, classes, shape, encoder_weights=backbone.weights).state_dict()
    normalization = backbone.mean, backbone.std
    file = DetectorFile(architecture, shape, train.categories, weights, *normalization, backbone.origin)
    return file, protocol.encoder_name(backbone), backbone.digest()


def _check_classes(source: CocoImages, wanted: dict[int, str], whose: str) -> None:
    found = source.categories
    if differ := [key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key)]:
        first = min(differ)
        pair = f"id {first} is {found.get(first, 'missing')} and {wanted.get(first, 'missing')}"
        raise ValueError(f"{source.name} has other classes than {whose} ({pair}); both must have the same categories")


@torch.no_grad()
def detect_one(detector: Detector, file: DetectorFile, device: torch.device, views: Sequence[Tensor]) -> list[Entry]:
    """What `fitted_views` made of an image → its detections, best first, in the original image's pixels."""
    pixels, ((seen_height, seen_width, height, width),) = views[0], views[1].tolist()
    autocast, categories = autocast_dtype(device), list(file.categories)
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        (detection,) = detector(to_float(pixels.to(device), file.mean, file.std), [(seen_height, seen_width)])
    boxes = detection["boxes"].float().cpu()
    boxes = boxes / torch.tensor([seen_width, seen_height] * 2) * torch.tensor([width, height] * 2)
    columns = boxes, detection["masks"].float().cpu(), detection["labels"].tolist(), detection["scores"].tolist()
    entries = []
    for box, mask, label, confidence in zip(*columns, strict=True):
        # One mask at a time: a hundred masks of a large photo would take gigabytes.
        pasted = paste_masks_in_image(mask[None], box[None], (height, width))[0, 0] > 0.5
        coded = rle.encode(np.asfortranarray(pasted.numpy().astype(np.uint8)))
        x0, y0, x1, y1 = box.tolist()
        shape = {"size": [height, width], "counts": coded["counts"].decode()}
        bbox = [round(value, 3) for value in (x0, y0, x1 - x0, y1 - y0)]
        entry = {"category_id": categories[label - 1], "bbox": bbox, "score": round(confidence, 7)}
        entries.append(entry | {"segmentation": shape})
    return entries


def predict(settings: Detect) -> list[Path]:
    """Draws detections on images: for each image a PNG file, and predictions.json with all detections.

    They are written to `out`, or else to predictions/ in the run's folder or, for a file, in the current one.
    """
    file = load_detector(Path(settings.weights))
    out = settings.out or (protocol.results_folder(settings.weights, None) or Path()) / "predictions"
    device = resolve_device(settings.device)
    detector = file.detector().to(device)
    listed, written, paths = [], list[Path](), list[Path]()
    for path in settings.predict:  # files, and all images in folders
        paths += [path / os.fsdecode(name) for name in list_images(path)] if path.is_dir() else [path]
    if not paths:
        raise ValueError("there are no images to show; give image files, or a folder that holds some")
    taken = {path.resolve() for path in paths}
    with progress_bar("detection", len(paths)) as advance:
        for path in paths:
            try:
                pixels = decode(path.read_bytes(), str(path))
            except (OSError, DecodeError) as error:
                raise ValueError(f"{error}; give image files or folders") from error
            made = fitted_views([pixels], size=file.shape.image_size, mean=file.mean)
            found = detect_one(detector, file, device, [torch.from_numpy(array) for array in made])
            kept = [one for one in found if one["score"] >= settings.threshold]
            picture, number = out / f"{path.stem}.png", 1
            while picture.resolve() in taken:  # the image itself, or one of the same name in another folder
                number += 1
                picture = out / f"{path.stem}-{number}.png"
            write_picture(picture, draw(pixels, kept, file.categories))
            taken.add(picture.resolve())
            written.append(picture)
            objects = [one | {"name": file.categories[one["category_id"]]} for one in kept]
            listed.append({"image": str(path), "picture": picture.name, "objects": objects})
            advance(1)
    write_text(out / "predictions.json", json.dumps(listed, indent=1, ensure_ascii=False) + "\n")
    return written


def draw(image: Pixels, entries: Sequence[Entry], names: Mapping[int, str]) -> Pixels:
    """uint8 (H, W, 3) with each entry's mask tinted, its box outlined and its class (and score) written; a new array.

    Entries are annotations or detections of COCO: category_id, bbox, segmentation, perhaps a score.
    """
    height, width = image.shape[:2]
    canvas = image.copy()
    thickness = max(1, round(max(height, width) / 400))
    for entry in entries:
        inside = mask_of(entry, height, width).astype(bool)
        canvas[inside] = (0.55 * canvas[inside] + 0.45 * np.array(color(entry["category_id"]))).astype(np.uint8)
    for entry in entries:
        tint = color(entry["category_id"])
        x, y, w, h = entry["bbox"]
        cv2.rectangle(canvas, (round(x), round(y)), (round(x + w), round(y + h)), tint, thickness)
        text = names[entry["category_id"]] + (f" {entry['score']:.2f}" if "score" in entry else "")
        _write(canvas, text, round(x), round(y), tint)
    return canvas


def save_pictures(folder: Path, source: CocoImages, entries: Sequence[Entry], *, count: int) -> None:
    """The first `count` images of `source` as PNG files: the truth, next to it detections with scores from 0.5."""
    for index in range(min(count, len(source))):
        entry, image = source.entry(index), source.load(index)
        found = [one for one in entries if one["image_id"] == entry["id"] and one["score"] >= 0.5]
        truth, detected = (draw(image, each, source.categories) for each in (source.annotations(index), found))
        gap = np.full((len(image), 8, 3), 255, np.uint8)
        picture = np.concatenate([truth, gap, detected], axis=1)
        write_picture(folder / "-".join(Path(entry["file_name"]).with_suffix(".png").parts), picture)


def write_picture(path: Path, pixels: Pixels) -> None:
    """uint8 RGB → a PNG file."""
    with writing(path) as file:
        Image.fromarray(pixels).save(file, "PNG")


def color(category: int) -> tuple[int, int, int]:
    """RGB of a class, always the same."""
    red, green, blue = colorsys.hsv_to_rgb(category * _GOLDEN % 1.0, 0.85, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def _write(canvas: Pixels, text: str, x: int, y: int, tint: tuple[int, int, int]) -> None:
    size = max(canvas.shape[:2]) / 1300 + 0.2
    (width, height), below = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, size, 1)
    x, y = max(0, min(x, canvas.shape[1] - width)), max(height + below, y)
    cv2.rectangle(canvas, (x, y - height - below), (x + width, y), tint, cv2.FILLED)
    cv2.putText(canvas, text, (x, y - below // 2), cv2.FONT_HERSHEY_SIMPLEX, size, (0, 0, 0), 1, cv2.LINE_AA)
