"""How images are mixed, and which targets follow: the paper's first figures on any data. N: images in a batch."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from patchmix.data.sources import open_source
from patchmix.mixing import Mixed, create_mix, overlap
from patchmix.mixing.patchmix import PatchMix
from patchmix.report.gallery import crop_batch, spread
from patchmix.report.style import MATRIX, check_suffix, look, outline, picture, picture_grid, style, write
from patchmix.settings import ShowMix


def show_mix(settings: ShowMix) -> list[Path]:
    """Draws originals, their mixes and, in a second file, the three target matrices."""
    check_suffix(settings.out)
    if settings.images < 2:
        raise ValueError(f"{settings.images} image can't be mixed; use at least 2")
    source = open_source(settings.data, "train", cache_bytes=0)
    images = crop_batch(source, spread(len(source), settings.images), settings.size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        mix = create_mix(settings.mix, patch_size=settings.patch_size, num_mix=settings.num_mix)
        figure, mixed = mix_figure(images, mix.for_one_step())
    out, targets = settings.out, targets_figure(mixed.share.float())
    return write({out: figure, out.with_name(f"{out.stem}-targets{out.suffix}"): targets})


@style()
def mix_figure(images: Tensor, mix: Callable[[Tensor], Mixed]) -> tuple[Figure, Mixed]:
    """Originals above, mixed images with their shares below, for any mix; and what the mix returned.

    images: uint8 (N, H, W, 3); the mix gets them as float (N, 3, H, W) in [0, 1]. PatchMix's patches are framed in the
    color of their original and, where there is room, numbered.
    """
    n = len(images)
    mixed = mix(images.permute(0, 3, 1, 2).float() / 255)
    owner = None  # the original of each patch, (N, rows, columns)
    title = f"{type(mix).__name__}: the share of each original stands above each mixed image"
    if isinstance(mix, PatchMix) and mixed.groups is not None:
        group = mixed.groups.int().argmax(dim=0).view(-1, images.shape[2] // mix.patch_size)
        owner = (torch.arange(n).view(n, 1, 1) + group) % n
        name = f"PatchMix of {len(mixed.share[0].nonzero())} images"
        title = f"{name}: each patch is framed in the color of its original"
    columns = min(n, 8)
    bands = -(-n // columns)
    figure, axes = picture_grid(2 * bands, columns, (max(1.5 * columns, 5.0), 3.7 * bands))
    for i in range(n):
        band, column = divmod(i, columns)
        above, below = axes[2 * band : 2 * band + 2, column]
        picture(above, images[i].numpy(), f"image {i}")
        outline(above, look(i)[0], width=3)
        picture(below, mixed.images[i].clamp(0, 1).permute(1, 2, 0).numpy(), share_text(mixed.share[i]))
        if owner is not None:
            _frame_patches(below, owner[i], images.shape[1] // owner.shape[1])
    figure.suptitle(title)
    figure.tight_layout()
    return figure, mixed


@style()
def targets_figure(shares: Tensor) -> Figure:
    """The three target matrices that follow from a mix's shares, (N, N)."""
    n = len(shares)
    matrices = [
        ("origin-to-origin: itself", torch.eye(n), "original", "original"),
        ("mix-to-origin: the shares", shares, "mixed image", "original"),
        ("mix-to-mix: overlap of shares", overlap(shares, shares), "mixed image", "mixed image"),
    ]
    figure = Figure(figsize=(11.4, 4.0))
    for axis, (title, matrix, query, key) in zip(figure.subplots(1, 3), matrices, strict=True):
        axis.imshow(matrix.numpy(), cmap=MATRIX, vmin=0, vmax=1)
        ticks = range(0, n, max(1, n // 9))
        axis.set(title=title, xlabel=f"{key} (key)", ylabel=f"{query} (query)", xticks=ticks, yticks=ticks)
        axis.grid(False)
        for i, j in (matrix > 1e-6).nonzero().tolist() if n <= 20 else []:  # else numbers have no room
            value = matrix[i, j].item()
            color = "black" if value > 0.6 else "white"
            text = amount(value).removeprefix("0")
            axis.text(j, i, text, ha="center", va="center", fontsize=7 if n <= 9 else 5, color=color)
    figure.tight_layout()
    return figure


def share_text(row: Tensor) -> str:
    """A mixed image's shares in words, such as "1/3 each of 0, 1, 2", "0.62 of 0, 0.38 of 3". row: (N,), sums to 1."""
    groups: dict[str, list[int]] = {}
    for j in row.argsort(descending=True, stable=True).tolist():
        if row[j] > 5e-3:
            groups.setdefault(amount(row[j].item()), []).append(j)
    texts = []
    for part, members in groups.items():
        members.sort()
        listed = ", ".join(map(str, members))
        if len(members) > 4 and members[-1] - members[0] == len(members) - 1:
            listed = f"{members[0]} … {members[-1]}"
        texts.append(f"{'all' if part == '1' else part} {'each ' if len(members) > 1 else ''}of {listed}")
    return ",\n".join(texts)


def amount(value: float) -> str:
    """1/3 rather than 0.33, where the denominator is small."""
    fraction = Fraction(value).limit_denominator(8)
    return str(fraction) if abs(fraction - value) < 1e-4 else f"{value:.2f}"


def _frame_patches(axis: Axes, owner: Tensor, size: int) -> None:
    inset = 0.04 * size
    for r, row in enumerate(owner.tolist()):
        for c, original in enumerate(row):
            corner = (c * size - 0.5 + inset, r * size - 0.5 + inset)
            side = size - 2 * inset
            color, _ = look(original)  # colors repeat after eight, so patches are numbered, too
            axis.add_patch(Rectangle(corner, side, side, fill=False, edgecolor=color, linewidth=1.2))
            if owner.numel() <= 64:
                box = {"facecolor": color, "edgecolor": "none", "pad": 0.8}
                ink = "black" if color in ("#E69F00", "#56B4E9", "#F0E442", "#CC79A7") else "white"
                place = (corner[0] + 0.16 * size, corner[1] + 0.16 * size)
                axis.text(*place, str(original), fontsize=4.5, color=ink, ha="center", va="center", bbox=box)
