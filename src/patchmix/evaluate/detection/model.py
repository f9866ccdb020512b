"""torchvision's Mask R-CNN (its proposals, heads and losses) on a ViT with a pyramid, and its file.

Shapes: N images, S the canvas's side, K classes without the background.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from timm.layers import LayerNorm2d  # type: ignore[attr-defined]
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNN, MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import roi_align

from patchmix.data.views import as_channels
from patchmix.evaluate.detection.views import Target
from patchmix.interop.backbone import Architecture, check_weights, digest, fitted, save_weights
from patchmix.interop.importing import read_entries
from patchmix.nn.pyramid import STRIDES, Pyramid

FILE = "detector.safetensors"
_METADATA = "patchmix-detector"

Detection = dict[str, Tensor]  # boxes (n, 4), labels (n,), scores (n,), masks (n, 1, 28, 28) inside the boxes


@dataclass(frozen=True)
class Shape:
    """What a detector's weights depend on, and the size of its images; stored with the weights."""

    image_size: int = 1024
    patch_size: int | None = None
    window: int = 16
    global_blocks: int = 4
    channels: int = 256
    head_dim: int = 1024
    smallest_anchor: int = 32


class Detector(nn.Module):
    """Images on a canvas → losses in training, detections in evaluation; boxes are in the canvas's pixels.

    As in ViTDet the proposal network has two convolutions, the box head four and one linear layer, the mask head
    four, with layer norms.
    """

    def __init__(self, pyramid: Pyramid, classes: int, *, shape: Shape, rois_per_image: int = 512) -> None:
        super().__init__()
        channels, head_dim = shape.channels, shape.head_dim
        sizes = tuple((shape.smallest_anchor * 2**level,) for level in range(5))
        anchors = AnchorGenerator(sizes, aspect_ratios=((0.5, 1.0, 2.0),) * 5)
        parts = MaskRCNN(
            pyramid,
            rpn_anchor_generator=anchors,
            rpn_head=RPNHead(channels, anchors.num_anchors_per_location()[0], conv_depth=2),
            box_head=FastRCNNConvFCHead((channels, 7, 7), [channels] * 4, [head_dim], norm_layer=LayerNorm2d),
            box_predictor=FastRCNNPredictor(head_dim, classes + 1),
            mask_head=MaskRCNNHeads(channels, [channels] * 4, 1, norm_layer=LayerNorm2d),
            mask_predictor=MaskRCNNPredictor(channels, channels, classes + 1),
            box_batch_size_per_image=rois_per_image,
        )
        predictor = parts.roi_heads.box_predictor
        for layer, std in ((predictor.cls_score, 0.01), (predictor.bbox_pred, 0.001)):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)
        self.backbone = pyramid  # as in torchvision's detectors
        self.rpn: Any = parts.rpn
        self.roi_heads: Any = parts.roi_heads
        # 224 px at 1024 px, where the smallest anchor is 32
        self.roi_heads.box_roi_pool = RegionPooling(7, middle=7.0 * shape.smallest_anchor)
        self.roi_heads.mask_roi_pool = RegionPooling(14, middle=7.0 * shape.smallest_anchor)

    def forward(
        self, images: Tensor, sizes: list[tuple[int, int]], targets: list[Target] | None = None
    ) -> dict[str, Tensor] | list[Detection]:
        """images: normalized (N, 3, S, S); sizes: height and width of the part of each canvas that is image."""
        channels = int(self.backbone.tokens.encoder.patch_embed.proj.in_channels)
        levels = self.backbone(as_channels(images, channels))
        proposals, proposal_losses = self.rpn(ImageList(images, sizes), levels, targets)
        detections, head_losses = self.roi_heads(levels, proposals, sizes, targets)
        if self.training:
            return {**proposal_losses, **head_losses}
        return cast("list[Detection]", detections)


class RegionPooling(nn.Module):
    """Features of `side` × `side` for each region, from the level that fits its size (FPN's equation 1).

    A region of `middle` px is pooled from stride 16, of half of it from stride 8, and so on. torchvision's own pooling
    derives the strides from the visible sizes of the first images, which is wrong on canvases that jitter leaves
    mostly empty. As in detectron2, samples are at pixel centers (`aligned`).
    """

    def __init__(self, side: int, *, middle: float) -> None:
        super().__init__()
        self.side, self.middle = side, middle

    def forward(self, levels: dict[str, Tensor], boxes: list[Tensor], _: list[tuple[int, int]]) -> Tensor:
        """levels: "0", … "3" (N, C, S/s, S/s); boxes: for each image (n, 4) → (sum of n, C, side, side)."""
        every = torch.cat(boxes)
        image = torch.cat([torch.full_like(own[:, :1], n) for n, own in enumerate(boxes)])
        regions = torch.cat([image, every], dim=1)  # (sum of n, 5)
        area = (every[:, 2] - every[:, 0]) * (every[:, 3] - every[:, 1])
        level = torch.floor(2 + torch.log2(area.clamp_min(1e-6).sqrt() / self.middle) + 1e-6).clamp(0, len(STRIDES) - 1)
        first = levels["0"]
        pooled = first.new_zeros(len(regions), first.shape[1], self.side, self.side)
        for number, stride in enumerate(STRIDES):
            chosen = torch.where(level == number)[0]
            values = roi_align(levels[str(number)], regions[chosen], self.side, 1 / stride, 2, aligned=True)
            pooled[chosen] = values.to(pooled.dtype)
        return pooled


def build_detector(
    architecture: Architecture,
    classes: int,
    shape: Shape,
    *,
    encoder_weights: dict[str, Tensor] | None = None,
    drop_path: float = 0.0,
    rois_per_image: int = 512,
    recompute: bool = False,
) -> Detector:
    """A new detector around the encoder `architecture`, with its weights where they are given.

    `shape.patch_size` other than the encoder's resamples its patch embedding, so that a patch of the new size gets
    about the token that the old one had (FlexiViT); the grid, and with it the position embedding, stays.
    """
    patch = shape.patch_size
    if patch is not None and patch != architecture.patch_size:
        if architecture.stem != "patch":
            raise ValueError(f"patch_size {patch} needs an encoder with --stem patch; leave patch_size out")
        grid = architecture.image_size // architecture.patch_size
        architecture = dataclasses.replace(architecture, patch_size=patch, image_size=grid * patch)
    encoder = architecture.create(drop_path=drop_path, any_image_size=True)
    if encoder_weights is not None:
        encoder.load_state_dict(fitted(encoder_weights, encoder))
    options = {"channels": shape.channels, "window": shape.window, "global_blocks": shape.global_blocks}
    pyramid = Pyramid(encoder, **options, recompute=recompute)
    return Detector(pyramid, classes, shape=shape, rois_per_image=rois_per_image)


@dataclass(frozen=True)
class DetectorFile:
    """detector.safetensors: weights, and in its metadata all that rebuilds the detector. `origin` is its encoder's."""

    architecture: Architecture
    shape: Shape
    categories: dict[int, str]  # the classes' names by the ids that the annotation file gives them, in their order
    weights: dict[str, Tensor]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    origin: dict[str, Any] = field(default_factory=dict)

    def detector(self, **options: Any) -> Detector:
        """The network with these weights, in evaluation mode; `options` of `build_detector`."""
        detector = build_detector(self.architecture, len(self.categories), self.shape, **options)
        detector.load_state_dict(self.weights)
        return detector.eval()

    def digest(self) -> str:
        return digest(self.weights)

    def header(self) -> str:
        """All but the weights, as JSON."""
        header = vars(self) | {"architecture": vars(self.architecture), "shape": vars(self.shape)}
        del header["weights"]
        header["categories"] = [{"id": number, "name": name} for number, name in self.categories.items()]
        return json.dumps(header, sort_keys=True)

    def save(self, path: Path) -> None:
        save_weights(self.weights, path, {_METADATA: self.header()})


def load_detector(path: Path) -> DetectorFile:
    """From detector.safetensors, from the folder that `detect` left, or from a checkpoint of its training (.pt)."""
    file = _file_in(path) if path.is_dir() else path
    weights, metadata = read_entries(file)
    header = metadata.get(_METADATA)
    if isinstance(weights.get("identity"), dict):  # the detector is what the training method calls its encoder
        header = weights["identity"].get("detector")
        tensors = weights["method"].items()
        weights = {name.removeprefix("encoder."): tensor for name, tensor in tensors if name.startswith("encoder.")}
    if header is None:
        raise ValueError(f"{file} is not a detector; give a {FILE} or a checkpoint that `patchmix detect` wrote")
    try:
        parsed = json.loads(header)
        pyramid = parsed["shape"].pop("pyramid", "fpn")  # in files of version 0.1
        parsed |= {"architecture": Architecture(**parsed["architecture"]), "shape": Shape(**parsed["shape"])}
        parsed |= {"categories": {category["id"]: category["name"] for category in parsed["categories"]}}
        parsed |= {"mean": tuple(parsed["mean"]), "std": tuple(parsed["std"])}
        detector = DetectorFile(**parsed, weights=weights)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} has damaged metadata ({error}); use another checkpoint of its training") from error
    if pyramid != "fpn":
        raise ValueError(f"{file} has the pyramid {pyramid!r} of version 0.1, which was removed; train it again")
    with torch.device("meta"):
        wanted = build_detector(detector.architecture, len(detector.categories), detector.shape).state_dict()
    check_weights(weights, wanted, f"{file} does not hold the detector that its metadata says")
    return detector


def _file_in(folder: Path) -> Path:
    """detector.safetensors there or in the newest folder below it; else the newest checkpoint."""
    for name in (FILE, "checkpoints/step-*.pt"):
        if found := [*folder.glob(name), *folder.glob(f"detect-*/{name}")]:
            return max(found, key=lambda path: path.stat().st_mtime)
    raise ValueError(f"{folder} holds no detector; train one with `patchmix detect`")
