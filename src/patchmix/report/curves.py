"""Training curves: the values of metrics.jsonl over epochs, images, hours or FLOPs, as a figure and for the report."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from patchmix.report.gallery import uniquely_named
from patchmix.report.style import COLORS, check_suffix, look, panel_grid, style, write
from patchmix.settings import ShowCurves
from patchmix.study.compare import stored_config
from patchmix.study.doctor import loss_terms
from patchmix.study.flops import config_flops
from patchmix.train.log import read_metrics

AXIS_LABELS = {"epochs": "epoch", "images": "images seen", "hours": "hours", "flops": "training FLOPs"}
LACKING = {"images": "config.yaml with its batch size", "hours": "times", "flops": "known FLOPs per image"}
# Key in metrics.jsonl → title, factor. Terms of the loss come before these, whatever a method calls them.
PANELS: dict[str, tuple[str, float]] = {
    "knn": ("kNN accuracy (%)", 100.0),
    "rank": ("effective rank of the features", 1.0),
    "lidar": ("LiDAR of the embeddings", 1.0),
    "mean_cosine": ("mean cosine of random pairs", 1.0),
    "lr": ("learning rate", 1.0),
    "weight_decay": ("weight decay", 1.0),
    "momentum": ("momentum of the key encoder", 1.0),
    "images_per_second": ("images per second", 1.0),
    "data_wait": ("time waited for data (%)", 100.0),
}
NOISY = ("images_per_second", "data_wait")  # the report can smooth these and the losses
BOUNDS = {"chance": ("--", COLORS[5]), "floor": (":", COLORS[2])}  # of a loss: line and color
LINES = ("-", "--", "-.", ":")
MOST_POINTS = 600  # of a curve in the report
Row = dict[str, Any]


def show_curves(settings: ShowCurves) -> list[Path]:
    """Draws the curves of one or several runs into one figure."""
    check_suffix(settings.out)
    if not settings.runs:
        raise ValueError("there is no run to draw; give at least one run's folder")
    for run in settings.runs:
        if not (Path(run) / "metrics.jsonl").is_file():
            raise ValueError(f"{run} has no metrics.jsonl; is it a run's folder?")
    histories = uniquely_named([read_history(run) for run in settings.runs])
    return write({settings.out: curves_figure(histories, axis=settings.axis)})


@dataclass(frozen=True)
class History:
    """The rows of one run's metrics.jsonl; with batch size and FLOPs where they are known."""

    name: str
    rows: Sequence[Row]
    batch_size: int | None = None
    flops_per_image: float | None = None

    def places(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Where some rows lie on each axis that this run has the data for."""
        steps = np.array([row["step"] for row in rows])
        axes: dict[str, Any] = {"epochs": [row["epoch"] for row in rows]}
        if timed := [(row["step"], row["seconds"]) for row in self.rows if row.get("seconds") is not None]:
            moments, seconds = zip((0, 0.0), *timed, strict=True)  # monitor rows have no time: interpolate
            axes["hours"] = np.interp(steps, moments, seconds) / 3600
        if self.batch_size is not None:
            axes["images"] = steps * self.batch_size
        if self.batch_size is not None and self.flops_per_image is not None:
            axes["flops"] = steps * self.batch_size * self.flops_per_image
        return axes

    def last(self, key: str) -> float | None:
        """The newest value of a quantity."""
        return next((float(row[key]) for row in reversed(self.rows) if row.get(key) is not None), None)


def read_history(run: str | Path) -> History:
    """What a run's folder has of metrics, perhaps nothing yet."""
    folder, config = Path(run), stored_config(Path(run))
    path, name = folder / "metrics.jsonl", folder.name or folder.resolve().name
    rows = read_metrics(path) if path.is_file() else []
    if config is None:
        return History(name, rows)
    return History(name, rows, config.train.batch_size, config_flops(config))


def curves_data(histories: Sequence[History], *, most: int = MOST_POINTS) -> dict[str, Any]:
    """What curves.js reads: the axes that all runs have, and a panel for each quantity with the curves of all runs.

    The quantities are the loss's terms, or the loss where no term has a chance level; then PANELS. most: points of a
    curve.
    """
    logged = [history for history in histories if history.rows]
    axes = [[axis, label] for axis, label in AXIS_LABELS.items() if all(axis in each.places([]) for each in logged)]
    keys = {key for history in logged for row in history.rows for key, value in row.items() if value is not None}
    terms = loss_terms(row for history in histories for row in history.rows) or ["loss"]
    panels = []
    for key in (*terms, *PANELS):
        if key in keys:
            title, factor = PANELS.get(key, (f"loss: {key}", 1.0))
            curves = [_curve(key, factor, history, dict(axes), most) for history in histories]
            series = [{"run": run, **curve} for run, curve in enumerate(curves) if curve["y"]]
            panels.append({"key": key, "title": title, "noisy": key not in PANELS or key in NOISY, "series": series})
    return {"runs": [history.name for history in histories], "axes": axes, "panels": panels}


def _curve(key: str, factor: float, history: History, axes: Iterable[str], most: int) -> dict[str, Any]:
    """One run's curve, at even steps with the last point among them; a loss with its bounds."""

    def rounded(values: Iterable[float]) -> list[float]:
        return [float(f"{value:.7g}") for value in values]

    rows = [row for row in history.rows if row.get(key) is not None]
    rows = rows[:: -max(1, -(-len(rows) // most))][::-1]
    places = history.places(rows)
    bounds: dict[str, list[Any]] = {name: [row.get(f"{key}/{name}") for row in rows] for name in BOUNDS}
    return {
        "x": {axis: rounded(places[axis]) for axis in axes if axis in places},
        "y": rounded(factor * row[key] for row in rows),
        "bounds": {name: rounded(levels) for name, levels in bounds.items() if None not in levels},
    }


@style()
def curves_figure(histories: Sequence[History], *, axis: str = "epochs") -> Figure:
    """All quantities of all runs, a panel each, losses between floor and chance."""
    for history in histories:
        if axis not in (known := history.places([])):
            raise ValueError(f"{history.name} has no {LACKING[axis]}; choose the axis among {', '.join(known)}")
    data = curves_data(histories, most=sys.maxsize)
    panels = data["panels"]
    if not panels:
        raise ValueError("there is nothing to draw yet: the metrics have no rows; wait for the first log line")
    figure, axes = panel_grid(len(panels))
    for place, panel in zip(axes, panels, strict=True):
        names = data["runs"] if len(histories) > 1 else [panel["key"]]
        _draw_panel(place, panel, names, axis)
        place.set(title=panel["title"], xlabel=AXIS_LABELS[axis])
        place.locator_params(axis="x", nbins=5)  # hours of a short run have many digits
    figure.tight_layout()
    return figure


def _draw_panel(place: Axes, panel: dict[str, Any], names: Sequence[str], axis: str) -> None:
    drawn: list[tuple[str, float, float]] = []  # bounds, which runs of one batch size share: the longest run's
    for curve in sorted(panel["series"], key=lambda each: -each["x"][axis][-1]):
        color, line = look(curve["run"], LINES)
        xs, ys = curve["x"][axis], curve["y"]
        marker = "o" if len(xs) < 25 else None
        place.plot(xs, ys, line, color=color, marker=marker, markersize=3, label=names[curve["run"]])
        for bound, levels in curve["bounds"].items():
            ends = (bound, levels[0], levels[-1])
            if ends not in drawn:
                dashes, shade = BOUNDS[bound]
                label = None if bound in [name for name, *_ in drawn] else bound
                place.plot(xs, levels, dashes, color=shade, label=label, linewidth=1.0)
                drawn.append(ends)
    if len(place.get_legend_handles_labels()[0]) > 1:
        above_floor: Any = {"loc": "lower left", "bbox_to_anchor": (0.0, 0.07)}  # where no falling loss is
        place.legend(fontsize=7, **above_floor if drawn else {})
