"""The results of runs side by side, with what the paper reports for the same training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from patchmix.config import Config, differences, read_config
from patchmix.evaluate.results import FILE, PROTOCOL_NAMES, Result, protocol_name, read_results
from patchmix.recipes import PAPER_ROWS, RECIPES
from patchmix.settings import Compare

# Settings that may differ from the recipe's in the same training.
_FREE = ("data.", "train.seed:", "train.accumulate:", "train.precision:")


@dataclass(frozen=True)
class Row:
    """One set of weights, evaluated on one dataset. None: not known, or not evaluated."""

    run: str
    model: str
    config: Config | None
    data: str | None
    weights: str | None
    results: dict[str, Result]  # by protocol, the latest of each

    @property
    def paper(self) -> dict[str, float]:
        return paper_accuracies(self.config, self.data)


def compare(settings: Compare, console: Console | None = None) -> list[Row]:
    """Prints a column for each row: what it is, top-1 in % with its 95 % interval, and the paper's number."""
    rows = read_rows(settings.runs)
    measures = "top-1 % or mIoU % with 95 % interval, AP % of detectors"
    table = Table(caption=f"{measures}; the paper's number for the same training")
    table.add_column("run", no_wrap=True)
    for row in rows:
        table.add_column(row.run, justify="right", overflow="fold")
    facts = [_facts(row) for row in rows]
    for name in facts[0]:
        table.add_row(name, *(each[name] or "–" for each in facts), end_section=name == "evaluated on")
    found = sorted({protocol for row in rows for protocol in row.results})
    for name in PROTOCOL_NAMES:
        for protocol in [each for each in found if each.partition("@")[0] == name]:  # knn, knn@5-shot
            table.add_row(protocol_name(protocol), *(_cell(row, protocol) for row in rows), end_section=True)
    (console or Console()).print(table)
    return rows


def read_rows(runs: Sequence[str | Path]) -> list[Row]:
    """One row for each run, dataset and set of weights; results of different weights are never mixed in a row.

    A run is a folder with config.yaml, results.jsonl or both.
    """
    if not runs:
        raise ValueError("there is nothing to compare; give at least one run's folder")
    rows = []
    for folder in map(Path, runs):
        config, results = stored_config(folder), read_results(folder)
        if config is None and not results:
            raise ValueError(f"{folder} is neither a run (no config.yaml) nor has it results ({FILE}); check the path")
        groups: dict[tuple[str | None, str | None], dict[str, Result]] = {} if results else {(None, None): {}}
        for result in results:  # oldest first: the latest stays
            groups.setdefault((result.data, result.weights), {})[result.protocol] = result
        model = config.model.name if config else results[0].encoder
        rows += [Row(str(folder), model, config, data, weights, latest) for (data, weights), latest in groups.items()]
    return rows


def stored_config(folder: Path) -> Config | None:
    """The configuration of a run, or None where the folder has none."""
    return read_config(folder) if (folder / "config.yaml").is_file() else None


def paper_accuracies(config: Config | None, data: str | None) -> dict[str, float]:
    """What the paper reports for this training, evaluated on `data`: in %, by protocol; {} where it is another.

    Recipe, model, data and epochs have to be the paper's, and no other setting of the training may be changed.
    """
    if config is None or data is None or config.recipe != "paper" or config.train.budget is not None:
        return {}
    plain = RECIPES["paper"](config.model.name, epochs=config.train.epochs)
    if any(not change.startswith(_FREE) for change in differences(plain, config)):
        return {}
    names = {Path(config.data.path).name, Path(data).name}  # cifar10, or a folder of that name
    wanted = (names, config.model.name, config.train.epochs)
    return next((row.accuracies for row in PAPER_ROWS if ({row.data}, row.model, row.epochs) == wanted), {})


def _facts(row: Row) -> dict[str, str | None]:
    config = row.config
    return {
        "model": row.model,
        "recipe": config.recipe if config else None,
        "trained on": config.data.path if config else None,
        "for": config.train.budget or f"{config.train.epochs:g} epochs" if config else None,
        "weights": row.weights and row.weights[:8],
        "evaluated on": row.data,
    }


def _cell(row: Row, protocol: str) -> str:
    result, paper = row.results.get(protocol), row.paper
    lines = [line for line in (result.headline, result.headline_interval) if line] if result else ["–"]
    if protocol in paper:
        lines.append(f"paper {paper[protocol]:.1f}")
    return "\n".join(lines)
