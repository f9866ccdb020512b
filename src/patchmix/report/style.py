"""One look for all figures: colors for color-blind readers (Okabe and Ito), thin lines, no display needed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler

mpl.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

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


@contextmanager
def style() -> Iterator[None]:
    """For `with style():`, or for a function that draws: `@style()`."""
    with mpl.rc_context(RC):  # type: ignore[arg-type]
        yield


def check_suffix(path: Path) -> None:
    """Raises a ValueError for formats that `save` can't write; call it before the work."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"figure {path} must end in .png, .svg or .pdf")


def save(figure: Figure, path: Path) -> Path:
    """Writes PNG, SVG or PDF, by the file name's ending."""
    check_suffix(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    return path


def write(figures: Mapping[Path, Figure]) -> list[Path]:
    """Saves figures and prints where."""
    for path, figure in figures.items():
        print(f"wrote {save(figure, path)}")
    return list(figures)


# ---------------------------------------------------------------------------------------------------- parts of figures


def picture_grid(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, np.ndarray]:
    """A figure of `size` inches and its axes, (rows, columns), without frames and ticks."""
    figure = Figure(figsize=size)
    axes: np.ndarray = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    return figure, axes


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
