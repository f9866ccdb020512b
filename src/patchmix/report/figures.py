"""How images are mixed, and which targets follow: the paper's first figures on any data. N: images in a batch."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from patchmix.data.sources import open_source
from patchmix.mixing import Mixed, create_mix, overlap
from patchmix.mixing.patchmix import PatchMix, owners, share
from patchmix.report.gallery import crop_batch, spread
from patchmix.report.style import COLORS, MATRIX, check_suffix, outline, picture, style, write
from patchmix.settings import ShowMix

NUMBERED_PATCHES = 64  # up to here the owner's number stands in each patch
NUMBERED_CELLS = 400  # up to here each cell of a target matrix says its value


def show_mix(settings: ShowMix) -> list[Path]:
    """Draws originals, their mixes and, in a second file, the three target matrices."""
    check_suffix(settings.out)
    if settings.images < 2:
        raise ValueError(f"{settings.images} image can't be mixed; use at least 2")
    source = open_source(settings.data, "train", cache_bytes=0, progress=False)
    images = crop_batch(source, spread(len(source), settings.images), settings.size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        if settings.mix == "patchmix":
            figure, _ = mix_figure(images, PatchMix(settings.patch_size, settings.num_mix))
            targets = targets_figure(max(9, 2 * settings.num_mix - 1), settings.num_mix)
        else:
            figure, mixed = mix_figure(images, create_mix(settings.mix, patch_size=settings.patch_size))
            targets = share_targets_figure(mixed.share.float())
    out = settings.out
    return write({out: figure, out.with_name(f"{out.stem}-targets{out.suffix}"): targets})


def mix_figure(images: Tensor, mix: Callable[[Tensor], Mixed]) -> tuple[Figure, Mixed]:
    """Originals above, mixed images with their shares below, for any mix; and what the mix returned.

    images: uint8 (N, H, W, 3); the mix gets them as float (N, 3, H, W) in [0, 1]. PatchMix's patches are framed in the
    color of their original and, where there is room, numbered.
    """
    n = len(images)
    batch = images.permute(0, 3, 1, 2).float() / 255
    if isinstance(mix, PatchMix):
        mixed, owner = _mix_and_owners(mix, batch)
        name = f"PatchMix of {len(mixed.share[0].nonzero())} images"
        title = f"{name}: each patch is framed in the color of its original"
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
    """A mixed image's shares in words, such as "1/3 each of 0, 1, 2", "0.62 of 0, 0.38 of 3". row: (N,), sums to 1."""
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
    """The color of original `index`; colors repeat after eight, so patches are numbered, too."""
    return COLORS[index % len(COLORS)]


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
