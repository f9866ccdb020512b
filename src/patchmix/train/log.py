"""Where numbers go while a run trains: metrics.jsonl, TensorBoard, trackers, and a bar or lines on the console."""

import importlib
import json
import math
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from patchmix.files import write_text
from patchmix.progress import is_quiet, is_verbose

SECONDS_BETWEEN_LINES = 10.0  # on a console that is not a terminal


class Tracker(Protocol):
    """A service that keeps the numbers of runs. Its library is imported when a run asks for it."""

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None: ...
    def log(self, values: Mapping[str, float], step: int) -> None: ...
    def finish(self) -> None: ...


class Wandb:
    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._run = _import("wandb").init(project=project, dir=str(folder), config=dict(config), resume="allow")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


class Trackio:
    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._trackio = _import("trackio")
        self._trackio.init(project=project, name=folder.name, config=dict(config), resume="allow", embed=False)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(values), step=step)

    def finish(self) -> None:
        self._trackio.finish()


class Mlflow:
    """Experiments go where MLFLOW_TRACKING_URI says; settings are parameters.

    Names are `train/oto.chance`: in a store of files, a second slash would make a folder where `train/oto` is a file.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._mlflow = _import("mlflow")
        self._mlflow.set_experiment(project)
        self._mlflow.start_run(run_name=folder.name)
        self._mlflow.log_params(
            {f"{section}.{key}": value for section, values in config.items() if isinstance(values, Mapping)
             for key, value in values.items()}
        )  # fmt: skip

    def log(self, values: Mapping[str, float], step: int) -> None:
        named = {f"{key.partition('/')[0]}/{key.partition('/')[2].replace('/', '.')}": values[key] for key in values}
        self._mlflow.log_metrics({key: value for key, value in named.items() if math.isfinite(value)}, step=step)

    def finish(self) -> None:
        self._mlflow.end_run()


TRACKERS: dict[str, type[Tracker]] = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{name} is not installed; pip install 'patchmix-ssl[{name}]' or leave --{name} out"
        ) from error


class RunLog:
    """One process's log; only the main one has a folder and prints."""

    def __init__(self, folder: Path | None, *, step: int = 0, console: Console | None = None) -> None:
        self.folder = folder
        self.console = console or Console(quiet=folder is None)
        self._last_line = -math.inf
        self._progress: Progress | None = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        forget_after(self.path, step)
        self._file = self.path.open("a", encoding="utf-8")
        from torch.utils.tensorboard import SummaryWriter  # seconds to import: only where it is used

        self._board = SummaryWriter(str(folder), purge_step=step + 1)
        self._trackers: list[Tracker] = []

    def track(self, trackers: Mapping[str, str], config: Mapping[str, Any]) -> None:
        """From now on, `record` also logs to these trackers: {"wandb": project, …}."""
        if self.folder is not None:
            for name, project in trackers.items():
                self._trackers.append(TRACKERS[name](project, self.folder, config))

    def record(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Appends a line to metrics.jsonl; `kind` is train, monitor or event."""
        if self.folder is None:
            return
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        try:
            self._file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")
            self._file.flush()
        except OSError as error:
            raise ValueError(
                f"can't write {self.path} ({error.strerror}); free some space, then continue with --resume auto"
            ) from error
        for key, value in values.items():
            self._board.add_scalar(f"{kind}/{key}", value, step)
        for tracker in self._trackers:
            tracker.log({f"{kind}/{key}": value for key, value in values.items()}, step)

    def say(self, line: str, style: str | None = None) -> None:
        """A line on the console, above the bar; with --quiet only warnings, which have a style."""
        if is_quiet() and style is None:
            return
        self.console.print(Text(line, style=style or ""), soft_wrap=True)

    def show_progress(self, fraction: float, line: str, *, final: bool = False) -> None:
        """Moves the bar on a terminal; elsewhere prints the line occasionally."""
        if self.folder is None or is_quiet():
            return
        if self.console.is_terminal and not is_verbose():
            if self._progress is None:
                self._progress = Progress(
                    BarColumn(bar_width=24),
                    TextColumn("{task.percentage:>3.0f}%"),
                    TimeElapsedColumn(),
                    TextColumn("{task.description}"),
                    console=self.console,
                    transient=True,
                )
                self._task = self._progress.add_task("", total=1.0)
                self._progress.start()
            self._progress.update(self._task, completed=fraction, description=line)
        elif final or is_verbose() or time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.say(f"{100 * fraction:5.1f} %  {line}")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self.folder is not None:
            with suppress(OSError):  # a full disk: `record` has said so
                self._file.close()
            with suppress(OSError):
                self._board.close()
            for tracker in self._trackers:
                tracker.finish()


class BadSamples:
    """Reports every image that can't be decoded once, and stops when they are more than `limit`, if there is one."""

    def __init__(self, log: RunLog, limit: float = math.inf) -> None:
        self._log, self._limit, self._seen = log, limit, set[str]()

    def __call__(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._seen:
                self._seen.add(name)
                self._log.say(f"warning: {name} (replaced by another image)", style="yellow")
        if len(self._seen) > self._limit:
            raise ValueError(
                f"{len(self._seen)} images can't be decoded, more than 1 %; the first is {min(self._seen)}. "
                "Repair or remove them"
            )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line that was cut short by a crash is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def forget_after(path: Path, step: int) -> None:
    """Drops what a killed run logged after the checkpoint that it resumes from: those steps are taken again."""
    if path.exists():
        kept = [row for row in read_metrics(path) if row["step"] <= step]
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
