"""The three verbs: train a detector on a pre-trained ViT, judge a trained one, look at what it finds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patchmix import distributed
from patchmix.data.decode import EXTENSIONS, DecodeError, decode
from patchmix.device import resolve_device
from patchmix.evaluate.detection.coco import CocoImages, open_split
from patchmix.evaluate.detection.files import FILE, DetectorFile, load_detector
from patchmix.evaluate.detection.inference import as_entry, detect_batch
from patchmix.evaluate.detection.model import build_detector, scratch, without_class_layers
from patchmix.evaluate.detection.pictures import draw, save_pictures, write_picture
from patchmix.evaluate.detection.scoring import save_detections
from patchmix.evaluate.detection.settings import DetectSettings
from patchmix.evaluate.detection.training import DetectMethod, Outcome, judge, train_detector
from patchmix.evaluate.detection.views import FittedViews
from patchmix.evaluate.results import Result, append_result
from patchmix.evaluate.stored import encoder_name
from patchmix.evaluate.supervised import work_folder
from patchmix.files import write_text
from patchmix.interop.backbone import Backbone


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
    """Trains Mask R-CNN on an encoder with COCO's objects, and judges it by box and mask AP.

    backbone: the pre-trained encoder. None begins with a random one of the architecture `model`, or, with `start`,
        with a detector that was trained before (see `load_detector`): its shape (pyramid, image size, window, …) is
        kept and overrules the settings; where its classes are others, only the layers that name classes begin anew.
    data: a folder with train2017/, val2017/ and annotations/instances_{train,val}2017.json. `train` and `val` are
        other names in the same layout; `train_images`, `train_annotations`, `val_images` and `val_annotations` are
        paths below `data` in any layout.
    out: a folder; one line is added to its results.jsonl. In a folder detect-… there: settings.json, metrics.jsonl,
        checkpoints (the same call goes on where one was stopped), detector.safetensors, the detections of the last
        evaluation as COCO's result files, and `pictures` of them beside the truth.
    settings: see `DetectSettings`; the defaults are the paper's, for many GPUs (torchrun is all it takes).
    device, workers: as in `evaluate_knn`.
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
        testing.with_objects()  # raises where there are none: nothing to judge by
        if not settings.keep_empty:
            training = training.with_objects()
        encoder = backbone if backbone is not None else scratch(model, settings.seed)
        origin = None if start is None else load_detector(Path(start))
        file = _new_detector(encoder, origin, training, settings)
        started = file.digest()
        name = encoder_name(encoder) if origin is None else f"detector {Path(start or '').name}"
        told = settings.told() | vars(file.shape)
        identity = {
            "settings": told,
            "detector": json.dumps(file.header(), sort_keys=True),
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
        values, outcome = train_detector(
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
            metrics=outcome.scores.metrics,
            images=len(testing),
            data=str(data),
            fingerprint=testing.fingerprint(),
            encoder=name,
            weights=encoder.digest() if origin is None else started,
            settings=told | {"train": training.name, "train_images": len(training), "val": testing.name},
            details={
                "detector": str(folder / FILE),
                "best_box_ap": values["best_box_ap"],
                "best_box_ap_epoch": values["best_box_ap_epoch"],
                "best": "chosen on the validation images",
                "classes": outcome.scores.classes,
            },
        )
        if distributed.is_main():
            trained.save(folder / FILE)
            _leave(folder, out, testing, outcome, result, pictures)
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
    batch_size: int = 1,
    pictures: int = 8,
) -> Result:
    """Judges a trained detector without training it.

    detector: detector.safetensors, the folder that `detect` left, or a checkpoint of its training.
    data, val, val_images, val_annotations, device, workers: as in `detect`; the classes must be the detector's own.
    out: a folder for results.jsonl, the detections and `pictures`; None keeps nothing.
    Metrics: as in `detect`.
    """
    data = Path(data)
    target = resolve_device(device)
    with distributed.process_group(target):
        file = load_detector(Path(detector))
        testing = open_split(data, val, images=val_images, annotations=val_annotations)
        if testing.categories != file.categories:
            raise ValueError(
                f"{testing.name} has other classes than {detector} was trained with "
                f"({_first_difference(testing, file)}); evaluate on annotations with the same categories"
            )
        testing.with_objects()
        network = file.detector().to(target)
        outcome = judge(network, file, testing, device=target, batch_size=batch_size, workers=workers)
        result = Result(
            protocol="detect",
            metrics=outcome.scores.metrics,
            images=len(testing),
            data=str(data),
            fingerprint=testing.fingerprint(),
            encoder=f"detector {Path(detector).name}",
            weights=file.digest(),
            settings=vars(file.shape) | {"val": testing.name, "trained": False},
            details={"detector": str(detector), "classes": outcome.scores.classes},
        )
        if out is not None and distributed.is_main():
            _leave(Path(out), Path(out), testing, outcome, result, pictures)
        distributed.barrier()
        return result


@torch.no_grad()
def predict(
    detector: str | Path,
    images: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    threshold: float = 0.5,
    device: str = "auto",
) -> list[Path]:
    """Draws what a detector finds in images: for each a PNG file in `out`, and predictions.json with all of it.

    images: files, or folders whose images are taken, however deep.
    threshold: the lowest score that is drawn and listed.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold is {threshold}; it must be in [0, 1]")
    file, out = load_detector(Path(detector)), Path(out)
    target = resolve_device(device)
    network = file.detector().to(target)
    views = FittedViews(size=file.shape.image_size, mean=file.mean)
    names = {category.id: category.name for category in file.categories}
    listed, written = [], list[Path]()
    for path in _files(images):
        try:
            pixels = decode(path.read_bytes(), str(path))
        except OSError as error:
            raise ValueError(f"{path} can't be read ({error.strerror}); give image files or folders") from error
        except DecodeError as error:
            raise ValueError(f"{error}; give image files or folders") from error
        made = [torch.from_numpy(array) for array in views([pixels], epoch=0, indices=np.zeros(1, np.int64))]
        found = detect_batch(network, made, mean=file.mean, std=file.std, device=target)[0]
        kept = [as_entry(one, file.categories) for one in found if one["score"] >= threshold]
        written.append(_free_name(out, path.stem, written))
        write_picture(written[-1], draw(pixels, kept, names))
        listed.append(
            {
                "image": str(path),
                "picture": written[-1].name,
                "objects": [one | {"name": names[one["category_id"]]} for one in kept],
            }
        )
    write_text(out / "predictions.json", json.dumps(listed, indent=1, ensure_ascii=False) + "\n")
    return written


# ------------------------------------------------------------------------------------------------------------- pieces


def _new_detector(
    encoder: Backbone, origin: DetectorFile | None, training: CocoImages, settings: DetectSettings
) -> DetectorFile:
    """The detector to begin with: the same weights for the same seed, on every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        classes = len(training.categories)
        if origin is None:
            shape = settings.shape()
            fresh = build_detector(encoder.architecture, classes, shape, encoder_weights=encoder.weights)
            weights, architecture = fresh.state_dict(), encoder.architecture
            side, patch = shape.image_size, shape.patch_size or architecture.patch_size
            if side % patch:
                raise ValueError(f"image_size is {side}; it must be a multiple of the patch size {patch}")
            return DetectorFile(
                architecture, shape, training.categories, weights, encoder.mean, encoder.std, encoder.origin
            )
        if origin.categories == training.categories:
            return replace(origin, origin=origin.origin | {"continued": True})
        fresh = build_detector(origin.architecture, classes, origin.shape)
        weights = fresh.state_dict() | without_class_layers(origin.weights)
        return replace(origin, categories=training.categories, weights=weights)


def _leave(folder: Path, out: Path, testing: CocoImages, outcome: Outcome, result: Result, pictures: int) -> None:
    save_detections(folder, outcome.entries)
    save_pictures(folder / "pictures", testing, outcome.entries, count=pictures)
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


def _files(images: str | Path | Sequence[str | Path]) -> list[Path]:
    given: Sequence[Any] = [images] if isinstance(images, str | Path) else images
    files: list[Path] = []
    for path in map(Path, given):
        if path.is_dir():
            files += sorted(one for one in path.rglob("*") if one.suffix.lower() in EXTENSIONS)
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(f"{path} does not exist; give image files or folders")
    if not files:
        raise ValueError("there are no images to look at; give image files, or a folder that holds some")
    return files


def _free_name(out: Path, stem: str, taken: Sequence[Path]) -> Path:
    """Two images of one name, from two folders, get two pictures."""
    path, number = out / f"{stem}.png", 1
    while path in taken:
        number += 1
        path = out / f"{stem}-{number}.png"
    return path
