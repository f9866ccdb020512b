"""One look for all figures: colors for color-blind readers (Okabe and Ito), thin lines, no display needed."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.rcsetup import cycler

mpl.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from patchmix.files import replacing

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
MATRIX = "cividis"

RC: dict[str, Any] = {
    "figure.dpi": 120,
    "savefig.dpi": 160,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "lines.linewidth": 1.4,
    "axes.prop_cycle": cycler(color=COLORS),
    "legend.frameon": False,
    "svg.hashsalt": "patchmix",  # the same figure gives the same file
}


style = partial(mpl.rc_context, RC)  # type: ignore[arg-type]  # `@style()` stands above functions that draw


def check_suffix(path: Path) -> None:
    """Raises a ValueError for formats that `write` does not take; call it before the work."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"figure {path} must end in .png, .svg or .pdf")


def write(figures: Mapping[Path, Figure]) -> list[Path]:
    """Saves figures as PNG, SVG or PDF, by the file names' endings, and prints where."""
    for path, figure in figures.items():
        with replacing(path) as temporary:
            figure.savefig(temporary, format=path.suffix[1:], bbox_inches="tight")
        print(f"wrote {path}")
    return list(figures)


def picture_grid(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, np.ndarray]:
    """A figure of `size` inches and its axes, (rows, columns), without frames and ticks."""
    figure = Figure(figsize=size)
    axes: np.ndarray = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    return figure, axes


def panel_grid(count: int) -> tuple[Figure, list[Axes]]:
    """A figure and the axes of `count` charts, three in a row."""
    columns = min(3, count)
    rows = -(-count // columns)
    figure, axes = picture_grid(rows, columns, (3.5 * columns, 2.6 * rows))
    for axis in axes.flat[:count]:
        axis.set_axis_on()
    return figure, list(axes.flat[:count])


def picture(axis: Axes, image: np.ndarray, title: str = "") -> None:
    """An image without axes, with a small title. image: (H, W, 3), uint8 or floats in [0, 1]."""
    axis.imshow(image, interpolation="nearest" if max(image.shape[:2]) < 128 else "antialiased")
    axis.set_title(title, fontsize=7)
    axis.set_axis_off()


def outline(axis: Axes, color: str, *, width: float = 2) -> None:
    """A colored frame around the picture in `axis`."""
    axis.add_patch(Rectangle((0, 0), 1, 1, transform=axis.transAxes, fill=False, edgecolor=color, linewidth=width))


def look(index: int, marks: Sequence[str] = ("",)) -> tuple[str, str]:
    """Color and mark (of a point, a line) of one of many: eight colors, then the same with the next mark."""
    return COLORS[index % len(COLORS)], marks[index // len(COLORS) % len(marks)]


def short(name: str, length: int) -> str:
    """A run's name in at most `length` characters."""
    return name if len(name) <= length else f"{name[: length - 1]}…"
