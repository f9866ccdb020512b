"""What an encoder sees in an image: the attention of its class token (the paper's appendix, "Self-Attention Map
Visualization"), and its patch tokens as colors, as in the figures of DINOv2 and DINOv3.

Shapes: N images, H heads, T tokens with the class token first, R × C patches, D = the width of a token.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchmix.data.contract import Source
from patchmix.data.views import as_channels, to_float
from patchmix.device import resolve_device
from patchmix.interop.backbone import Backbone
from patchmix.nn.vit import check_blocks, patch_tokens
from patchmix.report.gallery import center_crop, crop_batch, find_image, load_all, open_images, spread
from patchmix.report.neighbors import principal_components
from patchmix.report.style import check_suffix, picture, picture_grid, short, style, write
from patchmix.settings import ShowAttention, ShowPatches

Inputs = tuple[VisionTransformer, Tensor]  # an encoder and images as it takes them


def show_attention(settings: ShowAttention) -> list[Path]:
    """Draws the class token's attention in a block, one map per head, raw and overlaid, runs below each other."""
    pictures, inputs = open_all(settings)
    maps = [(name, attention_maps(*each, block=settings.block).cpu()) for name, each in inputs]
    return write({settings.out: attention_figure(pictures, maps, block=settings.block)})


def open_all(settings: ShowAttention) -> tuple[Tensor, list[tuple[str, Inputs]]]:
    """The pictures to draw, and for each run its name, its encoder and the images for it."""
    check_suffix(settings.out)
    encoders = load_all(settings.runs)
    if (settings.data is None) == (not settings.image):
        raise ValueError("give either --data DATA or --image FILE …")
    source = open_images(settings.data or settings.image, in_chans=encoders[0].architecture.in_chans)
    wanted = settings.position or spread(len(source), len(settings.image) or settings.images)
    positions = [find_image(position, source) for position in wanted]
    size = settings.size or max(backbone.architecture.image_size for backbone in encoders)
    how: dict[str, Any] = {"size": settings.size, "device": settings.device}
    inputs = [(backbone.name, encoder_and_images(backbone, source, positions, **how)) for backbone in encoders]
    return crop_batch(source, positions, size), inputs


def encoder_and_images(
    backbone: Backbone, source: Source, positions: Sequence[int], *, size: int | None = None, device: str = "cpu"
) -> Inputs:
    """An encoder for images of `size` px (by default its own), and some images as it takes them, on `device`."""
    shape = backbone.architecture
    size = size or shape.image_size
    if size % shape.patch_size:
        raise ValueError(
            f"size is {size}; for {backbone.name} it must be a multiple of its patch size {shape.patch_size}"
        )
    where = resolve_device(device)
    encoder = backbone.encoder(any_image_size=size != shape.image_size).to(where)
    crops = [torch.from_numpy(center_crop(source, position, size)) for position in positions]
    images = torch.cat([to_float(crop, backbone.mean, backbone.std) for crop in crops])
    return encoder, as_channels(images, shape.in_chans).to(where)


@torch.inference_mode()
def class_attention(encoder: VisionTransformer, images: Tensor, *, block: int = -1) -> Tensor:
    """softmax(q·kᵀ / √d) of the class token's query in one block: (N, H, T), rows sum to 1.

    Of this block timm computes all weights, as fused attention never returns these numbers; one row stays. images:
    normalized (N, C, height, width) of a size that the encoder takes. block: 0 is the first, -1 the last.
    """
    check_blocks(encoder, [block])
    if encoder.cls_token is None:
        raise ValueError("the encoder has no class token whose attention could be drawn; give a ViT with a class token")
    attention: Any = encoder.blocks[block].attn
    if not hasattr(attention, "attn_drop"):
        raise ValueError(f"attention of the kind {type(attention).__name__} can't be drawn; give a plain timm ViT")
    attention.fused_attn = False
    rows: list[Tensor] = []
    with attention.attn_drop.register_forward_pre_hook(lambda module, inputs: rows.append(inputs[0][:, :, 0].clone())):
        for image in images:  # one by one: all weights of an image are T times as many as the row that stays
            encoder.forward_features(image[None])
    return torch.cat(rows)


def attention_maps(encoder: VisionTransformer, images: Tensor, *, block: int = -1) -> Tensor:
    """The part of `class_attention` that falls on patches, as maps: (N, H, R, C)."""
    weights = class_attention(encoder, images, block=block)[:, :, encoder.num_prefix_tokens :]
    height, width = encoder.patch_embed.patch_size
    rows, columns = images.shape[2] // height, images.shape[3] // width
    return weights.reshape(*weights.shape[:2], rows, columns)


@style()
def attention_figure(images: Tensor, maps: Sequence[tuple[str, Tensor]], *, block: int = -1) -> Figure:
    """For each image and run: the image, then the mean over heads and each head, raw above and overlaid below.

    images: uint8 (N, height, width, 3). maps: for each run its name and (N, H, R, C). The colors of a map go from 0
    to its highest value, which its title gives.
    """
    most = max(weights.shape[1] for _, weights in maps)
    rows = 2 * len(images) * len(maps)
    figure, axes = picture_grid(rows, most + 2, (1.05 * (most + 2), 1.14 * rows + 0.5))
    lines = iter(axes)
    for i, image in enumerate(images.numpy()):
        for name, weights in maps:
            above, below = next(lines), next(lines)
            picture(above[0], image)
            above[0].set_title(short(name, 18), fontsize=6, pad=2)
            even = f"even attention:\n{1 / weights[0, 0].numel():.2g}"
            below[0].text(0.5, 0.5, even, fontsize=6, ha="center", transform=below[0].transAxes)
            heads = [("mean", weights[i].mean(dim=0))] + [(f"head {h}", w) for h, w in enumerate(weights[i])]
            for raw, over, (label, weight) in zip(above[1:], below[1:], heads, strict=False):
                highest = float(weight.max())
                raw.imshow(weight.numpy(), cmap="inferno", vmin=0, vmax=highest)  # readable in gray, too
                raw.set_title(f"{label} ≤ {highest:.2g}", fontsize=6, pad=2)
                over.imshow(overlaid(image, weight))
    where = "the last block" if block == -1 else f"block {block}"
    figure.suptitle(f"attention of the class token in {where}", fontsize=9)
    figure.subplots_adjust(0.01, 0.01, 0.99, 1 - 0.55 / figure.get_figheight(), wspace=0.04, hspace=0.14)
    return figure


def overlaid(image: np.ndarray, weight: Tensor) -> np.ndarray:
    """The image, dark where there is no attention. image: uint8 (h, w, 3), weight: (R, C) → floats in [0, 1]."""
    grown = F.interpolate(weight[None, None], size=image.shape[:2], mode="bilinear", align_corners=False)[0, 0]
    strength = (grown / grown.max().clamp_min(1e-12)).numpy()[..., None]
    result: np.ndarray = image / 255 * (0.15 + 0.85 * strength)
    return result


def show_patches(settings: ShowPatches) -> list[Path]:
    """Draws images next to their patches in colors, one column per run; similar patches have similar colors."""
    pictures, inputs = open_all(settings)
    columns = []
    for name, (encoder, images) in inputs:
        with torch.no_grad():
            tokens = patch_tokens(encoder, images, [settings.block]).cpu()
        columns.append((name, token_colors(tokens, foreground=settings.foreground)))
    return write({settings.out: patches_figure(pictures, columns)})


def token_colors(tokens: Tensor, *, foreground: bool = False) -> Tensor:
    """(N, R, C, D) → RGB in [0, 1], (N, R, C, 3): the first three principal components over the patches of all images.

    With `foreground`, patches on one side of the first component stay black, and the others get components of their
    own. The black side is the one with more patches at the images' borders.
    """
    rows = tokens.flatten(0, 2).double()
    visible = torch.ones(len(rows), dtype=torch.bool)
    if foreground:
        positive = principal_components(rows, 1)[:, 0].view(tokens.shape[:3]) > 0
        border = torch.ones_like(positive)
        border[:, 1:-1, 1:-1] = False
        visible = (positive ^ (positive[border].double().mean() > 0.5)).flatten()
    components = principal_components(rows[visible], 3)
    low, high = components.quantile(torch.tensor([0.01, 0.99]).double(), dim=0)
    colors = torch.zeros(len(rows), 3, dtype=torch.float64)
    colors[visible, : components.shape[1]] = ((components - low) / (high - low).clamp_min(1e-12)).clamp(0, 1)
    return colors.view(*tokens.shape[:3], 3)


@style()
def patches_figure(images: Tensor, columns: Sequence[tuple[str, Tensor]]) -> Figure:
    """A row for each image. images: uint8 (N, height, width, 3); columns: for each run its name and (N, R, C, 3)."""
    figure, axes = picture_grid(len(images), 1 + len(columns), (1.6 * (1 + len(columns)), 1.6 * len(images) + 0.3))
    for line, image in zip(axes, images.numpy(), strict=True):
        picture(line[0], image)
    for column, (name, colors) in zip(axes.T[1:], columns, strict=True):
        for axis, image in zip(column, colors.numpy(), strict=True):
            axis.imshow(image, interpolation="nearest")
        column[0].set_title(short(name, 24), fontsize=7)
    figure.subplots_adjust(0.01, 0.01, 0.99, 1 - 0.25 / figure.get_figheight(), wspace=0.04, hspace=0.04)
    return figure
