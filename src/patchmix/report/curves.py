"""Training curves: the values of metrics.jsonl over epochs, images, hours or FLOPs, as a figure and for the report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from patchmix.config import Config
from patchmix.report.style import COLORS, check_suffix, look, style, write
from patchmix.settings import ShowCurves
from patchmix.study.compare import stored_config
from patchmix.study.flops import config_flops
from patchmix.train.log import read_metrics

AxisKind = Literal["epochs", "images", "hours", "flops"]
AXIS_LABELS: dict[str, str] = {"epochs": "epoch", "images": "images seen", "hours": "hours", "flops": "training FLOPs"}
# Key in metrics.jsonl → title, factor. Terms of the loss come before these, whatever a method calls them.
PANELS: dict[str, tuple[str, float]] = {
    "knn": ("kNN accuracy (%)", 100.0),
    "rank": ("effective rank of the features", 1.0),
    "mean_cosine": ("mean cosine of random pairs", 1.0),
    "lr": ("learning rate", 1.0),
    "weight_decay": ("weight decay", 1.0),
    "momentum": ("momentum of the key encoder", 1.0),
    "images_per_second": ("images per second", 1.0),
    "data_wait": ("time waited for data (%)", 100.0),
}
NOISY = ("images_per_second", "data_wait")  # smoothed, as the losses are
LINES = ("-", "--", "-.", ":")
MOST_POINTS = 600  # of a curve in the report


def show_curves(settings: ShowCurves) -> list[Path]:
    """Draws the curves of one or several runs into one figure."""
    check_suffix(settings.out)
    if not settings.runs:
        raise ValueError("there is no run to draw; give at least one run's folder")
    histories = [read_history(run) for run in settings.runs]
    return write({settings.out: curves_figure(histories, axis=settings.axis, smoothing=settings.smoothing)})


# ------------------------------------------------------------------------------------------------------------ history


@dataclass(frozen=True)
class History:
    """The rows of one run's metrics.jsonl; with batch size and FLOPs where they are known."""

    name: str
    rows: Sequence[dict[str, Any]]
    batch_size: int | None = None
    flops_per_image: float | None = None

    def axis(self, kind: AxisKind) -> Callable[[dict[str, Any]], float]:
        """The function from a row to its place on the axis; raises a ValueError where this run lacks the data."""
        if kind not in get_args(AxisKind):
            raise ValueError(f"the axis is {kind!r}; it must be one of {', '.join(get_args(AxisKind))}")
        if kind == "epochs":
            return lambda row: float(row["epoch"])
        if kind == "hours":
            timed = [(row["step"], row["seconds"]) for row in self.rows if row.get("seconds") is not None]
            if not timed:
                raise ValueError(f"{self.name} has no times in its metrics; use epochs")
            # Monitor rows have no time: interpolate between the training rows.
            steps, seconds = zip((0, 0.0), *timed, strict=True)
            return lambda row: float(np.interp(row["step"], steps, seconds)) / 3600
        if self.batch_size is None:
            raise ValueError(f"{self.name} has no config.yaml with its batch size; use epochs or hours")
        if kind == "images":
            return lambda row: float(row["step"] * (self.batch_size or 0))
        if self.flops_per_image is None:
            raise ValueError(f"the FLOPs per image of {self.name} are not known; use epochs, images or hours")
        return lambda row: float(row["step"] * (self.batch_size or 0) * (self.flops_per_image or 0))

    def points(self, key: str, kind: AxisKind = "epochs") -> tuple[list[float], list[float]]:
        """Places and values of one quantity, in order; rows without it are left out."""
        place = self.axis(kind)
        rows = [row for row in self.rows if row.get(key) is not None]
        return [place(row) for row in rows], [float(row[key]) for row in rows]

    @property
    def terms(self) -> list[str]:
        """The loss's parts that have a chance level, in the order in which they were logged."""
        names = [key.removesuffix("/chance") for row in self.rows for key in row if key.endswith("/chance")]
        return list(dict.fromkeys(names))

    def last(self, key: str) -> float | None:
        """The newest value of a quantity."""
        values = self.points(key)[1]
        return values[-1] if values else None


def read_history(run: str | Path) -> History:
    """A run folder's metrics; raises a ValueError where it has none."""
    if not (Path(run) / "metrics.jsonl").is_file():
        raise ValueError(f"{run} has no metrics.jsonl; is it a run's folder?")
    return folder_history(Path(run), stored_config(Path(run)))


def folder_history(folder: Path, config: Config | None) -> History:
    """What a folder has of metrics, perhaps nothing yet."""
    path, name = folder / "metrics.jsonl", folder.name or folder.resolve().name
    rows = read_metrics(path) if path.is_file() else []
    if config is None:
        return History(name, rows)
    return History(name, rows, config.train.batch_size, config_flops(config))


# ------------------------------------------------------------------------------------------------------------- figure


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """The moving average Σ weight^age · value, divided by the sum of its weights, so that it starts at the first value.

    weight: 0 leaves the values as they are; the nearer to 1, the smoother.
    """
    if not 0 <= weight < 1:
        raise ValueError(f"smoothing is {weight}; it must be at least 0 and below 1, such as 0.6")
    total, norm, out = 0.0, 0.0, []
    for value in values:
        total, norm = weight * total + value, weight * norm + 1
        out.append(total / norm)
    return out


def panels_of(histories: Sequence[History]) -> list[str]:
    """The quantities to draw: the loss's terms, or the loss where no term has a chance level; then PANELS."""
    terms = list(dict.fromkeys(term for history in histories for term in history.terms)) or ["loss"]
    logged = {key for history in histories for row in history.rows for key, value in row.items() if value is not None}
    return [key for key in (*terms, *PANELS) if key in logged]


def title_of(panel: str) -> str:
    return PANELS[panel][0] if panel in PANELS else f"loss: {panel}"


def curves_figure(
    histories: Sequence[History],
    *,
    axis: AxisKind = "epochs",
    smoothing: float = 0.0,
    references: dict[str, float] | None = None,
) -> Figure:
    """All quantities of all runs, a panel each, losses between floor and chance.

    Smoothed curves have their raw values behind them. references: accuracies in 0…1, lines in the kNN panel.
    """
    panels = panels_of(histories)
    if not panels:
        raise ValueError("there is nothing to draw yet: the metrics have no rows; wait for the first log line")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    with style():
        figure = Figure(figsize=(3.5 * columns, 2.6 * rows))
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for place, panel in zip(axes[: len(panels)], panels, strict=True):
            weight = smoothing if panel not in PANELS or panel in NOISY else 0.0
            _draw_panel(place, panel, histories, axis, weight)
            if panel == "knn":
                for i, (name, value) in enumerate((references or {}).items()):
                    place.axhline(100 * value, color=look(len(histories) + i)[0], linestyle="--", label=name)
            if len(place.get_legend_handles_labels()[0]) > 1:
                place.legend(fontsize=7)
            place.set(title=title_of(panel), xlabel=AXIS_LABELS[axis])
        for place in axes[len(panels) :]:
            place.set_axis_off()
        figure.tight_layout()
    return figure


def _draw_panel(place: Axes, panel: str, histories: Sequence[History], kind: AxisKind, weight: float) -> None:
    factor = PANELS[panel][1] if panel in PANELS else 1.0
    bounds_drawn: set[tuple[float, ...]] = set()
    for i, history in enumerate(histories):
        color, line = look(i, LINES)
        xs, ys = history.points(panel, kind)
        if not xs:
            continue
        ys = [factor * y for y in ys]
        if weight:
            place.plot(xs, ys, color=color, alpha=0.25, linewidth=0.8)
        marker = "o" if len(xs) < 25 else None
        label = history.name if len(histories) > 1 else panel
        place.plot(xs, smooth(ys, weight), line, color=color, marker=marker, markersize=3, label=label)
        for bound, dashes, shade in (("chance", "--", COLORS[5]), ("floor", ":", COLORS[2])):
            at, level = history.points(f"{panel}/{bound}", kind)
            drawn = (*level[:1], *level[-1:], float(bound == "floor"))
            if at and drawn not in bounds_drawn:  # runs of one batch size share their bounds
                label = bound if not any(d[-1] == drawn[-1] for d in bounds_drawn) else ""
                place.plot(at, level, color=shade, linestyle=dashes, label=label, linewidth=1.0)
                bounds_drawn.add(drawn)


# -------------------------------------------------------------------------------------------------------- for the page


def curves_data(histories: Sequence[History]) -> dict[str, Any] | None:
    """What curves.js reads: panels with the series of all runs; None where there is nothing to draw."""
    logged = [history for history in histories if history.rows]
    axes = [kind for kind in get_args(AxisKind) if all(_has_axis(history, kind) for history in logged)]
    panels = [_panel(key, histories, axes) for key in panels_of(histories)]
    if not panels:
        return None
    return {
        "runs": [history.name for history in histories],
        "axes": [[kind, AXIS_LABELS[kind]] for kind in axes],
        "panels": panels,
    }


def _panel(key: str, histories: Sequence[History], axes: Sequence[AxisKind]) -> dict[str, Any]:
    factor = PANELS[key][1] if key in PANELS else 1.0
    series = []
    for run, history in enumerate(histories):
        rows = _thinned([row for row in history.rows if row.get(key) is not None])
        if not rows:
            continue
        bounds = {
            name: [_round(row[f"{key}/{name}"]) for row in rows]
            for name in ("chance", "floor")
            if all(row.get(f"{key}/{name}") is not None for row in rows)
        }
        places = {kind: history.axis(kind) for kind in axes}
        series.append(
            {
                "run": run,
                "x": {kind: [_round(place(row)) for row in rows] for kind, place in places.items()},
                "y": [_round(factor * row[key]) for row in rows],
                "bounds": bounds,
            }
        )
    return {"key": key, "title": title_of(key), "noisy": key not in PANELS or key in NOISY, "series": series}


def _has_axis(history: History, kind: AxisKind) -> bool:
    try:
        history.axis(kind)
    except ValueError:
        return False
    return True


def _thinned(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most about MOST_POINTS rows at even steps, the last among them."""
    step = -(-len(rows) // MOST_POINTS) if rows else 1
    return [row for i, row in enumerate(rows) if (len(rows) - 1 - i) % step == 0]


def _round(value: float) -> float:
    return float(f"{value:.7g}")
