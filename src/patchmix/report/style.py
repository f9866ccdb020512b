"""One look for all figures: colour-blind-safe colours (Okabe and Ito), thin lines, no display needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler

mpl.use("Agg")

from matplotlib.figure import Figure

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
MATRIX = "cividis"

SETTINGS: dict[str, Any] = {
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
    with mpl.rc_context(SETTINGS):  # type: ignore[arg-type]
        yield


def check_suffix(path: Path) -> None:
    """A ValueError where `save` would not know the format; called before the work, not after it."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"figure {path} must end in .png, .svg or .pdf")


def save(figure: Figure, path: Path) -> Path:
    """PNG, SVG or PDF, by the name's ending."""
    check_suffix(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    return path
