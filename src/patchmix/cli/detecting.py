"""patchmix detect."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from patchmix.cli.arguments import Count, File, Number, Set, Text, Which

if TYPE_CHECKING:
    from patchmix.evaluate.detection import DetectSettings


def detect(
    run: Positional[Annotated[str, arg(metavar="RUN")]],
    /,
    data: File = None,
    out: File = None,
    epochs: Number = None,
    batch_size: Count = None,
    image_size: Count = None,
    model: str = "vit_base_patch16_224",
    start: File = None,
    eval_only: bool = False,
    predict: tuple[Path, ...] = (),
    threshold: float = 0.5,
    train: str = "train2017",
    val: str = "val2017",
    train_images: Text = None,
    train_annotations: Text = None,
    val_images: Text = None,
    val_annotations: Text = None,
    encoder: Which = None,
    device: str = "auto",
    workers: int = 2,
    pictures: int = 8,
    settings: Set = (),
) -> None:
    """Judge an encoder by Mask R-CNN on COCO: object detection and instance segmentation.

    Args:
        run: An encoder as for knn, or `scratch`. With --eval-only or --predict: a detector, or the folder of one.
        data: A folder with train2017/, val2017/ and annotations/instances_*.json.
        out: Where results and the detector go; by default the run's folder.
        epochs: 100 if not given.
        batch_size: Images per step, 64 if not given.
        image_size: Side of the padded input, 1024 if not given.
        model: The architecture for `scratch`.
        start: A detector to go on from, with RUN = scratch.
        eval_only: Judge a detector without training.
        predict: Images, or folders of them, to draw boxes and masks on.
        threshold: The lowest score that is drawn.
        train: Another name than train2017 in the same layout.
        val: Another name than val2017 in the same layout.
        train_images: A folder below DATA, in any layout.
        train_annotations: A json below DATA, in any layout.
        val_images: A folder below DATA, in any layout.
        val_annotations: A json below DATA, in any layout.
        device: auto, cpu or cuda.
        workers: Processes that prepare images.
        pictures: How many predictions to draw beside the truth.
    """
    from patchmix import distributed
    from patchmix.cli.judging import results_folder
    from patchmix.evaluate import detection
    from patchmix.interop.loading import load_backbone

    if predict:
        distributed.check_alone("patchmix detect --predict")
        drawn = out or Path("predictions")
        for path in detection.predict(run, predict, drawn, threshold=threshold, device=device):
            print(f"wrote {path}")
        return
    if data is None:
        raise ValueError("--data is missing; give a COCO folder, or --predict IMAGE to draw on images")
    if eval_only:
        result = detection.evaluate_only(
            run,
            data,
            out,
            val=val,
            val_images=val_images,
            val_annotations=val_annotations,
            device=device,
            workers=workers,
            pictures=pictures,
        )
    else:
        folder = out if run == "scratch" else results_folder(run, out)
        if folder is None:
            raise ValueError(f"--out is missing; {run} has no folder of its own for the results")
        common = {"epochs": epochs, "batch_size": batch_size, "image_size": image_size}
        result = detection.detect(
            None if run == "scratch" else load_backbone(run, encoder=encoder),
            data,
            folder,
            _settings({key: value for key, value in common.items() if value is not None}, settings),
            model=model,
            start=start,
            train=train,
            val=val,
            train_images=train_images,
            train_annotations=train_annotations,
            val_images=val_images,
            val_annotations=val_annotations,
            device=device,
            workers=workers,
            pictures=pictures,
        )
    if distributed.is_main():
        detection.print_detection(result)


def _settings(common: dict[str, Any], overrides: tuple[str, ...]) -> DetectSettings:
    from patchmix.config import check_known, coerce, parse_value
    from patchmix.evaluate.detection import DetectSettings

    hints = typing.get_type_hints(DetectSettings)
    values = dict(common)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"--set {override!r} has no '='; write --set key=value, e.g. window=0")
        check_known(key, hints, "setting of detect:")
        values[key] = coerce(parse_value(text), hints[key], key)
    return DetectSettings(**values)
