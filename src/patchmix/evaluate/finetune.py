"""Fine-tuning of the whole encoder with labels: the paper's third protocol, made of timm's own pieces.

timm draws from the global generators of Python, NumPy and torch. Here they are seeded for each image from
(seed, epoch, index) and restored afterwards, so that an image's augmentation depends neither on the worker that makes
it nor on where a run was resumed. Shapes: N images, K classes.
"""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import create_transform
from timm.models.vision_transformer import VisionTransformer
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torchvision.transforms import Compose, RandomCrop, Resize

from patchmix import distributed
from patchmix.data.decode import Pixels, to_picture
from patchmix.data.loader import Batch
from patchmix.data.randomness import hash_words
from patchmix.data.views import Transform, View, Views, as_channels, usual_resize
from patchmix.evaluate import protocol
from patchmix.evaluate.features import extract
from patchmix.evaluate.labeled import Part
from patchmix.evaluate.results import Result
from patchmix.interop.backbone import Backbone, save_weights
from patchmix.interop.exporting import timm_arguments
from patchmix.settings import Finetune
from patchmix.train.optimizer import layer_groups

CROP_AREA = (0.08, 1.0)
_SMALL_IMAGE = 32
_PIXELS, _ERASING = 0, 1  # streams of random numbers


def finetune(settings: Finetune, backbone: Backbone | None = None) -> Result:
    """Trains the encoder and a classifier on the class token with labels, and tests both them and their average.

    Writes model.safetensors and model_ema.safetensors: plain timm state dicts with the classifier; `details["timm"]`
    are the arguments of `timm.create_model` that load them. Metrics: "top1" and "top5" after the last epoch, those of
    the moving average with "ema_", and "best_…": the best epoch's as chosen on the test images, which is optimistic.
    """
    with protocol.open_task(settings, backbone, needs_test=True, many_passes=True) as task:
        tasks = [task]
        if protocol.wants_few_labels(settings):
            parts = [Part(task.data.train, positions) for positions in task.draws()]
            tasks = [replace(task, data=replace(task.data, train=part)) for part in parts]
        found, images, record, details = zip(*(_train_and_test(settings, each) for each in tasks), strict=True)
        return task.result("finetune", found, images[0], record[0], details[0] if len(tasks) == 1 else {})


def _train_and_test(
    settings: Finetune, task: protocol.Task
) -> tuple[dict[str, float], int, dict[str, Any], dict[str, Any]]:
    """Metrics, test images, settings and details."""
    shape, data = task.backbone.architecture, task.data
    batch_size = _batch_size(settings, shape.image_size, len(data.train))
    record = protocol.recorded(settings) | {
        "batch_size": batch_size,
        "lr": (settings.base_lr or usual_base_lr(shape.dim)) * batch_size / 256,
        "warmup_epochs": min(settings.warmup_epochs, 0.1 * settings.epochs),
        "image_size": shape.image_size,
        "resize": settings.resize or usual_resize(shape.image_size),
    }
    if shape.in_chans not in (1, 3):
        record["rand_augment"] = None  # its colors are for RGB
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = classifier(task.backbone, data.classes, drop_path=settings.drop_path)
    method = FinetuneMethod(model, data.classes, settings).to(task.device).train()
    last, folder = _train(method, task, record)
    details: dict[str, Any] = {"best_epoch": last["best_top1_epoch"], "best_ema_epoch": last["best_ema_top1_epoch"]}
    details["best"] = "chosen on the test images"
    if folder is not None:
        name, arguments = timm_arguments(shape)
        details["timm"] = {"model_name": name, **arguments, "num_classes": data.classes}
        details["model"] = str(folder / "model.safetensors")
        if distributed.is_main():
            backbone = replace(task.backbone, origin=task.backbone.origin | {"finetuned": str(settings.data)})
            described = {"timm": details["timm"], "mean": backbone.mean, "std": backbone.std}
            described["classes"] = data.train.classes
            header = backbone.metadata() | {"patchmix-classifier": json.dumps(described)}
            save_weights(method.encoder.state_dict(), folder / "model.safetensors", header)
            save_weights(method.ema.module.state_dict(), folder / "model_ema.safetensors", header)
    metrics = {name: value for name, value in last.items() if not name.endswith("_epoch")}
    padded = shape.image_size <= _SMALL_IMAGE and record["rand_augment"] is not None
    crop = "padded by 4" if padded else list(CROP_AREA)
    record |= {"optimizer": "AdamW", "crop": crop, "test": data.tested_on}
    return metrics, method.tested, record, details


def _batch_size(settings: Finetune, image_size: int, images: int) -> int:
    """Mixup pairs images, so every process needs an even number."""
    multiple, batch_size = 2 * distributed.world_size(), settings.batch_size
    if batch_size is None:
        return protocol.usual_batch(image_size, images, multiple=multiple)
    if batch_size % multiple:
        raise ValueError(
            f"batch size {batch_size} must be a multiple of {multiple} (Mixup takes pairs in each of {multiple // 2} "
            f"processes); use {max(1, batch_size // multiple) * multiple}"
        )
    return batch_size


def usual_base_lr(dim: int) -> float:
    """The authors' learning rate for ViT-T, and for ViT-S and -B."""
    return 1e-3 if dim <= 192 else 5e-4


def classifier(backbone: Backbone, classes: int, *, drop_path: float = 0.0) -> VisionTransformer:
    """The encoder with a new linear layer on its class token."""
    model = backbone.encoder(drop_path=drop_path)
    model.reset_classifier(classes)
    assert isinstance(model.head, nn.Linear)
    nn.init.trunc_normal_(model.head.weight, std=0.01)
    nn.init.zeros_(model.head.bias)
    return model


class FinetuneMethod(protocol.SupervisedMethod):
    """A classifier that learns from mixed images, and its moving average."""

    encoder: VisionTransformer
    tracked = ("top1", "ema_top1")

    def __init__(self, model: VisionTransformer, classes: int, settings: Finetune) -> None:
        super().__init__(model)
        # With warm-up the average is of use in short trainings, too.
        self.ema = ModelEmaV3(model, decay=settings.ema_decay, use_warmup=True).requires_grad_(False)
        self.tested = 0  # images of the last evaluation
        self.mixup = Mixup(  # type: ignore[no-untyped-call]
            mixup_alpha=settings.mixup,
            cutmix_alpha=settings.cutmix,
            prob=1.0 if settings.mixup or settings.cutmix else 0.0,  # labels are smoothed in any case
            label_smoothing=settings.label_smoothing,
            num_classes=classes,
        )

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """batch: images (N, C, H, W), which are changed, and labels (N,)."""
        with seeded_globally(int(torch.randint(2**62, (), generator=self.generator))):
            images, targets = self.mixup(*batch)  # targets: (N, K)
        return {"loss": F.cross_entropy(self.encoder(images).float(), targets)}

    def after_step(self, progress: float) -> None:
        super().after_step(progress)
        self.ema.update(self.encoder, step=self.steps)


def _train(method: FinetuneMethod, task: protocol.Task, record: dict[str, Any]) -> tuple[dict[str, float], Path | None]:
    size, seed, test = record["image_size"], record["seed"], task.data.test
    erase = Erasing(record["erasing"], seed=seed)
    how: dict[str, Any] = {**task.extractor().how(), "device": task.device, "workers": task.settings.workers}
    assert test is not None
    augmentation: Transform = Views([View(size, CROP_AREA, jitter=0.0, gray=0.0, blur=0.0)], seed=seed)
    if record["rand_augment"] is not None:
        augmentation = TimmAugmentation(size, rand_augment=record["rand_augment"], mean=task.backbone.mean, seed=seed)

    def prepare(batch: Batch) -> tuple[Tensor, Tensor]:
        images, labels = task.prepare(batch)
        images = erase(images, epoch=batch.epoch, indices=batch.indices)
        return as_channels(images, task.backbone.architecture.in_chans), labels

    def evaluator(encoder: nn.Module) -> Iterator[tuple[str, float]]:
        for prefix, network in (("", encoder), ("ema_", method.ema.module)):
            logits = extract(network, test, **how)  # the output of a classifier is its logits
            assert logits.labels is not None
            yield from protocol.top_accuracies(logits.vectors, logits.labels, prefix).items()
        method.tested = len(logits.vectors)

    return task.fit(
        "finetune",
        method,
        augmentation,
        record,
        prepare=prepare,
        evaluator=evaluator,
        optimizer=torch.optim.AdamW(layer_groups(method.encoder, record["layer_decay"]), lr=0.0),
        warmup=lambda steps: record["warmup_epochs"] / record["epochs"],
    )


class TimmAugmentation:
    """A loader's transform: random resized crop, flip and RandAugment, all by timm.

    Images of up to 32 px are padded by 4 and cropped instead, as the authors do on CIFAR.
    """

    def __init__(self, size: int, *, rand_augment: str, mean: Sequence[float], seed: int) -> None:
        """`rand_augment` in timm's notation; `mean` is the color of what a rotation uncovers."""
        self.size = size
        self.seed = seed
        self._transform = create_transform(
            size,
            is_training=True,
            scale=CROP_AREA,
            auto_augment=rand_augment,
            interpolation="bicubic",
            mean=tuple(mean),
            use_prefetcher=True,  # uint8 comes out; normalization and erasing follow on the device
        )
        if size <= _SMALL_IMAGE:
            self._transform.transforms[0] = Compose([Resize((size, size)), RandomCrop(size, padding=4)])
        for step in self._transform.transforms:
            for operation in getattr(step, "ops", ()):
                if operation.name.startswith("Posterize"):
                    operation.aug_fn = _posterize

    def __call__(
        self, images: Sequence[Pixels], *, epoch: int, indices: npt.NDArray[np.int64]
    ) -> list[npt.NDArray[np.uint8]]:
        out = np.empty((len(images), self.size, self.size, 3), np.uint8)
        words = hash_words(self.seed, epoch, indices, _PIXELS).tolist()
        for image, word, place in zip(images, words, out, strict=True):
            with seeded_globally(word):
                planes: Tensor = self._transform(Image.fromarray(to_picture(image)))  # (3, h, w)
            place[:] = planes.numpy().transpose(1, 2, 0)
        return [out]


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """timm asks for 0 bits at its largest magnitude, which Pillow refuses since version 13; before, that was black."""
    return image if bits >= 8 else ImageOps.posterize(image, max(1, bits))


class Erasing:
    """timm's random erasing of a batch of normalized images: a rectangle of noise in some of them."""

    def __init__(self, probability: float, *, seed: int) -> None:
        self.seed = seed
        # Noise is drawn on the CPU, wherever the images are: the same on every device.
        self._erase = RandomErasing(probability, mode="pixel", max_count=1, device="cpu")  # type: ignore[no-untyped-call]

    def __call__(self, images: Tensor, *, epoch: int, indices: Tensor) -> Tensor:
        """images (N, C, H, W), which are not changed; indices on the CPU."""
        words = hash_words(self.seed, epoch, indices.numpy(), _ERASING).tolist()
        erased: dict[int, Tensor] = {}
        canvas = torch.full(images.shape[1:], torch.nan)
        for n, word in enumerate(words):
            with seeded_globally(word):
                self._erase(canvas)
            if not bool(canvas.isnan().all()):
                erased[n], canvas = canvas, torch.full_like(canvas, torch.nan)
        if not erased:
            return images
        rows = torch.tensor(list(erased)).to(images.device, non_blocking=True)
        noise = torch.stack(list(erased.values())).to(images.device, images.dtype, non_blocking=True)
        return images.index_copy(0, rows, torch.where(noise.isnan(), images[rows], noise))


@contextmanager
def seeded_globally(word: int) -> Iterator[None]:
    """Seeds Python's, NumPy's and torch's CPU generators, and leaves them as they were.

    Not the GPUs': nothing that timm does here draws from those.
    """
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002
    random.seed(word)
    np.random.seed(word % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(word % 2**63)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.default_generator.set_state(states[2])
