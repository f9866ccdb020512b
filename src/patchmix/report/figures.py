"""The paper's figures on any data: how images are mixed, what the targets are, how training went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from patchmix.mixing import overlap
from patchmix.mixing.patchmix import PatchMix, owners, share
from patchmix.report.style import COLORS, MATRIX, style


def mix_figure(images: Tensor, *, patch_size: int, num_mix: int = 3, seed: int = 0) -> Figure:
    """Originals above, mixed images below with every patch framed in its owner's colour. images: uint8 (N, H, W, 3)."""
    n = len(images)
    batch = images.permute(0, 3, 1, 2)
    mixed = PatchMix(patch_size, num_mix, torch.Generator().manual_seed(seed))(batch, num_mix)
    rows, columns = batch.shape[2] // patch_size, batch.shape[3] // patch_size
    order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(seed))
    owner = owners(n, num_mix, order).view(n, rows, columns)
    with style():
        figure = Figure(figsize=(1.35 * n, 3.3))
        axes = figure.subplots(2, n, squeeze=False)
        for i in range(n):
            _picture(axes[0, i], images[i], f"image {i}", COLORS[i % len(COLORS)])
            parts = " + ".join(
                f"{_fraction(mixed.share[i, j].item(), num_mix)}·{j}" for j in range(n) if mixed.share[i, j] > 0
            )
            _picture(axes[1, i], mixed.images[i].permute(1, 2, 0), parts)
            for r in range(rows):
                for c in range(columns):
                    _frame(axes[1, i], c, r, patch_size, COLORS[int(owner[i, r, c]) % len(COLORS)])
        figure.suptitle(f"PatchMix of {num_mix} images: each patch is framed in the colour of its original")
        figure.tight_layout()
    return figure


def targets_figure(n: int = 9, num_mix: int = 3) -> Figure:
    """The three target matrices for a batch of n: origin-to-origin, mix-to-origin, mix-to-mix (ω as printed)."""
    own = share(n, num_mix)
    matrices = [
        ("origin-to-origin", "itself", torch.eye(n), "original", "original"),
        ("mix-to-origin", f"1/{num_mix} each", own, "mixed image", "original"),
        ("mix-to-mix", "ω = 1 − |d|/M", overlap(own, own), "mixed image", "mixed image"),
    ]
    with style():
        figure = Figure(figsize=(10.2, 3.4))
        for axis, (title, rule, matrix, query, key) in zip(figure.subplots(1, 3), matrices, strict=True):
            axis.imshow(matrix, cmap=MATRIX, vmin=0, vmax=1)
            axis.set(title=f"{title}: {rule}", xlabel=f"{key} (key)", ylabel=f"{query} (query)")
            axis.grid(False)
            axis.set_xticks(range(n))
            axis.set_yticks(range(n))
            for i in range(n):
                for j in range(n):
                    value = matrix[i, j].item()
                    if value > 0:
                        color = "black" if value > 0.6 else "white"
                        text = _fraction(value, num_mix)
                        axis.text(j, i, text, ha="center", va="center", fontsize=7, color=color)
        figure.tight_layout()
    return figure


def curves_figure(rows: Sequence[dict[str, Any]], *, references: dict[str, float] | None = None) -> Figure:
    """Losses between floor and chance, kNN, rank and rates, from the rows of metrics.jsonl.

    `references` are horizontal lines in the kNN panel, such as raw pixels.
    """
    train = [row for row in rows if row["kind"] == "train"]
    monitor = [row for row in rows if row["kind"] == "monitor"]
    terms = [key.removesuffix("/chance") for key in (train[0] if train else {}) if key.endswith("/chance")]
    with style():
        figure = Figure(figsize=(10.2, 5.6))
        axes = figure.subplots(2, 3).flatten()
        for axis, term in zip(axes, terms[:3], strict=False):
            _line(axis, train, term, color=COLORS[0], label=term)
            _line(axis, train, f"{term}/chance", color=COLORS[5], label="chance", linestyle="--")
            _line(axis, train, f"{term}/floor", color=COLORS[2], label="floor", linestyle=":")
            axis.set(title=f"loss: {term}", xlabel="epoch")
            axis.legend(fontsize=7)
        knn, health, rates = axes[3:]
        if any("knn" in row for row in monitor):
            _line(knn, monitor, "knn", color=COLORS[0], label="encoder", marker="o", scale=100)
            for i, (name, value) in enumerate((references or {}).items()):
                knn.axhline(100 * value, color=COLORS[i + 1], linestyle="--", label=name)
            knn.legend(fontsize=7)
        knn.set(title="kNN accuracy (%)", xlabel="epoch")
        _line(health, monitor, "rank", color=COLORS[0], label="effective rank", marker="o")
        health.set(title="effective rank of the features", xlabel="epoch")
        _line(rates, train, "lr", color=COLORS[0], label="learning rate")
        rates.set(title="learning rate", xlabel="epoch")
        figure.tight_layout()
    return figure


def _line(axis: Axes, rows: Sequence[dict[str, Any]], key: str, *, scale: float = 1.0, **look: Any) -> None:
    points = [(row["epoch"], row[key] * scale) for row in rows if row.get(key) is not None]
    if points:
        axis.plot(*zip(*points, strict=True), **look)


def _picture(axis: Axes, image: Tensor, title: str, color: str = "black") -> None:
    axis.imshow(np.asarray(image))
    axis.set_title(title, fontsize=7, color=color)
    axis.set_axis_off()


def _frame(axis: Axes, column: int, row: int, size: int, color: str) -> None:
    from matplotlib.patches import Rectangle

    inset = 0.04 * size
    corner = (column * size - 0.5 + inset, row * size - 0.5 + inset)
    axis.add_patch(Rectangle(corner, size - 2 * inset, size - 2 * inset, fill=False, edgecolor=color, linewidth=1.0))


def _fraction(value: float, parts: int) -> str:
    """⅓ rather than 0.333."""
    count = round(value * parts)
    if abs(value - count / parts) > 1e-4:
        return f"{value:.2f}"
    return "1" if count == parts else f"{count}/{parts}"
