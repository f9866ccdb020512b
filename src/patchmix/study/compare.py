"""The latest results of runs, with what the paper reports for the same training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from patchmix.config import Config, differences, read_config
from patchmix.evaluate.results import FILE, PROTOCOL_NAMES, RAW_PIXELS, Result, protocol_name, read_results
from patchmix.recipes import PAPER_ROWS, RECIPES
from patchmix.settings import Compare

HEAD = ("run", "protocol", "data", "%", "95 % interval", "paper %", "weights", "test images", "date")
# Settings that may differ from the recipe's in the same training.
_FREE = ("data.", "train.seed:", "train.accumulate:", "train.precision:")


@dataclass(frozen=True)
class Row:
    """The latest result of some weights by a protocol and its options on a dataset; None: only the paper has one."""

    run: str
    config: Config | None
    protocol: str
    result: Result | None
    paper: float | None  # in %

    def cells(self) -> list[str | None]:
        """For the columns HEAD."""
        result, paper = self.result, None if self.paper is None else f"{self.paper:.1f}"
        if result is None:
            return [self.run, protocol_name(self.protocol), None, "not evaluated", None, paper, None, None, None]
        weights = result.weights if result.weights == RAW_PIXELS else result.weights[:8]
        scores = [result.headline, result.headline_interval, paper]
        return [self.run, result.title, result.data, *scores, weights, f"{result.images:,}", result.date[:10]]


def compare(settings: Compare, console: Console | None = None) -> list[Row]:
    """Prints the latest results of runs, those by one protocol on one dataset below each other."""
    if not settings.runs:
        raise ValueError("there is nothing to compare; give at least one run's folder")
    rows, trainings = list[Row](), []
    for folder in map(Path, settings.runs):
        config, results = stored_config(folder), read_results(folder)
        if config is None and not results:
            raise ValueError(f"{folder} is neither a run (no config.yaml) nor has it results ({FILE}); check the path")
        rows += rows_of(str(folder), config, results)
        if config is not None:
            length = config.train.budget or f"{config.train.epochs:g} epoch{'s' * (config.train.epochs != 1)}"
            trainings.append(f"{folder}: {config.model.name}, recipe {config.recipe}, {length} on {config.data.path}")
    order = {name: i for i, name in enumerate(PROTOCOL_NAMES)}

    def place(row: Row) -> tuple[bool, str, int, bool]:
        name = row.protocol.partition("@")[0]  # knn@5-shot stands with knn
        changed = row.result is not None and bool(row.result.changed)
        return row.result is None, row.cells()[2] or "", order.get(name, len(order)), changed

    rows.sort(key=place)
    table = Table(caption="in %: top-1 or mIoU; for detectors, box / mask AP", box=None, padding=(0, 2, 0, 0))
    for name in HEAD[:7]:
        table.add_column(name, overflow="fold")
    names = {str(path): path.absolute().name for path in map(Path, settings.runs)}
    for row in rows:
        run, protocol, data, *scores = row.cells()[:7]
        short = names[row.run] if len({*names.values()}) == len(names) else run
        table.add_row(short, protocol, *(cell or "–" for cell in (data and Path(data).name, *scores)))
    console = console or Console(markup=False)
    console.print(table)
    console.print("\n".join(trainings), soft_wrap=True)
    return rows


def rows_of(run: str, config: Config | None, results: Sequence[Result]) -> list[Row]:
    """The latest result of each protocol and its options, dataset and weights, and the paper's numbers without one.

    results: the oldest first.
    """
    latest = {(each.data, each.weights, each.title): each for each in results}
    rows = []
    for result in latest.values():
        accuracies = paper_accuracies(config, result.data)
        rows.append(Row(run, config, result.protocol, result, accuracies.get(result.protocol)))
    paper = {} if config is None else paper_accuracies(config, config.data.path)
    missing = paper.keys() - {each.protocol for each in results}
    return rows + [Row(run, config, name, None, paper[name]) for name in PROTOCOL_NAMES if name in missing]


def stored_config(folder: Path) -> Config | None:
    """The configuration of a run, or None where the folder has none."""
    return read_config(folder) if (folder / "config.yaml").is_file() else None


def paper_accuracies(config: Config | None, data: str) -> dict[str, float]:
    """What the paper reports for this training, evaluated on `data`: in %, by protocol; {} where it is another.

    Recipe, model, data and epochs have to be the paper's, and no other setting of the training may be changed.
    """
    if config is None or config.recipe != "paper" or config.train.budget is not None:
        return {}
    plain = RECIPES["paper"](config.model.name, epochs=config.train.epochs)
    if any(not change.startswith(_FREE) for change in differences(plain, config)):
        return {}
    names = {Path(config.data.path).name, Path(data).name}  # cifar10, or a folder of that name
    wanted = (names, config.model.name, config.train.epochs)
    return next((row.accuracies for row in PAPER_ROWS if ({row.data}, row.model, row.epochs) == wanted), {})
