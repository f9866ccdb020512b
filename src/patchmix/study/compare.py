"""Runs side by side: what each was judged to be worth, and what the paper reports for the same training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from patchmix.config import Config, differences, from_yaml
from patchmix.evaluate.results import FILE, Result, read_results
from patchmix.recipes import PAPER_ROWS, PaperRow, find_recipe

PROTOCOLS = {"knn": "kNN", "linear": "linear", "linear-fast": "linear (fast)", "finetune": "fine-tune"}
# What may differ from the recipe without making it another training.
_FREE = ("data.", "train.seed:", "train.accumulate:", "train.precision:")


@dataclass(frozen=True)
class Row:
    """One set of weights judged on one set of data. None: not known, or not evaluated."""

    run: str
    recipe: str | None
    model: str
    pretrained_on: str | None
    epochs: float | None
    data: str | None
    weights: str | None
    results: dict[str, Result] = field(default_factory=dict)  # by protocol, the latest of each
    paper: PaperRow | None = None

    def paper_accuracy(self, protocol: str) -> float | None:
        """What the paper reports, in 0…1, where its training and this one are the same."""
        if self.paper is None or protocol not in ("knn", "linear", "finetune"):
            return None
        return round(float(getattr(self.paper, protocol)) / 100, 6)


def compare(runs: Iterable[str | Path]) -> list[Row]:
    """One row for each run, data set and set of weights; results of different weights are never mixed in a row.

    A run is a folder with config.yaml, results.jsonl or both. A run without results has a row, too. The paper's numbers
    stand where recipe, model, data and epochs are the paper's, and nothing that changes the training was overridden.
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
    return [_row(folder, config, data, weights, found) for (data, weights), found in groups.items()]


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
    )


def paper_row(config: Config, data: str) -> PaperRow | None:
    """The row of the paper's tables that this training, evaluated on `data`, reproduces; None where it is another."""
    if config.recipe != "paper" or config.train.budget_minutes is not None:
        return None
    plain = find_recipe("paper")(config.model.name, epochs=config.train.epochs)
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


# ---------------------------------------------------------------------------------------------------------- the table


def print_comparison(rows: Sequence[Row], console: Console | None = None) -> None:
    """Top-1 in % with its 95 % interval below it, and the paper's number where there is one."""
    console = console or Console()
    shown = [protocol for protocol in PROTOCOLS if any(protocol in row.results for row in rows)]
    table = Table(caption="top-1 %, its 95 % interval, and the paper's number for the same training", show_lines=True)
    for column in ("run", "recipe", "model", "trained on", "epochs", "judged on", "weights"):
        table.add_column(column, overflow="fold")
    for protocol in shown:
        table.add_column(PROTOCOLS[protocol], justify="right", no_wrap=True)
    for row in rows:
        described = (
            row.run,
            row.recipe,
            row.model,
            row.pretrained_on,
            None if row.epochs is None else f"{row.epochs:g}",
            row.data,
            None if row.weights is None else row.weights[:8],
        )
        table.add_row(*(text or "–" for text in described), *(_cell(row, protocol) for protocol in shown))
    console.print(table)


def _cell(row: Row, protocol: str) -> str:
    paper = row.paper_accuracy(protocol)
    lines = ["–"]
    if protocol in row.results:
        result = row.results[protocol]
        low, high = result.interval()
        lines = [f"{100 * result.top1:.2f}", f"{100 * low:.1f} … {100 * high:.1f}"]
    if paper is not None:
        lines.append(f"paper {100 * paper:.1f}")
    return "\n".join(lines)
