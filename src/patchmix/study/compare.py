"""The results of runs side by side, and the recipes, with what the paper reports for the same training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from patchmix.config import Config, differences, from_yaml
from patchmix.evaluate.results import FILE, Result, read_results
from patchmix.recipes import PAPER_ROWS, RECIPES, PaperRow
from patchmix.settings import Compare, Recipes
from patchmix.study.flops import config_flops

PROTOCOLS = {
    "knn": "kNN",
    "linear": "linear",
    "linear-fast": "linear (fast)",
    "finetune": "fine-tune",
    "detect": "box / mask AP",
}
# Settings that may differ from the recipe's in the same training.
_FREE = ("data.", "train.seed:", "train.accumulate:", "train.precision:")


@dataclass(frozen=True)
class Row:
    """One set of weights, evaluated on one set of data. None: not known, or not evaluated."""

    run: str
    recipe: str | None
    model: str
    pretrained_on: str | None
    epochs: float | None
    data: str | None
    weights: str | None
    results: dict[str, Result] = field(default_factory=dict)  # by protocol, the latest of each
    paper: PaperRow | None = None
    budget: str | None = None  # of a run that was given time instead of epochs

    def paper_accuracy(self, protocol: str) -> float | None:
        """What the paper reports, in 0…1, where its training and this one are the same."""
        if self.paper is None or protocol not in ("knn", "linear", "finetune"):
            return None
        return round(float(getattr(self.paper, protocol)) / 100, 6)


def compare(settings: Compare, console: Console | None = None) -> list[Row]:
    """Prints the results of runs side by side."""
    rows = read_rows(settings.runs)
    print_rows(rows, console or Console())
    return rows


def read_rows(runs: Iterable[str | Path]) -> list[Row]:
    """One row for each run, data set and set of weights; results of different weights are never mixed in a row.

    A run is a folder with config.yaml, results.jsonl or both. The paper's numbers are added where recipe, model, data
    and epochs are the paper's, and no other setting of the training was changed.
    """
    folders = [Path(run) for run in runs]
    if not folders:
        raise ValueError("there is nothing to compare; give at least one run's folder")
    return [row for folder in folders for row in _rows(folder)]


def _rows(folder: Path) -> list[Row]:
    config_path = folder / "config.yaml"
    results = read_results(folder)
    if not config_path.is_file() and not results:
        raise ValueError(f"{folder} is neither a run (no config.yaml) nor has it results ({FILE}); check the path")
    config = from_yaml(config_path.read_text(encoding="utf-8")) if config_path.is_file() else None
    groups: dict[tuple[str, str], dict[str, Result]] = {}
    for result in results:  # oldest first: the latest stays
        groups.setdefault((result.data, result.weights), {})[result.protocol] = result
    if not groups:
        return [_row(folder, config, None, None, {})]
    return [_row(folder, config, data, weights, latest) for (data, weights), latest in groups.items()]


def _row(folder: Path, config: Config | None, data: str | None, weights: str | None, results: dict[str, Result]) -> Row:
    encoder = next((result.encoder for result in results.values()), "–")
    return Row(
        run=str(folder),
        recipe=None if config is None else config.recipe,
        model=encoder if config is None else config.model.name,
        pretrained_on=None if config is None else config.data.path,
        epochs=None if config is None else config.train.epochs,
        data=data,
        weights=weights,
        results=results,
        paper=None if config is None or data is None else paper_row(config, data),
        budget=None if config is None else config.train.budget,
    )


def paper_row(config: Config, data: str) -> PaperRow | None:
    """The row of the paper's tables that this training, evaluated on `data`, reproduces; None where it is another."""
    if config.recipe != "paper" or config.train.budget is not None:
        return None
    plain = RECIPES["paper"](config.model.name, epochs=config.train.epochs)
    if any(not change.startswith(_FREE) for change in differences(plain, config)):
        return None
    for row in PAPER_ROWS:
        same_data = _set_name(config.data.path) == row.data == _set_name(data)
        if same_data and row.model == config.model.name and row.epochs == config.train.epochs:
            return row
    return None


def _set_name(data: str) -> str:
    """`cifar10` for the name and for a folder of that name."""
    return Path(data).name


# ------------------------------------------------------------------------------------------------------------- tables


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """A table with a column for each row: what it is, top-1 in % with its 95 % interval, and the paper's number."""
    table = Table(caption="top-1 % with its 95 % interval, AP % of detectors; the paper's number for the same training")
    table.add_column("run", no_wrap=True)
    for row in rows:
        table.add_column(row.run, justify="right", overflow="fold")
    lines: dict[str, list[str | None]] = {
        "model": [row.model for row in rows],
        "recipe": [row.recipe for row in rows],
        "trained on": [row.pretrained_on for row in rows],
        "for": [_length(row) for row in rows],
        "weights": [row.weights and row.weights[:8] for row in rows],
        "evaluated on": [row.data for row in rows],
    }
    for name, cells in lines.items():
        table.add_row(name, *(cell or "–" for cell in cells), end_section=name == "evaluated on")
    for protocol, name in PROTOCOLS.items():
        if any(protocol in row.results for row in rows):
            table.add_row(name, *(_cell(row, protocol) for row in rows), end_section=True)
    console.print(table)


def _length(row: Row) -> str | None:
    if row.budget is not None:
        return row.budget
    return None if row.epochs is None else f"{row.epochs:g} epochs"


def _cell(row: Row, protocol: str) -> str:
    paper = row.paper_accuracy(protocol)
    lines = ["–"]
    if protocol in row.results:
        result = row.results[protocol]
        lines = [line for line in (result.headline, result.headline_interval) if line]
    if paper is not None:
        lines.append(f"paper {100 * paper:.1f}")
    return "\n".join(lines)


def recipes(settings: Recipes, console: Console | None = None) -> None:
    """Prints every recipe × row of the paper, with its cost and the paper's accuracy."""
    console = console or Console()
    for name, recipe in RECIPES.items():
        summary = " ".join((recipe.__doc__ or "").split("\n\n")[0].split())
        console.print(f"[bold]{name}[/bold]: {summary}", soft_wrap=True)
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("data", "model", "epochs", "GF/image", "EFLOPs", "kNN", "linear", "tune"):
            table.add_column(column, justify="left" if column in ("data", "model") else "right", no_wrap=True)
        rows = PAPER_ROWS if name != "demo" else (PaperRow("shapes", 10_000, recipe().model.name, 12, 0, 0, 0),)
        for row in rows:
            flops = config_flops(recipe(row.model, epochs=float(row.epochs))) or 0
            costs = [f"{flops / 1e9:.1f}", f"{flops * row.images * row.epochs / 1e18:.3g}"]
            paper = [f"{value:.1f}" for value in (row.knn, row.linear, row.finetune)] if name == "paper" else []
            table.add_row(row.data, row.model, str(row.epochs), *costs, *paper)
        console.print(table)
    console.print(
        "GF: 10⁹ FLOPs of training per image, forward and backward over all views, with attention; EFLOPs: 10¹⁸, of "
        "the whole training. kNN, linear and tune (fine-tuning): accuracies in % that the paper reports.",
        soft_wrap=True,
    )
