"""The table of an ablation: mean and interval of every row, printed, as files and as a figure."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from patchmix.evaluate.results import Result
from patchmix.files import replacing, write_text
from patchmix.report.style import COLORS, style
from patchmix.study.ablation import TITLES, AblationRow

PROTOCOLS = {"knn": "kNN", "linear-fast": "linear"}  # protocol → its name in tables
HEALTH = {"rank": "rank", "mean_cosine": "cosine"}  # where there are no labels
MARKERS = "os^D"  # another one each time that the colors repeat


@dataclass(frozen=True)
class AblationRun:
    """One row with one seed. `failure`: why it has no encoder."""

    row: str
    seed: int
    folder: str
    images_seen: int | None = None
    seconds: float | None = None
    flops_per_image: float | None = None
    results: dict[str, Result] = field(default_factory=dict)  # by protocol
    health: dict[str, float] = field(default_factory=dict)  # at the end of the training
    failure: str | None = None


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval: over seeds, or of the one seed's test images."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def text(self) -> str:
        """In %, ± half of the interval's width."""
        return f"{100 * self.mean:.1f} ± {50 * (self.high - self.low):.1f}"


@dataclass(frozen=True)
class AblationTable:
    """An ablation so far: its rows in order, and the runs that are finished or have failed."""

    ablation: str
    rows: Sequence[AblationRow]
    seeds: Sequence[int]
    data: str
    evaluated_on: str | None  # None: nothing has labels
    training: str  # what all rows have in common, as text
    runs: Sequence[AblationRun]

    def of(self, row: AblationRow) -> list[AblationRun]:
        return [run for run in self.runs if run.row == row.name]


# ------------------------------------------------------------------------------------------------------- intervals


def estimate(results: Sequence[Result]) -> Estimate | None:
    """One result: top-1 with Wilson's interval for its test images. Several: their mean with the t-interval."""
    values = [result.top1 for result in results]
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Estimate(mean, *results[0].interval(), seeds=1)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half, seeds=len(values))


def t_quantile(freedom: int, share: float = 0.95) -> float:
    """t with P(|T| < t) = `share` for Student's distribution."""
    low, high = 0.0, 1.0
    while t_share(high, freedom) < share:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_share(middle, freedom) < share else (low, middle)
    return high


def t_share(t: float, freedom: int) -> float:
    """P(|T| < t), by the finite series in the angle θ = atan(t / √ν) (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    theta = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(theta), freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):  # ν odd: cos + 2/3 cos³ + …; ν even: 1 + 1/2 cos² + …
        total += term
        term *= cosine * cosine * k / (k + 1)
    total *= math.sin(theta)
    return 2 / math.pi * (theta + total) if odd else total


def interval_text(table: AblationTable) -> str:
    """Which interval the table has."""
    estimates = [_estimate(table, row, protocol) for row in table.rows for protocol in PROTOCOLS]
    counts = {each.seeds for each in estimates if each is not None}
    one, several = "Wilson's for the test images", "Student's t over the seeds"
    if counts == {1}:
        return f"±: 95 % interval, {one} (one seed; it does not cover other seeds)"
    if 1 in counts:
        return f"±: 95 % interval, {several}; of rows with one seed {one}"
    return f"±: 95 % interval, {several}"


# --------------------------------------------------------------------------------------------------------- the table


def columns(table: AblationTable) -> list[str]:
    scores = PROTOCOLS if table.evaluated_on is not None else HEALTH
    return ["row", "seeds", "images", "GF/image", "seconds", *scores.values()]


def cells(table: AblationTable, row: AblationRow) -> list[str]:
    runs = table.of(row)
    done = [run for run in runs if run.failure is None]
    failed = len(runs) - len(done)
    texts = [row.name, f"{len(done)} of {len(table.seeds)}" + (f", {failed} failed" if failed else "")]
    texts += [
        _number([run.images_seen for run in done], ",.0f"),
        _number([_giga(run.flops_per_image) for run in done], ".3g"),
        _number([run.seconds for run in done], ",.0f"),
    ]
    if table.evaluated_on is None:
        return texts + [_number([run.health.get(name) for run in done], ".3g") for name in HEALTH]
    estimates = [_estimate(table, row, protocol) for protocol in PROTOCOLS]
    return texts + ["–" if each is None else each.text for each in estimates]


def print_table(table: AblationTable, console: Console) -> None:
    caption = interval_text(table) if table.evaluated_on is not None else "rank, mean cosine of pairs: no labels"
    printed = Table(title=f"{TITLES[table.ablation]}: {table.data}", caption=caption, box=None, padding=(0, 2, 0, 0))
    for name in columns(table):
        printed.add_column(name, justify="left" if name == "row" else "right", no_wrap=True)
    for row in table.rows:
        printed.add_row(*cells(table, row), style="red" if any(run.failure for run in table.of(row)) else None)
    console.print(printed)


# --------------------------------------------------------------------------------------------------------- the files


def write_table(table: AblationTable, folder: Path) -> list[Path]:
    """ablation.md, .csv, .json and .png, each whole or as it was before."""
    paths = [folder / f"ablation{ending}" for ending in (".md", ".csv", ".json", ".png")]
    write_text(paths[0], markdown(table))
    write_text(paths[1], comma_separated(table))
    write_text(paths[2], json.dumps(as_dict(table), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    if any(run.failure is None for run in table.runs):
        with replacing(paths[3]) as temporary:
            ablation_figure(table).savefig(temporary, format="png", bbox_inches="tight")
    return [path for path in paths if path.exists()]


def markdown(table: AblationTable) -> str:
    names = columns(table)
    lines = [f"# {TITLES[table.ablation]}", "", f"Trained on {table.data}: {table.training}.", ""]
    lines += [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    lines += [f"| {' | '.join(cells(table, row))} |" for row in table.rows]
    lines += [""]
    if table.evaluated_on is None:
        lines += ["There are no labels: effective rank and mean cosine of the features at the end of the training."]
    else:
        lines += [f"Top-1 accuracy in % on {table.evaluated_on}; {interval_text(table)}."]
    lines += ["images: seen in training, with repetition; GF: 10⁹ FLOPs of training per image, forward and backward."]
    lines += [f"{run.row}, seed {run.seed}, failed: {run.failure}." for run in table.runs if run.failure]
    if any(row.paper for row in table.rows):
        lines += ["", "The paper's numbers (ViT-S/2, its protocol and length; –: not in it, NA: no convergence):"]
        lines += ["", "| row | CIFAR-10 kNN | linear | CIFAR-100 kNN | linear |", "|---|---|---|---|---|"]
        for row in table.rows:
            pairs = [row.paper.get(data) for data in ("cifar10", "cifar100")]
            values = [v for pair in pairs for v in (["–", "–"] if pair is None else [_or_na(pair[1]), _or_na(pair[0])])]
            lines += [f"| {row.name} | {' | '.join(values)} |"]
    return "\n".join(lines) + "\n"


def comma_separated(table: AblationTable) -> str:
    """One line a row; accuracies in 0…1."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(_entry(table, table.rows[0])), lineterminator="\n")
    writer.writeheader()
    for row in table.rows:
        writer.writerow(_entry(table, row))
    return out.getvalue()


def as_dict(table: AblationTable) -> dict[str, Any]:
    """Everything, also the single runs."""
    rows = [{**_entry(table, row), "runs": [asdict(run) for run in table.of(row)]} for row in table.rows]
    return {
        "ablation": table.ablation,
        "data": table.data,
        "evaluated_on": table.evaluated_on,
        "training": table.training,
        "seeds": list(table.seeds),
        "interval": interval_text(table) if table.evaluated_on is not None else None,
        "rows": rows,
    }


def _entry(table: AblationTable, row: AblationRow) -> dict[str, Any]:
    runs = table.of(row)
    done = [run for run in runs if run.failure is None]
    entry: dict[str, Any] = {
        "row": row.name,
        "seeds": len(done),
        "failed": len(runs) - len(done),
        "images_seen": _mean([run.images_seen for run in done]),
        "flops_per_image": _mean([run.flops_per_image for run in done]),
        "seconds": _mean([run.seconds for run in done]),
    }
    for protocol, name in PROTOCOLS.items():
        found = _estimate(table, row, protocol)
        for part in ("mean", "low", "high"):
            entry[f"{name.lower()}_{part}"] = None if found is None else getattr(found, part)
    for name in HEALTH:
        entry[name] = _mean([run.health.get(name) for run in done])
    return entry


# --------------------------------------------------------------------------------------------------------- the figure


def ablation_figure(table: AblationTable) -> Figure:
    """A panel for each protocol: rows as points with their intervals; over the cost for methods and lengths."""
    names = PROTOCOLS if table.evaluated_on is not None else HEALTH
    with style():
        figure = Figure(figsize=(4.6 * len(names), 0.32 * len(table.rows) + 2.2))
        for axis, (key, title) in zip(figure.subplots(1, len(names), squeeze=False).flat, names.items(), strict=True):
            if table.ablation in ("method", "epochs"):
                _draw_over_cost(axis, table, key)
            else:
                _draw_rows(axis, table, key)
            axis.set_title(f"{title} accuracy (%)" if table.evaluated_on is not None else f"{title} of the features")
        figure.suptitle(f"{TITLES[table.ablation]}: {table.data}", fontsize=10)
        figure.tight_layout()
    return figure


def _draw_rows(axis: Axes, table: AblationTable, key: str) -> None:
    for place, row in enumerate(table.rows):
        point = _point(table, row, key)
        if point is not None:
            value, low, high = point
            bar = [[value - low], [high - value]]
            axis.errorbar([value], [place], xerr=bar, fmt="o", color=COLORS[0], capsize=3, markersize=4)
    axis.set_yticks(range(len(table.rows)), [row.name for row in table.rows])
    axis.set_ylim(len(table.rows) - 0.5, -0.5)


def _draw_over_cost(axis: Axes, table: AblationTable, key: str) -> None:
    by_length = table.ablation == "epochs"
    for i, row in enumerate(table.rows):
        done = [run for run in table.of(row) if run.failure is None]
        cost = _mean([run.images_seen if by_length else _giga(run.flops_per_image) for run in done])
        point = _point(table, row, key)
        if point is not None and cost is not None:
            value, low, high = point
            (color, marker), bar = look(i), [[value - low], [high - value]]
            axis.errorbar([cost], [value], yerr=bar, fmt=marker, color=color, capsize=3, markersize=4, label=row.name)
    if by_length:
        axis.set_xscale("log")
    else:
        axis.set_xlim(left=0)  # distances then show how much more one costs than another
    axis.set_xlabel("images seen" if by_length else "GFLOPs of training per image")
    if axis.containers:
        axis.legend(fontsize=7)


def look(number: int) -> tuple[str, str]:
    """Color and marker of one of many."""
    return COLORS[number % len(COLORS)], MARKERS[number // len(COLORS) % len(MARKERS)]


def _point(table: AblationTable, row: AblationRow, key: str) -> tuple[float, float, float] | None:
    """Value and interval as the figure shows them."""
    if table.evaluated_on is not None:
        found = _estimate(table, row, key)
        return None if found is None else (100 * found.mean, 100 * found.low, 100 * found.high)
    value = _mean([run.health.get(key) for run in table.of(row) if run.failure is None])
    return None if value is None else (value, value, value)


def _estimate(table: AblationTable, row: AblationRow, protocol: str) -> Estimate | None:
    return estimate([run.results[protocol] for run in table.of(row) if protocol in run.results])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _number(values: Sequence[float | None], form: str) -> str:
    mean = _mean(values)
    return "–" if mean is None else format(mean, form)


def _giga(value: float | None) -> float | None:
    return None if value is None else value / 1e9


def _or_na(value: float | None) -> str:
    return "NA" if value is None else f"{value:.1f}"
