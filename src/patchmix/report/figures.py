"""The paper's first figures on any data: how images are mixed, and what the targets are. N: images in a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from patchmix.mixing import Mixed, overlap
from patchmix.mixing.patchmix import PatchMix, owners, share
from patchmix.report.curves import curves_figure
from patchmix.report.style import COLORS, MATRIX, style

__all__ = ["curves_figure", "mix_figure", "mixed_figure", "share_targets_figure", "share_text", "targets_figure"]

NUMBERED_PATCHES = 64  # up to here the owner's number stands in each patch
NUMBERED_CELLS = 400  # up to here each cell of a target matrix says its value


def mix_figure(images: Tensor, *, patch_size: int, num_mix: int = 3, seed: int = 0) -> Figure:
    """PatchMix of a batch: originals above, mixed images below. images: uint8 (N, H, W, 3)."""
    return mixed_figure(images, PatchMix(patch_size, num_mix, torch.Generator().manual_seed(seed)))[0]


def mixed_figure(images: Tensor, mix: Callable[[Tensor], Mixed]) -> tuple[Figure, Mixed]:
    """Originals above, mixed images below with the share of each original, for any mix; and what the mix returned.

    images: uint8 (N, H, W, 3); the mix gets them as float (N, 3, H, W) in [0, 1]. After PatchMix every patch is framed
    in its owner's colour and, where there is room, numbered; other mixes show their shares only.
    """
    n = len(images)
    batch = images.permute(0, 3, 1, 2).float() / 255
    if isinstance(mix, PatchMix):
        mixed, owner = _mix_and_owners(mix, batch)
        name = f"PatchMix of {len(mixed.share[0].nonzero())} images"
        title = f"{name}: each patch is framed in the colour of its original"
    else:
        mixed, owner = mix(batch), None
        title = f"{type(mix).__name__}: the share of each original stands above each mixed image"
    columns = min(n, 8)
    bands = -(-n // columns)
    with style():
        figure = Figure(figsize=(max(1.5 * columns, 5.0), 3.7 * bands))
        axes = figure.subplots(2 * bands, columns, squeeze=False)
        for axis in axes.flat:
            axis.set_axis_off()
        for i in range(n):
            above, below = axes[2 * (i // columns), i % columns], axes[2 * (i // columns) + 1, i % columns]
            picture(above, images[i].numpy(), f"image {i}")
            outline(above, owner_color(i), width=3)
            picture(below, mixed.images[i].clamp(0, 1).permute(1, 2, 0).numpy(), share_text(mixed.share[i]))
            if owner is not None and isinstance(mix, PatchMix):
                _frame_patches(below, owner[i], mix.patch_size)
        figure.suptitle(title)
        figure.tight_layout()
    return figure, mixed


def targets_figure(n: int = 9, num_mix: int = 3) -> Figure:
    """PatchMix's three target matrices for a batch of n: origin-to-origin, mix-to-origin, mix-to-mix (ω as printed)."""
    return share_targets_figure(share(n, num_mix), rules=(f"1/{num_mix} each", "ω = 1 − |d|/M"), parts=num_mix)


def share_targets_figure(
    shares: Tensor, *, rules: tuple[str, str] = ("the shares", "overlap of shares"), parts: int | None = None
) -> Figure:
    """The three target matrices that follow from a mix's shares, (N, N).

    rules: what to write beside "mix-to-origin" and "mix-to-mix". parts: the M of fractions such as 1/3; None: decimals.
    """
    n = len(shares)
    matrices = [
        ("origin-to-origin", "itself", torch.eye(n), "original", "original"),
        ("mix-to-origin", rules[0], shares, "mixed image", "original"),
        ("mix-to-mix", rules[1], overlap(shares, shares), "mixed image", "mixed image"),
    ]
    with style():
        figure = Figure(figsize=(11.4, 4.0))
        for axis, (title, rule, matrix, query, key) in zip(figure.subplots(1, 3), matrices, strict=True):
            axis.imshow(matrix.numpy(), cmap=MATRIX, vmin=0, vmax=1)
            axis.set(title=f"{title}: {rule}", xlabel=f"{key} (key)", ylabel=f"{query} (query)")
            axis.grid(False)
            ticks = range(0, n, max(1, n // 9))
            axis.set_xticks(ticks)
            axis.set_yticks(ticks)
            for i, j in (matrix > 1e-6).nonzero().tolist() if n * n <= NUMBERED_CELLS else []:
                value = matrix[i, j].item()
                text = f"{value:.2f}".removeprefix("0") if parts is None else _fraction(value, parts)
                color = "black" if value > 0.6 else "white"
                axis.text(j, i, text, ha="center", va="center", fontsize=7 if n <= 9 else 5, color=color)
        figure.tight_layout()
    return figure


def share_text(row: Tensor) -> str:
    """A mixed image's shares in words: "1/3 each of 0, 1, 2", "0.62 of 0, 0.38 of 3". row: (N,), sums to 1."""
    groups: dict[str, list[int]] = {}
    parts = next((m for m in range(1, 17) if all(abs(m * s - round(m * s)) < 1e-4 for s in row.tolist())), None)
    for j in sorted(range(len(row)), key=lambda j: -row[j].item()):
        value = row[j].item()
        if value > 5e-3:
            groups.setdefault(f"{value:.2f}" if parts is None else _fraction(value, parts), []).append(j)
    texts = []
    for amount, members in groups.items():
        if amount == "1":
            texts.append(f"all of {members[0]}")
        else:
            texts.append(f"{amount} {'each ' if len(members) > 1 else ''}of {_list(members)}")
    return ",\n".join(texts)


def owner_color(index: int) -> str:
    """The colour of original `index`; colours repeat after eight, which is why patches are numbered, too."""
    return COLORS[index % len(COLORS)]


def picture(axis: Axes, image: np.ndarray, title: str = "") -> None:
    """An image without axes, a small title above it. image: (H, W, 3), uint8 or floats in [0, 1]."""
    axis.imshow(image, interpolation="nearest" if max(image.shape[:2]) < 128 else "antialiased")
    axis.set_title(title, fontsize=7)
    axis.set_axis_off()


def short(name: str, length: int) -> str:
    """A run's name in at most `length` characters: a title must not run into its neighbour."""
    return name if len(name) <= length else f"{name[: length - 1]}…"


def outline(axis: Axes, color: str, *, width: float = 2) -> None:
    """A coloured frame around the picture in `axis`."""
    axis.add_patch(Rectangle((0, 0), 1, 1, transform=axis.transAxes, fill=False, edgecolor=color, linewidth=width))


def _mix_and_owners(mix: PatchMix, batch: Tensor) -> tuple[Mixed, Tensor]:
    """What the mix makes of the batch, and which original each patch is from: (N, rows, columns)."""
    num_mix = mix.draw_num_mix()
    generator = torch.default_generator if mix.generator is None else mix.generator
    state = generator.get_state()
    mixed = mix(batch, num_mix)
    after = generator.get_state()
    generator.set_state(state)
    rows, columns = (side // mix.patch_size for side in batch.shape[2:])
    order = torch.randperm(rows * columns, generator=mix.generator)  # the one that the mix drew
    generator.set_state(after)
    return mixed, owners(len(batch), num_mix, order).view(-1, rows, columns)


def _frame_patches(axis: Axes, owner: Tensor, size: int) -> None:
    inset = 0.04 * size
    for r, row in enumerate(owner.tolist()):
        for c, original in enumerate(row):
            corner = (c * size - 0.5 + inset, r * size - 0.5 + inset)
            side = size - 2 * inset
            color = owner_color(original)
            axis.add_patch(Rectangle(corner, side, side, fill=False, edgecolor=color, linewidth=1.2))
            if owner.numel() <= NUMBERED_PATCHES:
                box = {"facecolor": color, "edgecolor": "none", "pad": 0.8}
                ink = "black" if color in ("#E69F00", "#56B4E9", "#F0E442", "#CC79A7") else "white"
                place = (corner[0] + 0.16 * size, corner[1] + 0.16 * size)
                axis.text(*place, str(original), fontsize=4.5, color=ink, ha="center", va="center", bbox=box)


def _list(members: Sequence[int]) -> str:
    members = sorted(members)
    if len(members) > 4 and members[-1] - members[0] == len(members) - 1:
        return f"{members[0]} … {members[-1]}"
    return ", ".join(map(str, members))


def _fraction(value: float, parts: int) -> str:
    """1/3 rather than 0.333."""
    count = round(value * parts)
    if abs(value - count / parts) > 1e-4:
        return f"{value:.2f}"
    return "1" if count == parts else f"{count}/{parts}"
