"""Semantic segmentation: a linear layer on a frozen encoder's patch tokens, or all of it fine-tuned.

Shapes: N images of H × W px in h × w patches, D = the encoder's width × the number of blocks, K classes.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchmix import distributed
from patchmix.data import pixels as operations
from patchmix.data.contract import Indices
from patchmix.data.decode import Pixels, to_picture
from patchmix.data.randomness import uniforms
from patchmix.data.views import DRAWS, CenterCrop, View, as_channels, draw_parameters, render, to_float
from patchmix.device import autocast_dtype
from patchmix.evaluate import sweep
from patchmix.evaluate.detection.detect import color, write_picture
from patchmix.evaluate.labeled import Subset
from patchmix.evaluate.masks import IGNORED, Mask, Masked, in_threads
from patchmix.evaluate.protocol import SupervisedMethod, Task, changed, map_images, open_task, recorded
from patchmix.evaluate.results import Result
from patchmix.interop.backbone import Backbone
from patchmix.nn.heads import BatchNorm
from patchmix.nn.vit import check_blocks, patch_size_of, patch_tokens
from patchmix.settings import Segment
from patchmix.train.optimizer import groups_with_head

EPOCHS = 20.0
CROP_AREA = (0.25, 1.0)
WARMUP = 0.05  # of the training
DRAWN = 1000  # bootstrap samples
FAST = sweep.Candidate(0.3, 1e-4)  # patches are so many that there is nothing to choose
FAST_STEPS = 2000
_LOGITS = 1 << 24  # held at a time: 64 MB
_PANEL = 256  # px: pictures are at least this high


def segment(settings: Segment, backbone: Backbone | None = None) -> Result:
    """Trains a linear layer on the patch tokens of some blocks, and tests it on whole images of any size.

    Tokens are normalized by the encoder's last norm and a batch norm, as in DINOv2's evaluation; logits are enlarged
    to the mask's own size. Metrics: "miou", over the classes that occur or are predicted, and "pixel_accuracy";
    `details["classes"]` has the IoU of each class. `backbone` takes the place of `settings.weights`.
    """
    fast = settings.protocol == "fast"
    of_training = {"finetune", "blocks", "image_size", "batch_size", "lr", "weight_decay", "layer_decay"}
    if fast and (unused := of_training & changed(settings).keys()):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(unused))
        raise ValueError(f"the fast protocol learns from stored tokens of the last block; leave out {flags}")
    with open_task(settings, backbone) as task:
        data = task.data
        if fast:
            return segment_fast_of(task)
        train, test, encoder = data.train, data.test, task.backbone.encoder(any_image_size=True)
        assert isinstance(train, Masked) and isinstance(test, Masked)
        patch, size = patch_size_of(encoder), settings.image_size or task.backbone.architecture.image_size
        if size % patch:
            raise ValueError(f"image size {size} must be a multiple of the patch size {patch}")
        record = recorded(settings) | {"image_size": size, "epochs": settings.epochs or EPOCHS}
        record["lr"] = settings.lr or (5e-4 if settings.finetune else 1e-2)
        if len(train) < settings.batch_size:
            record["batch_size"] = max(1, len(train) // distributed.world_size()) * distributed.world_size()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            model = Segmenter(encoder, data.classes, blocks=settings.blocks, frozen=not settings.finetune)
        method = SegmentMethod(model).to(task.device).train()
        view = WholeView(test, size, patch)
        counts: list[Tensor] = []

        def evaluator(_: nn.Module) -> Iterator[tuple[str, float]]:
            counts[:] = [count_pixels(method.encoder, task, view)]
            yield from ((name, float(value)) for name, value in segmentation_metrics(counts[0].sum(dim=0)).items())

        protocol = "segment-finetune" if settings.finetune else "segment"
        _, folder = task.fit(
            protocol,
            method,
            MaskedViews(train, View(size, CROP_AREA, jitter=0.0, gray=0.0, blur=0.0), settings.seed),
            record,
            evaluator=evaluator,
            optimizer=torch.optim.AdamW(groups_with_head(model, encoder, settings.layer_decay), lr=0.0),
            warmup=lambda steps: WARMUP,
            evaluate_every=0.0,
        )
        if folder is not None and distributed.is_main():
            save_pictures(folder / "pictures", model, task, view, settings.pictures)
        record |= {"optimizer": "AdamW", "crop_area": list(CROP_AREA), "test": data.tested_on}
        return result_of(task, protocol, counts[0], record)


class Segmenter(nn.Module):
    """A linear layer on the patch tokens after some blocks: images (N, 3, H, W) → logits (N, K, *size)."""

    def __init__(self, encoder: VisionTransformer, classes: int, *, blocks: Sequence[int], frozen: bool) -> None:
        super().__init__()
        self.blocks = check_blocks(encoder, blocks)
        encoder.prune_intermediate_layers(self.blocks)  # DDP waits for gradients of all blocks
        self.encoder = encoder.requires_grad_(not frozen)
        self.frozen = frozen
        self.norm = BatchNorm(encoder.embed_dim * len(self.blocks), affine=False)
        self.head = nn.Linear(encoder.embed_dim * len(self.blocks), classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def train(self, mode: bool = True) -> "Segmenter":
        super().train(mode)
        self.encoder.train(mode and not self.frozen)
        return self

    def forward(self, images: Tensor, size: tuple[int, int]) -> Tensor:
        images = as_channels(images, int(self.encoder.patch_embed.proj.in_channels))
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            tokens = patch_tokens(self.encoder, images, self.blocks)  # (N, h, w, D)
        logits = self.head(self.norm(tokens.flatten(0, 2))).view(*tokens.shape[:3], -1)
        return F.interpolate(logits.permute(0, 3, 1, 2).float(), size, mode="bilinear")


class SegmentMethod(SupervisedMethod):
    """A segmenter that learns from masks; it is its own `encoder`, which is evaluated."""

    encoder: Segmenter
    tracked = ("miou",)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """batch: images (N, 3, H, W) and masks (N, H, W)."""
        images, masks = batch
        loss = F.cross_entropy(self.encoder(images, masks.shape[1:]), masks, ignore_index=IGNORED, reduction="sum")
        return {"loss": loss / (masks != IGNORED).sum().clamp_min(1)}


class MaskedViews:
    """The loader's transform for training: random resized crops and flips of images and masks."""

    def __init__(self, source: Masked, view: View, seed: int) -> None:
        self._source, self._view, self._seed = source, view, seed

    def __call__(self, images: Sequence[Pixels], *, epoch: int, indices: Indices) -> list[Any]:
        """Pixels (N, S, S, C) and masks (N, S, S)."""
        sizes = np.array([image.shape[:2] for image in images], np.int64)
        drawn = draw_parameters(self._view, sizes, uniforms(DRAWS, self._seed, epoch, indices))
        masks = [self._source.mask(index) for index in indices.tolist()]
        boxes = zip(masks, drawn.box.tolist(), drawn.flip.tolist(), strict=True)
        cropped = [crop_mask(mask, box, flip, self._view.size) for mask, box, flip in boxes]
        return [render(self._view, images, drawn), np.stack(cropped)]


def crop_mask(mask: Mask, box: Sequence[int], flip: bool, size: int) -> Mask:
    """The nearest pixels of a box (top, left, height, width), perhaps mirrored: (size, size)."""
    top, left, height, width = box
    middles = (np.arange(size) + 0.5) / size
    rows, columns = top + (middles * height).astype(int), left + (middles * width).astype(int)
    cropped: Mask = mask[np.ix_(rows, columns[::-1] if flip else columns)]
    return cropped


class WholeView:
    """The loader's transform for testing: one whole image at a time, resized to its size in training."""

    def __init__(self, source: Masked, size: int, patch: int) -> None:
        self.source, self._size, self._patch = source, size, patch

    def __call__(self, images: Sequence[Pixels], *, epoch: int, indices: Indices) -> list[Any]:
        """Pixels (1, H, W, C) and the mask at its own size."""
        if not images:
            return []
        scale = self._size / min(images[0].shape[:2]) / self._patch
        height, width = [self._patch * max(1, round(side * scale)) for side in images[0].shape[:2]]
        return [operations.resize(images[0], height, width)[None], self.source.mask(int(indices[0]))[None]]


@torch.no_grad()
def predict(model: Segmenter, task: Task, views: Sequence[Tensor]) -> Tensor:
    """What `WholeView` made → predicted classes at the mask's size: (H, W)."""
    images = to_float(views[0].to(task.device), task.backbone.mean, task.backbone.std)
    autocast = autocast_dtype(task.device)
    with torch.autocast(task.device.type, dtype=autocast, enabled=autocast is not None):
        logits: Tensor = model(images, views[1].shape[1:])
    return logits.argmax(dim=1)[0]


def count_pixels(model: Segmenter, task: Task, view: WholeView) -> Tensor:
    """For each test image and class: pixels found, pixels of the truth, pixels predicted, (N, 3, K)."""

    def counts(views: Sequence[Tensor]) -> Any:
        return count(views[1][0].long(), predict(model, task, views).cpu(), model.head.out_features).tolist()

    how: dict[str, Any] = {"device": task.device, "workers": task.settings.workers}
    return torch.tensor(map_images(view.source, view, counts, "segmentation", **how))


def count(truth: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """Two images of classes → pixels found, of the truth and predicted, where the truth counts: (3, K)."""
    truth, predicted = truth[truth != IGNORED], predicted[truth != IGNORED]
    parts = truth[truth == predicted], truth, predicted
    return torch.stack([torch.bincount(part, minlength=classes) for part in parts])


def segmentation_metrics(counts: Tensor) -> dict[str, Tensor]:
    """(…, 3, K) of `count_pixels` → mIoU over the classes that occur or are predicted, and pixel accuracy: (…)."""
    found, truth, predicted = counts.double().unbind(dim=-2)
    miou = (found / (truth + predicted - found)).nanmean(dim=-1)
    return {"miou": miou, "pixel_accuracy": found.sum(dim=-1) / truth.sum(dim=-1)}


def bootstrap(counts: Tensor) -> dict[str, tuple[float, float]]:
    """95 % intervals of the scores, for the chance of having drawn these test images: (N, 3, K)."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(counts), (DRAWN, len(counts)), generator=generator)
    weights = torch.stack([torch.bincount(row, minlength=len(counts)) for row in drawn]).double()
    values = segmentation_metrics((weights @ counts.double().flatten(1)).view(DRAWN, *counts.shape[1:]))
    limits = torch.tensor([0.025, 0.975], dtype=torch.float64)
    return {name: tuple(value.nanquantile(limits).tolist()) for name, value in values.items()}


def result_of(task: Task, protocol: str, counts: Tensor, record: dict[str, Any]) -> Result:
    """Scores with intervals, and name, pixels and IoU of each class that occurs. counts: (N, 3, K)."""
    assert task.data.test is not None and task.data.test.classes is not None
    metrics = {name: float(value) for name, value in segmentation_metrics(counts.sum(dim=0)).items()}
    columns = zip(task.data.test.classes, *counts.sum(dim=0).tolist(), strict=True)
    classes = [
        {"name": name, "pixels": truth, "iou": found / (truth + predicted - found)}
        for name, found, truth, predicted in columns
        if truth
    ]
    return task.result(protocol, [metrics], len(counts), record, {"classes": classes}, intervals=bootstrap(counts))


def segment_fast_of(task: Task) -> Result:
    """`segment --protocol fast` of an open task: on stored patch tokens of center crops, in seconds.

    A patch's label is the class of one of its pixels, drawn at random, so that the expected loss is that of all pixels.
    Logits are enlarged to the crop. Metrics as of `segment`, over the pixels of the test crops.
    """
    settings, data, extractor, classes = task.settings, task.data, task.extractor(), task.data.classes
    train, test, size = data.train, data.test, extractor.image_size
    assert isinstance(settings, Segment) and isinstance(train, Masked) and isinstance(test, Masked)
    side = size // task.backbone.architecture.patch_size
    crop = CenterCrop(size, resize=extractor.resize)
    found = [extractor.features(source.images).at(source.positions) for source in (train, test)]
    tokens, test_tokens = (features.vectors for features in found)  # (N, T, D), of images that can be decoded
    places = [
        np.searchsorted(source.positions, f.indices.numpy()) for source, f in zip((train, test), found, strict=True)
    ]

    def patch_labels(index: int) -> Tensor:
        mask = center_mask(train.mask(index), crop).reshape(side, size // side, side, size // side)
        patches = mask.transpose(0, 2, 1, 3).reshape(side * side, -1)
        drawn = np.random.default_rng((settings.seed, index)).integers(patches.shape[1], size=len(patches))
        return torch.from_numpy(patches[np.arange(len(patches)), drawn])

    labels = torch.cat(list(in_threads(patch_labels, places[0], f"masks of {train.name}"))).long()
    rows = (labels != IGNORED).nonzero().flatten()
    epochs = max(1, round(settings.epochs or -(-FAST_STEPS // max(1, len(rows) // sweep.BATCH))))
    how: dict[str, Any] = {"classes": classes, "epochs": epochs, "seed": settings.seed, "device": task.device}
    layer = sweep.fit_candidates(tokens.flatten(0, 1), labels, [FAST], rows=rows, **how)

    truths = in_threads(lambda index: center_mask(test.mask(index), crop), places[1], f"masks of {test.name}")
    counts = []
    for block in test_tokens.split(max(1, _LOGITS // (classes * size * size))):  # type: ignore[no-untyped-call]
        logits = layer.logits(layer.prepare(block.flatten(0, 1))).view(len(block), side, side, classes)
        enlarged = F.interpolate(logits.permute(0, 3, 1, 2), (size, size), mode="bilinear")
        answers = zip(enlarged.argmax(dim=1).cpu(), truths, strict=False)
        counts += [count(torch.from_numpy(truth).long(), predicted, classes) for predicted, truth in answers]
    record = {**extractor.record(), "epochs": float(epochs), "seed": settings.seed, "augmentation": "none"}
    record |= {"ignore_index": list(settings.ignore_index), "test": data.tested_on}
    return result_of(task, "segment-fast", torch.stack(counts), record)


def center_mask(mask: Mask, crop: CenterCrop) -> Mask:
    """The nearest pixels of a mask where `crop` has the image's: (size, size)."""
    places = [
        ((begin + np.arange(crop.size) + 0.5) * old / new).astype(int)
        for old, (new, begin) in zip(mask.shape, crop.axes(mask.shape), strict=True)
    ]
    cropped: Mask = mask[np.ix_(*places)]
    return cropped


def save_pictures(folder: Path, model: Segmenter, task: Task, view: WholeView, count: int) -> None:
    """Image, truth and prediction of some test images, evenly spread, as PNG files."""
    model.eval()
    for index in Subset(view.source, count).positions.tolist():
        image = view.source.load(index)
        views = [torch.from_numpy(array) for array in view([image], epoch=0, indices=np.array([index]))]
        masks = [views[1][0].numpy(), predict(model, task, views).cpu().numpy()]
        name = "-".join(PurePath(view.source.key(index)).with_suffix(".png").parts)
        write_picture(folder / name, draw(to_picture(image), masks, view.source.classes))


def draw(image: Pixels, masks: Sequence[Mask], names: Sequence[str]) -> Pixels:
    """The image, then each mask as colors on it (ignored pixels white), and the names of the classes below."""
    colors = np.array([*(color(index) for index in range(len(names))), (255, 255, 255)], np.uint8)  # IGNORED is last
    panels = [image, *((0.35 * image + 0.65 * colors[mask]).astype(np.uint8) for mask in masks)]
    scale = max(1, round(_PANEL / image.shape[0]))
    row = np.concatenate([np.pad(panel, ((0, 0), (0, 4), (0, 0))) for panel in panels], axis=1)
    lines = [cv2.resize(row, None, fx=scale, fy=scale, interpolation=cv2.INTER_NEAREST)]
    width = right = lines[0].shape[1]
    font: tuple[int, float] = (cv2.FONT_HERSHEY_SIMPLEX, 0.45)
    for index in sorted({index for mask in masks for index in np.unique(mask).tolist()} - {IGNORED}):
        end = right + 30 + cv2.getTextSize(names[index], *font, 1)[0][0]
        if end > width:  # a new line
            lines.append(np.full((20, width, 3), 255, np.uint8))
            right, end = 4, end - right + 4
        cv2.rectangle(lines[-1], (right, 4), (right + 12, 16), color(index), cv2.FILLED)
        cv2.putText(lines[-1], names[index], (right + 17, 15), *font, (0, 0, 0), 1, cv2.LINE_AA)
        right = end
    return np.concatenate(lines)
