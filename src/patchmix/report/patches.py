"""Patch tokens as colors: their first three principal components, as in the figures of DINOv2 and DINOv3.

Shapes: N images of R × C patches, D = the width of a token.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from patchmix.nn.vit import patch_tokens
from patchmix.report.attention import chosen_images, encoder_and_images
from patchmix.report.gallery import crop_batch, load_all
from patchmix.report.neighbors import principal_components
from patchmix.report.style import check_suffix, picture, picture_grid, short, style, write
from patchmix.settings import ShowPatches


def show_patches(settings: ShowPatches) -> list[Path]:
    """Draws images beside their patches in colors, one column per run; patches that are alike have like colors."""
    check_suffix(settings.out)
    encoders = load_all(settings.runs)
    source, positions = chosen_images(settings)
    columns = []
    for name, backbone in encoders:
        encoder, images = encoder_and_images(backbone, source, positions, size=settings.size, device=settings.device)
        with torch.no_grad():
            tokens = patch_tokens(encoder, images, [settings.block]).cpu()
        columns.append((name, token_colors(tokens, foreground=settings.foreground)))
    size = settings.size or max(backbone.architecture.image_size for _, backbone in encoders)
    return write({settings.out: patches_figure(crop_batch(source, positions, size), columns)})


def token_colors(tokens: Tensor, *, foreground: bool = False) -> Tensor:
    """(N, R, C, D) → RGB in [0, 1], (N, R, C, 3): principal components over the patches of all images.

    With `foreground`, patches on one side of the first component stay black, and the others get components of their
    own. The black side is the one with more patches at the images' borders.
    """
    rows = tokens.flatten(0, 2).double()
    shown = torch.ones(len(rows), dtype=torch.bool)
    if foreground:
        positive = principal_components(rows, 1)[:, 0].view(tokens.shape[:3]) > 0
        border = torch.ones_like(positive)
        border[:, 1:-1, 1:-1] = False
        shown = (positive ^ (positive[border].double().mean() > 0.5)).flatten()
    components = principal_components(rows[shown], 3)
    low, high = components.quantile(torch.tensor([0.01, 0.99]).double(), dim=0)
    colors = torch.zeros(len(rows), 3, dtype=torch.float64)
    colors[shown, : components.shape[1]] = ((components - low) / (high - low).clamp_min(1e-12)).clamp(0, 1)
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
