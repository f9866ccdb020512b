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

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from patchmix.config import check_known
from patchmix.evaluate.results import Result, t_quantile
from patchmix.files import replacing, write_text
from patchmix.report.style import COLORS, look, style

TITLES: dict[str, str] = {
    "mix": "The effect of the mix",
    "num-mix": "The effect of the number of images in a mix",
    "terms": "The effect of the terms of the loss",
    "epochs": "The effect of the length of training",
    "method": "Methods side by side",
}
TERMS = ("oto", "mto", "mtm")  # origin-to-origin, mix-to-origin, mix-to-mix: the order of method.weights
# The settings that an ablation varies: a user can't set them for all rows.
VARIED: dict[str, tuple[str, ...]] = {
    "mix": ("mix", "region_weight"),
    "num-mix": ("num_mix", "mix"),
    "terms": (),
    "epochs": (),
    "method": ("method",),
}

PROTOCOLS = {"knn": "kNN", "linear-fast": "linear"}  # protocol → its name in tables
HEALTH = {"rank": "rank", "mean_cosine": "cosine"}  # where there are no labels
MARKERS = "os^D"  # another one each time that the colors repeat


Paper = dict[str, tuple[float | None, float | None]]  # data → linear, kNN in %; None: it did not converge


@dataclass(frozen=True)
class AblationRow:
    """One row of a table; everything else is the same in all rows."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    method: str | None = None  # None: the recipe's
    terms: tuple[str, ...] | None = None  # of the loss; None: all
    length: float = 1.0  # share of the longest training
    paper: Paper = field(default_factory=dict)


def _paper(c10_linear: float | None, c10_knn: float | None, c100_linear: float, c100_knn: float) -> Paper:
    return {"cifar10": (c10_linear, c10_knn), "cifar100": (c100_linear, c100_knn)}


_BASELINE, _FULL = _paper(89.8, 88.2, 66.0, 61.2), _paper(96.0, 94.6, 78.7, 75.4)


def _mix(name: str) -> dict[str, Any]:
    return {"mix": name, "region_weight": 0.0}  # only PatchMix has regions of whole patches


# Table "mix". Its baseline has the numbers of M = 1 in Table "num_mix", no mix at all. The paper has Mixup and CutMix
# only together.
MIX = (
    AblationRow("baseline", _mix("patchmix") | {"num_mix": 1}, paper=_BASELINE),
    AblationRow("mixup", _mix("mixup")),
    AblationRow("cutmix", _mix("cutmix")),
    AblationRow("cutmix+mixup", _mix("cutmix+mixup"), paper=_paper(90.6, 88.7, 66.8, 62.3)),
    AblationRow("regionswap", _mix("regionswap"), paper=_paper(92.1, 91.3, 70.4, 64.2)),
    AblationRow("resizemix", _mix("resizemix"), paper=_paper(94.2, 92.1, 77.1, 66.7)),
    AblationRow("patchmix", _mix("patchmix"), paper=_FULL),
)

# Table "num_mix".
NUM_MIX = (
    AblationRow("m1", {"num_mix": 1}, paper=_BASELINE),
    AblationRow("m2", {"num_mix": 2}, paper=_paper(95.6, 94.3, 77.6, 71.1)),
    AblationRow("m3", {"num_mix": 3}, paper=_FULL),
    AblationRow("m4", {"num_mix": 4}, paper=_paper(95.7, 94.3, 75.2, 70.9)),
)

# Table "loss".
LOSS_TERMS = (
    AblationRow("oto", terms=("oto",), paper=_paper(91.1, 87.0, 69.7, 59.7)),
    AblationRow("mto", terms=("mto",), paper=_paper(None, None, 61.3, 57.2)),
    AblationRow("mtm", terms=("mtm",), paper=_paper(None, None, 52.6, 47.4)),
    AblationRow("oto+mto", terms=("oto", "mto"), paper=_paper(95.4, 93.8, 77.9, 69.2)),
    AblationRow("oto+mto+mtm", terms=("oto", "mto", "mtm"), paper=_FULL),
)

# Figure "epochs" has no numbers; the tables have those of 800 and 1600 epochs, here half and full.
LENGTHS = (
    AblationRow("eighth", length=1 / 8),
    AblationRow("quarter", length=1 / 4),
    AblationRow("half", length=1 / 2, paper=_FULL),
    AblationRow("full", paper=_paper(96.4, 95.1, 78.9, 74.6)),
)

# Table "cifar", ViT-S/2 at 800 epochs.
_METHODS: dict[str, Paper] = {
    "patchmix": _FULL,
    "mocov3": _paper(90.2, 89.1, 66.4, 62.3),
    "dino": _paper(92.6, 91.8, 63.8, 60.6),
    "ibot": _paper(94.8, 93.1, 67.8, 64.2),
    "sdmp": _paper(94.2, 92.1, 77.1, 66.7),
}


def rows_of(ablation: str, methods: Iterable[str]) -> tuple[AblationRow, ...]:
    """All rows of an ablation, in the table's order; `methods` are the names that can be compared."""
    rows = {
        "mix": MIX,
        "num-mix": NUM_MIX,
        "terms": LOSS_TERMS,
        "epochs": LENGTHS,
        "method": tuple(AblationRow(name, method=name, paper=_METHODS.get(name, {})) for name in methods),
    }
    check_known(ablation, rows, "ablation")
    return rows[ablation]


def choose_rows(rows: Sequence[AblationRow], names: Sequence[str]) -> tuple[AblationRow, ...]:
    """The named rows, in the table's order; all of them where no name is given."""
    for name in names:
        check_known(name, [row.name for row in rows], "row")
    return tuple(row for row in rows if not names or row.name in names)


def masked_weights(weights: Sequence[float], terms: Sequence[str]) -> tuple[float, ...]:
    """The weights of the given terms, 0 for the others."""
    return tuple(weight if term in terms else 0.0 for term, weight in zip(TERMS, weights, strict=True))


# ----------------------------------------------------------------------------------------------------------- its runs


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
    def scores(self) -> dict[str, str]:
        """What is compared, with its name in tables."""
        return HEALTH if self.evaluated_on is None else PROTOCOLS

    @property
    def interval(self) -> str | None:
        """Which interval the scores have; None for health, which has none."""
        if self.evaluated_on is None:
            return None
        counts = {len(self.done(row)) for row in self.rows} - {0}
        one, several = "Wilson's for the test images", "Student's t over the seeds"
        if counts == {1}:
            return f"±: 95 % interval, {one} (one seed; it does not cover other seeds)"
        return f"±: 95 % interval, {several}" + (f"; of rows with one seed {one}" if 1 in counts else "")

    def of(self, row: AblationRow) -> list[AblationRun]:
        return [run for run in self.runs if run.row == row.name]

    def done(self, row: AblationRow) -> list[AblationRun]:
        return [run for run in self.of(row) if run.failure is None]

    def mean(self, row: AblationRow, name: str) -> float | None:
        """Of a cost, over the row's seeds."""
        values = [value for run in self.done(row) if (value := getattr(run, name)) is not None]
        return statistics.fmean(values) if values else None

    def score(self, row: AblationRow, key: str) -> Estimate | None:
        """Top-1 in 0…1 by a protocol, or a value of the features' health; None where there is none."""
        if key in PROTOCOLS:
            return estimate([run.results[key] for run in self.done(row) if key in run.results])
        values = [run.health[key] for run in self.done(row) if key in run.health]
        return Estimate(*[statistics.fmean(values)] * 3) if values else None

    def summary(self, row: AblationRow) -> dict[str, Any]:
        """All numbers of a row, means over its seeds; None where there are none."""
        done = len(self.done(row))
        numbers: dict[str, Any] = {"row": row.name, "seeds": done, "failed": len(self.of(row)) - done}
        numbers |= {name: self.mean(row, name) for name in ("images_seen", "flops_per_image", "seconds")}
        for protocol, name in PROTOCOLS.items():
            score = self.score(row, protocol) or (None, None, None)
            numbers |= {f"{name.lower()}_{part}": value for part, value in zip(Estimate._fields, score, strict=True)}
        for name in HEALTH:
            numbers[name] = (self.score(row, name) or [None])[0]
        return numbers


# ------------------------------------------------------------------------------------------------------- intervals


def estimate(results: Sequence[Result]) -> Estimate | None:
    """One result: top-1 with Wilson's interval for its test images. Several: their mean with the t-interval."""
    if len(results) > 1:
        return over_seeds([result.top1 for result in results])
    return Estimate(results[0].top1, *results[0].interval()) if results else None


def over_seeds(values: Sequence[float]) -> Estimate:
    """The mean of two or more values with its t-interval."""
    mean = statistics.fmean(values)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


# --------------------------------------------------------------------------------------------------------- the table


def columns(table: AblationTable) -> list[str]:
    return ["row", "seeds", "images", "GF/image", "seconds", *table.scores.values()]


def cells(table: AblationTable, row: AblationRow) -> list[str]:
    done = len(table.done(row))
    failed = len(table.of(row)) - done
    texts = [row.name, f"{done} of {len(table.seeds)}" + (f", {failed} failed" if failed else "")]
    for name, form, unit in (("images_seen", ",.0f", 1), ("flops_per_image", ".3g", 1e9), ("seconds", ",.0f", 1)):
        value = table.mean(row, name)
        texts.append("–" if value is None else format(value / unit, form))
    for key in table.scores:
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


# --------------------------------------------------------------------------------------------------------- the files


def write_table(table: AblationTable, folder: Path) -> list[Path]:
    """ablation.md, .csv, .json and .png, each whole or as it was before."""
    paths = [folder / f"ablation{ending}" for ending in (".md", ".csv", ".json", ".png")]
    write_text(paths[0], markdown(table))
    summaries = [table.summary(row) for row in table.rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(summaries[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(summaries)  # accuracies in 0…1
    write_text(paths[1], out.getvalue())
    content = {
        **{key: getattr(table, key) for key in ("ablation", "data", "evaluated_on", "training")},
        "seeds": list(table.seeds),
        "interval": table.interval,
        "rows": [
            {**numbers, "runs": [asdict(run) for run in table.of(row)]}
            for row, numbers in zip(table.rows, summaries, strict=True)
        ],
    }
    write_text(paths[2], json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    if any(run.failure is None for run in table.runs):
        with replacing(paths[3]) as temporary:
            ablation_figure(table).savefig(temporary, format="png", bbox_inches="tight")
    return [path for path in paths if path.exists()]


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
        lines += markdown_table(head, [[row.name, *_paper_cells(row)] for row in table.rows])
    return "\n".join(lines) + "\n"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]


def _paper_cells(row: AblationRow) -> list[str]:
    """kNN and linear accuracy on both sets."""
    texts = []
    for data in ("cifar10", "cifar100"):
        linear, knn = row.paper.get(data, ("–", "–"))
        texts += [f"{value:.1f}" if isinstance(value, float) else value or "NA" for value in (knn, linear)]
    return texts


# --------------------------------------------------------------------------------------------------------- the figure


@style()
def ablation_figure(table: AblationTable) -> Figure:
    """A panel for each score: rows as points with their intervals; over the cost for methods and lengths."""
    figure = Figure(figsize=(4.6 * len(table.scores), 0.32 * len(table.rows) + 2.2))
    for axis, (key, name) in zip(figure.subplots(1, len(table.scores)), table.scores.items(), strict=True):
        axis.set_title(f"{name} of the features" if key in HEALTH else f"{name} accuracy (%)")
        _draw(axis, table, key)
    figure.suptitle(f"{TITLES[table.ablation]}: {table.data}", fontsize=10)
    figure.tight_layout()
    return figure


def _draw(axis: Axes, table: AblationTable, key: str) -> None:
    costs = {"method": ("flops_per_image", 1e9), "epochs": ("images_seen", 1.0)}  # name, unit
    for i, row in enumerate(table.rows):
        score = table.score(row, key)
        if score is None:
            continue
        value, low, high = (each if key in HEALTH else 100 * each for each in score)
        bar: Any = [[value - low], [high - value]]
        if table.ablation not in costs:
            axis.errorbar([value], [i], xerr=bar, fmt="o", color=COLORS[0], capsize=3, markersize=4)
            continue
        name, unit = costs[table.ablation]
        if (cost := table.mean(row, name)) is not None:
            (color, mark), place = look(i, MARKERS), [cost / unit]
            axis.errorbar(place, [value], yerr=bar, fmt=mark, color=color, capsize=3, markersize=4, label=row.name)
    if table.ablation == "epochs":
        axis.set(xscale="log", xlabel="images seen")
    elif table.ablation == "method":
        axis.set(xlabel="GFLOPs of training per image")
        axis.set_xlim(left=0)  # distances then show how much more one costs than another
    else:
        axis.set_yticks(range(len(table.rows)), [row.name for row in table.rows])
        axis.set_ylim(len(table.rows) - 0.5, -0.5)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)
