"""torchvision's Mask R-CNN (its proposals, heads and losses) on a ViT with a pyramid.

Shapes: N images, S the canvas's side, K classes without the background.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from timm.layers import LayerNorm2d, resample_patch_embed  # type: ignore[attr-defined]
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNN, MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops.poolers import MultiScaleRoIAlign, initLevelMapper

from patchmix.evaluate.detection.settings import Shape
from patchmix.evaluate.detection.views import Target
from patchmix.evaluate.features import as_channels
from patchmix.interop.encoder_file import Architecture, EncoderFile
from patchmix.nn.pyramid import STRIDES, Pyramid
from patchmix.nn.vit import create_encoder

Detection = dict[str, Tensor]  # boxes (n, 4), labels (n,), scores (n,), masks (n, 1, 28, 28) inside the boxes
_CLASS_LAYERS = ("roi_heads.box_predictor.", "roi_heads.mask_predictor.mask_fcn_logits.")


class Detector(nn.Module):
    """Images on a canvas → losses in training, detections in evaluation; boxes are in the canvas's pixels.

    As in ViTDet the proposal network has two convolutions, the box head four and one linear layer, the mask head
    four, with layer norms.
    """

    def __init__(self, backbone: Pyramid, classes: int, *, shape: Shape, rois_per_image: int = 512) -> None:
        super().__init__()
        channels, head_dim = shape.channels, shape.head_dim
        anchors = AnchorGenerator(
            sizes=tuple((shape.smallest_anchor * 2**level,) for level in range(5)),
            aspect_ratios=((0.5, 1.0, 2.0),) * 5,
        )
        parts = MaskRCNN(
            backbone,
            rpn_anchor_generator=anchors,
            rpn_head=RPNHead(channels, anchors.num_anchors_per_location()[0], conv_depth=2),
            box_roi_pool=_pooler(7, shape),
            box_head=FastRCNNConvFCHead((channels, 7, 7), [channels] * 4, [head_dim], norm_layer=LayerNorm2d),
            box_predictor=FastRCNNPredictor(head_dim, classes + 1),
            mask_roi_pool=_pooler(14, shape),
            mask_head=MaskRCNNHeads(channels, [channels] * 4, 1, norm_layer=LayerNorm2d),
            mask_predictor=MaskRCNNPredictor(channels, channels, classes + 1),
            box_batch_size_per_image=rois_per_image,
        )
        for layer, std in (
            (parts.roi_heads.box_predictor.cls_score, 0.01),
            (parts.roi_heads.box_predictor.bbox_pred, 0.001),
        ):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)
        self.backbone = backbone
        self.rpn: Any = parts.rpn
        self.roi_heads: Any = parts.roi_heads

    def forward(
        self, images: Tensor, sizes: list[tuple[int, int]], targets: list[Target] | None = None
    ) -> dict[str, Tensor] | list[Detection]:
        """images: normalised (N, 3, S, S); sizes: what is seen of each on its canvas, (height, width).

        In training the losses by name, in evaluation one `Detection` for each image.
        """
        channels = int(self.backbone.tokens.encoder.patch_embed.proj.in_channels)
        levels = self.backbone(as_channels(images, channels))
        proposals, proposal_losses = self.rpn(ImageList(images, sizes), levels, targets)
        detections, head_losses = self.roi_heads(levels, proposals, sizes, targets)
        if self.training:
            return {**proposal_losses, **head_losses}
        return cast("list[Detection]", detections)


def _pooler(side: int, shape: Shape) -> MultiScaleRoIAlign:
    """Features of `side` × `side` for each region, from the level that fits its size: at 1024 px 224 px is level 2.

    Left alone, torchvision guesses the strides from the first images it sees, by their visible sizes, and keeps them:
    on a canvas that is mostly empty it would guess wrong for ever.
    """
    levels = [str(level) for level in range(len(STRIDES))]
    pooler = MultiScaleRoIAlign(levels, side, sampling_ratio=2, canonical_scale=7 * shape.smallest_anchor)
    pooler.scales = [1 / stride for stride in STRIDES]
    exponents = [int(math.log2(stride)) for stride in STRIDES]
    pooler.map_levels = initLevelMapper(exponents[0], exponents[-1], canonical_scale=7 * shape.smallest_anchor)
    return pooler


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
    encoder = architecture.create(drop_path=drop_path, any_image_size=True)
    if encoder_weights is not None:
        encoder.load_state_dict(encoder_weights)
    if shape.patch_size is not None and shape.patch_size != architecture.patch_size:
        encoder = _with_patches(encoder, architecture, shape.patch_size, drop_path)
    backbone = Pyramid(
        encoder,
        kind=shape.pyramid,
        channels=shape.channels,
        window=shape.window,
        global_blocks=shape.global_blocks,
        recompute=recompute,
    )
    return Detector(backbone, classes, shape=shape, rois_per_image=rois_per_image)


def scratch(name: str, seed: int) -> EncoderFile:
    """An encoder with random weights, for training without pre-training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = create_encoder(name)
    return EncoderFile(Architecture.of(name, encoder), encoder.state_dict(), origin={"random": True, "seed": seed})


def without_class_layers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights that serve any classes."""
    return {name: tensor for name, tensor in weights.items() if not name.startswith(_CLASS_LAYERS)}


def _with_patches(
    encoder: VisionTransformer, architecture: Architecture, patch: int, drop_path: float
) -> VisionTransformer:
    grid = architecture.image_size // architecture.patch_size
    other = Architecture(**{**vars(architecture), "patch_size": patch, "image_size": grid * patch})
    weights = encoder.state_dict()
    weights["patch_embed.proj.weight"] = resample_patch_embed(weights["patch_embed.proj.weight"], [patch, patch])
    changed = other.create(drop_path=drop_path, any_image_size=True)
    changed.load_state_dict(weights)
    return changed
