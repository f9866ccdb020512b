"""How training went: what metrics.jsonl says, on an axis of epochs, images, hours or FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from patchmix.report.style import COLORS, style
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


@dataclass(frozen=True)
class History:
    """The rows of one run's metrics.jsonl and what turns its steps into images and FLOPs, where that is known."""

    name: str
    rows: Sequence[dict[str, Any]]
    batch_size: int | None = None
    flops_per_image: float | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def axis(self, kind: AxisKind) -> Callable[[dict[str, Any]], float]:
        """What turns a row into its place on the axis; a ValueError where this run does not know it."""
        if kind not in get_args(AxisKind):
            raise ValueError(f"the axis is {kind!r}; it must be one of {', '.join(get_args(AxisKind))}")
        if kind == "epochs":
            return lambda row: float(row["epoch"])
        if kind == "hours":
            timed = [(row["step"], row["seconds"]) for row in self.rows if row.get("seconds") is not None]
            if not timed:
                raise ValueError(f"{self.name} has no times in its metrics; use epochs")
            # Monitor rows carry no time: theirs lies between those of the training rows around them.
            steps, seconds = zip((0, 0.0), *timed, strict=True)
            return lambda row: float(np.interp(row["step"], steps, seconds)) / 3600
        if self.batch_size is None:
            raise ValueError(f"{self.name} has no config.yaml that says its batch size; use epochs or hours")
        if kind == "images":
            return lambda row: float(row["step"] * (self.batch_size or 0))
        if self.flops_per_image is None:
            raise ValueError(f"the FLOPs per image of {self.name} are not given; use epochs, images or hours")
        return lambda row: float(row["step"] * (self.batch_size or 0) * (self.flops_per_image or 0))

    def points(self, key: str, kind: AxisKind = "epochs") -> tuple[list[float], list[float]]:
        """Places and values of one quantity, in order; rows without it are left out."""
        place = self.axis(kind)
        found = [(place(row), float(row[key])) for row in self.rows if row.get(key) is not None]
        return [x for x, _ in found], [y for _, y in found]

    @property
    def terms(self) -> list[str]:
        """The loss's parts that have a chance level, in the order in which they were logged."""
        names = [key.removesuffix("/chance") for row in self.rows for key in row if key.endswith("/chance")]
        return list(dict.fromkeys(names))


def read_history(run: str | Path, *, flops_per_image: float | None = None) -> History:
    """A run folder's metrics; a ValueError where it has none."""
    folder = Path(run)
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder} has no metrics.jsonl; is it a run's folder?")
    config = read_config(folder)
    batch_size = config.get("train", {}).get("batch_size")
    name = folder.name or folder.resolve().name
    return History(name, read_metrics(path), batch_size, flops_per_image, config)


def read_config(folder: Path) -> dict[str, Any]:
    """config.yaml as plain values; {} where there is none."""
    path = folder / "config.yaml"
    if not path.is_file():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML; restore it from the run's checkpoint") from error
    return content if isinstance(content, dict) else {}


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
    """What there is to draw: the loss's terms, or the loss alone where no term has a chance level; then PANELS."""
    terms = list(dict.fromkeys(term for history in histories for term in history.terms)) or ["loss"]
    logged = {key for history in histories for row in history.rows for key, value in row.items() if value is not None}
    return [key for key in (*terms, *PANELS) if key in logged]


def title_of(panel: str) -> str:
    return PANELS[panel][0] if panel in PANELS else f"loss: {panel}"


def curves_figure(rows: Sequence[dict[str, Any]], *, references: dict[str, float] | None = None) -> Figure:
    """One run's curves over epochs, from the rows of metrics.jsonl.

    `references` are horizontal lines in the kNN panel, such as raw pixels.
    """
    return histories_figure([History("run", rows)], references=references)


def histories_figure(
    histories: Sequence[History],
    *,
    axis: AxisKind = "epochs",
    smoothing: float = 0.0,
    references: dict[str, float] | None = None,
) -> Figure:
    """All quantities of all runs, a panel each: losses between floor and chance, kNN, rank, schedules, throughput.

    Smoothed losses have their raw values behind them. `references`: accuracies in 0…1, drawn in the kNN panel.
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
                    color = COLORS[(len(histories) + i) % len(COLORS)]
                    place.axhline(100 * value, color=color, linestyle="--", label=name)
            if len(place.get_legend_handles_labels()[0]) > 1:
                place.legend(fontsize=7)
            place.set(title=title_of(panel), xlabel=AXIS_LABELS[axis])
        for place in axes[len(panels) :]:
            place.set_axis_off()
        figure.tight_layout()
    return figure


def _draw_panel(place: Axes, panel: str, histories: Sequence[History], kind: AxisKind, weight: float) -> None:
    factor = PANELS[panel][1] if panel in PANELS else 1.0
    several = len(histories) > 1
    bounds_drawn: set[tuple[float, ...]] = set()
    for i, history in enumerate(histories):
        color, line = COLORS[i % len(COLORS)], LINES[(i // len(COLORS)) % len(LINES)]
        xs, ys = history.points(panel, kind)
        ys = [factor * y for y in ys]
        if not xs:
            continue
        if weight:
            place.plot(xs, ys, color=color, alpha=0.25, linewidth=0.8)
        marker = "o" if len(xs) < 25 else None
        label = history.name if several else panel
        place.plot(xs, smooth(ys, weight), line, color=color, marker=marker, markersize=3, label=label)
        for bound, look, shade in (("chance", "--", COLORS[5]), ("floor", ":", COLORS[2])):
            at, level = history.points(f"{panel}/{bound}", kind)
            drawn = (*level[:1], *level[-1:], float(bound == "floor"))
            if at and drawn not in bounds_drawn:  # runs of one batch size share their bounds
                label = bound if not any(d[-1] == drawn[-1] for d in bounds_drawn) else ""
                place.plot(at, level, color=shade, linestyle=look, label=label, linewidth=1.0)
                bounds_drawn.add(drawn)
