"""The rows of the paper's four ablations and of the comparison of methods, with the paper's numbers; and their table:
mean and interval of every row, printed, as files and as a figure."""

import csv
import io
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from patchmix.config import check_known
from patchmix.evaluate.results import Result, t_quantile
from patchmix.files import replacing, write_text
from patchmix.report.style import COLORS, style

TITLES: dict[str, str] = {
    "mix": "The effect of the mix",
    "num-mix": "The effect of the number of images in a mix",
    "terms": "The effect of the terms of the loss",
    "epochs": "The effect of the length of training",
    "method": "Methods side by side",
}
# The settings that an ablation varies: a user can't set them for all rows.
VARIED = {
    "mix": ("mix", "region_weight"),
    "num-mix": ("num_mix", "mix"),
    "terms": ("region_weight",),
    "method": ("method",),
}

PROTOCOLS = {"knn": "kNN", "linear-fast": "linear"}  # protocol → its name in tables
HEALTH = {"rank": "rank", "mean_cosine": "cosine"}  # where there are no labels
INTERVAL = "±: 95 % interval, Student's t over the seeds; of rows with one seed Wilson's for the test images"

# Linear and kNN accuracy in % on CIFAR-10, then on CIFAR-100; None: it did not converge.
Paper = tuple[float | None, float | None, float, float]
BASELINE, FULL = (89.8, 88.2, 66.0, 61.2), (96.0, 94.6, 78.7, 75.4)


@dataclass(frozen=True)
class AblationRow:
    """One row of a table; everything else is the same in all rows."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    method: str | None = None  # None: the recipe's
    terms: tuple[int, int, int] = (1, 1, 1)  # of the loss that stay, in the order of method.weights: oto, mto, mtm
    length: float = 1.0  # share of the longest training
    paper: Paper | None = None


def _mix(name: str) -> dict[str, Any]:
    return {"mix": name, "region_weight": 0.0}  # only PatchMix has regions of whole patches


ROWS = {
    # Table "mix". Its baseline has the numbers of M = 1 in Table "num_mix", no mix at all. The paper has Mixup and
    # CutMix only together.
    "mix": (
        AblationRow("baseline", _mix("patchmix") | {"num_mix": 1}, paper=BASELINE),
        AblationRow("mixup", _mix("mixup")),
        AblationRow("cutmix", _mix("cutmix")),
        AblationRow("cutmix+mixup", _mix("cutmix+mixup"), paper=(90.6, 88.7, 66.8, 62.3)),
        AblationRow("regionswap", _mix("regionswap"), paper=(92.1, 91.3, 70.4, 64.2)),
        AblationRow("resizemix", _mix("resizemix"), paper=(94.2, 92.1, 77.1, 66.7)),
        AblationRow("patchmix", _mix("patchmix"), paper=FULL),
    ),
    # Table "num_mix".
    "num-mix": (
        AblationRow("m1", {"num_mix": 1}, paper=BASELINE),
        AblationRow("m2", {"num_mix": 2}, paper=(95.6, 94.3, 77.6, 71.1)),
        AblationRow("m3", {"num_mix": 3}, paper=FULL),
        AblationRow("m4", {"num_mix": 4}, paper=(95.7, 94.3, 75.2, 70.9)),
    ),
    # Table "loss".
    "terms": (
        AblationRow("oto", terms=(1, 0, 0), paper=(91.1, 87.0, 69.7, 59.7)),
        AblationRow("mto", terms=(0, 1, 0), paper=(None, None, 61.3, 57.2)),
        AblationRow("mtm", terms=(0, 0, 1), paper=(None, None, 52.6, 47.4)),
        AblationRow("oto+mto", terms=(1, 1, 0), paper=(95.4, 93.8, 77.9, 69.2)),
        AblationRow("oto+mto+mtm", terms=(1, 1, 1), paper=FULL),
    ),
    # Figure "epochs" has no numbers; the tables have those of 800 and 1600 epochs, here half and full.
    "epochs": (
        AblationRow("eighth", length=1 / 8),
        AblationRow("quarter", length=1 / 4),
        AblationRow("half", length=1 / 2, paper=FULL),
        AblationRow("full", paper=(96.4, 95.1, 78.9, 74.6)),
    ),
}
# Table "cifar", ViT-S/2 at 800 epochs.
PAPER_METHODS: dict[str, Paper] = {
    "patchmix": FULL,
    "mocov3": (90.2, 89.1, 66.4, 62.3),
    "dino": (92.6, 91.8, 63.8, 60.6),
    "ibot": (94.8, 93.1, 67.8, 64.2),
    "sdmp": (94.2, 92.1, 77.1, 66.7),
}


def rows_of(ablation: str, methods: Iterable[str]) -> tuple[AblationRow, ...]:
    """All rows of an ablation, in the table's order; `methods` are the names that can be compared."""
    by_method = tuple(AblationRow(name, method=name, paper=PAPER_METHODS.get(name)) for name in methods)
    rows = {**ROWS, "method": by_method}
    check_known(ablation, rows, "ablation")
    return rows[ablation]


def choose_rows(rows: Sequence[AblationRow], names: Sequence[str]) -> tuple[AblationRow, ...]:
    """The named rows, in the table's order; all of them where no name is given."""
    for name in names:
        check_known(name, [row.name for row in rows], "row")
    return tuple(row for row in rows if not names or row.name in names)


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


class Estimate(NamedTuple):
    """A mean with its 95 % interval: over seeds, or of the one seed's test images."""

    mean: float
    low: float
    high: float


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

    @property
    def compared(self) -> dict[str, str]:
        """What is compared, with its name in tables."""
        return HEALTH if self.evaluated_on is None else PROTOCOLS

    @property
    def interval(self) -> str | None:
        """Which interval the scores have; None for health, which has none."""
        return None if self.evaluated_on is None else INTERVAL

    def of(self, row: AblationRow) -> list[AblationRun]:
        return [run for run in self.runs if run.row == row.name]

    def done(self, row: AblationRow) -> list[AblationRun]:
        return [run for run in self.of(row) if run.failure is None]

    def summary(self, row: AblationRow) -> dict[str, Any]:
        """All numbers of a row, means over its seeds; None where there are none. Accuracies are in 0…1."""
        done = self.done(row)
        numbers: dict[str, Any] = {"row": row.name, "seeds": len(done), "failed": len(self.of(row)) - len(done)}
        for name in ("images_seen", "flops_per_image", "seconds"):
            numbers[name] = mean(getattr(run, name) for run in done)
        for protocol, name in PROTOCOLS.items():
            score = self.score(row, protocol)
            numbers |= {f"{name.lower()}_{part}": getattr(score, part, None) for part in Estimate._fields}
        return numbers | {name: getattr(self.score(row, name), "mean", None) for name in HEALTH}

    def score(self, row: AblationRow, key: str) -> Estimate | None:
        """Top-1 in 0…1 by a protocol, or the features' health without an interval; None where there is none."""
        if key in PROTOCOLS:
            return estimate([run.results[key] for run in self.done(row) if key in run.results])
        health = mean(run.health.get(key) for run in self.done(row))
        return None if health is None else Estimate(health, health, health)


def estimate(results: Sequence[Result]) -> Estimate | None:
    """One result: top-1 with Wilson's interval for its test images. Several: their mean with the t-interval."""
    if len(results) > 1:
        return over_seeds([result.top1 for result in results])
    return Estimate(results[0].top1, *results[0].interval()) if results else None


def mean(values: Iterable[float | None]) -> float | None:
    """Of the values that are known."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def over_seeds(values: Sequence[float]) -> Estimate:
    """The mean of two or more values with its t-interval."""
    mean = statistics.fmean(values)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def columns(table: AblationTable) -> list[str]:
    return ["row", "seeds", "images", "GF/image", "seconds", *table.compared.values()]


def cells(table: AblationTable, row: AblationRow) -> list[str]:
    numbers = table.summary(row)
    failed = f", {numbers['failed']} failed" if numbers["failed"] else ""
    texts = [row.name, f"{numbers['seeds']} of {len(table.seeds)}{failed}"]
    for name, form, unit in (("images_seen", ",.0f", 1), ("flops_per_image", ".3g", 1e9), ("seconds", ",.0f", 1)):
        texts.append("–" if numbers[name] is None else format(numbers[name] / unit, form))
    for key in table.compared:
        score = table.score(row, key)
        if score is None:
            texts.append("–")
        elif key in HEALTH:
            texts.append(f"{score.mean:.3g}")
        else:
            texts.append(f"{100 * score.mean:.1f} ± {100 * (score.high - score.low) / 2:.1f}")
    return texts


def print_table(table: AblationTable, console: Console) -> None:
    caption = table.interval or "rank, mean cosine of pairs: no labels"
    printed = Table(title=f"{TITLES[table.ablation]}: {table.data}", caption=caption, box=None, padding=(0, 2, 0, 0))
    for name in columns(table):
        printed.add_column(name, justify="left" if name == "row" else "right", no_wrap=True)
    for row in table.rows:
        printed.add_row(*cells(table, row), style="red" if any(run.failure for run in table.of(row)) else None)
    console.print(printed)


def write_table(table: AblationTable, folder: Path) -> None:
    """ablation.md, .csv, .json and .png, each whole or as it was before."""
    write_text(folder / "ablation.md", markdown(table))
    summaries = [table.summary(row) for row in table.rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(summaries[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(summaries)  # accuracies in 0…1
    write_text(folder / "ablation.csv", out.getvalue())
    content = {
        **{key: getattr(table, key) for key in ("ablation", "data", "evaluated_on", "training")},
        "seeds": list(table.seeds),
        "interval": table.interval,
        "rows": [table.summary(row) | {"runs": [asdict(run) for run in table.of(row)]} for row in table.rows],
    }
    write_text(folder / "ablation.json", json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    if any(run.failure is None for run in table.runs):
        with replacing(folder / "ablation.png") as temporary:
            ablation_figure(table).savefig(temporary, format="png", bbox_inches="tight")


def markdown(table: AblationTable) -> str:
    lines = [f"# {TITLES[table.ablation]}", "", f"Trained on {table.data}: {table.training}.", ""]
    lines += [*markdown_table(columns(table), [cells(table, row) for row in table.rows]), ""]
    if table.evaluated_on is None:
        lines += ["There are no labels: effective rank and mean cosine of the features at the end of the training."]
    else:
        lines += [f"Top-1 accuracy in % on {table.evaluated_on}; {table.interval}."]
    lines += ["images: seen in training, with repetition; GF: 10⁹ FLOPs of training per image, forward and backward."]
    lines += [f"{run.row}, seed {run.seed}, failed: {run.failure}." for run in table.runs if run.failure]
    if any(row.paper for row in table.rows):
        lines += ["", "The paper's numbers (ViT-S/2, its protocol and length; –: not in it, NA: no convergence):", ""]
        head = ["row", "CIFAR-10 kNN", "linear", "CIFAR-100 kNN", "linear"]
        papers = []
        for row in table.rows:
            numbers = ["NA" if value is None else f"{value:.1f}" for value in row.paper] if row.paper else ["–"] * 4
            papers.append([row.name, *(numbers[i] for i in (1, 0, 3, 2))])
        lines += markdown_table(head, papers)
    return "\n".join(lines) + "\n"


def markdown_table(head: Sequence[str], rows: Iterable[Iterable[str | None]]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(map(str, row))} |" for row in rows)]


@style()
def ablation_figure(table: AblationTable) -> Figure:
    """A panel for each score, with the rows as points and their intervals."""
    figure = Figure(figsize=(4.6 * len(table.compared), 0.32 * len(table.rows) + 1.4))
    panels = figure.subplots(1, len(table.compared), sharey=True)
    for axis, (key, name) in zip(panels, table.compared.items(), strict=True):
        axis.set_title(f"{name} of the features" if key in HEALTH else f"{name} accuracy (%)")
        for i, row in enumerate(table.rows):
            if score := table.score(row, key):
                value, low, high = (each if key in HEALTH else 100 * each for each in score)
                bar: Any = [[value - low], [high - value]]
                axis.errorbar([value], [i], xerr=bar, fmt="o", color=COLORS[0], capsize=3, markersize=4)
    panels[0].set_yticks(range(len(table.rows)), [row.name for row in table.rows])
    panels[0].set_ylim(len(table.rows) - 0.5, -0.5)
    figure.suptitle(f"{TITLES[table.ablation]}: {table.data}", fontsize=10)
    figure.tight_layout()
    return figure
