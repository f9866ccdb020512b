"""Where numbers go while a run trains: metrics.jsonl, TensorBoard, trackers, and a bar or lines on the console."""

import importlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from patchmix import distributed
from patchmix.files import write_text
from patchmix.progress import is_quiet, is_verbose, new_bar

SECONDS_BETWEEN_LINES = 10.0  # on a console that is not a terminal


TRACKERS = ("wandb", "mlflow", "trackio")  # services that keep the numbers of runs


def open_tracker(
    name: str, project: str, folder: Path, config: Mapping[str, Any]
) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """log(values, step=…) and finish() of a tracker, whose library is imported when a run asks for it."""
    try:
        library = importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{name} is not installed; pip install 'patchmix-ssl[{name}]' or leave --{name} out"
        ) from error
    if name == "mlflow":  # experiments go where MLFLOW_TRACKING_URI says
        library.set_experiment(project)
        library.start_run(run_name=folder.name)
        sections = {name: values for name, values in config.items() if isinstance(values, Mapping)}
        library.log_params({f"{name}.{key}": value for name in sections for key, value in sections[name].items()})
        return partial(_log_to_mlflow, library), library.end_run
    own = {"dir": str(folder)} if name == "wandb" else {"name": folder.name, "embed": False}
    run = library.init(project=project, config=dict(config), resume="allow", **own)
    return run.log, run.finish


def _log_to_mlflow(library: Any, values: Mapping[str, float], step: int) -> None:
    """As `train/oto.chance`: in a store of files, a second slash would make a folder where `train/oto` is a file."""
    named = {key.replace("/", ".").replace(".", "/", 1): value for key, value in values.items()}
    library.log_metrics({key: value for key, value in named.items() if math.isfinite(value)}, step=step)


class RunLog:
    """One process's log; only the main one has a folder and prints."""

    def __init__(self, folder: Path | None, *, step: int = 0) -> None:
        self.folder = folder
        self.console = Console(quiet=folder is None)
        self.at_log_steps: Callable[[], None] = lambda: None
        self._last_line = -math.inf
        self._progress: Progress | None = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self._kept = forget_after(self.path, step)
        self._file = self.path.open("a", encoding="utf-8")
        from torch.utils.tensorboard import SummaryWriter  # seconds to import: only where it is used

        self._board = SummaryWriter(str(folder), purge_step=step + 1 if step else 0)
        self._trackers: list[tuple[Callable[..., Any], Callable[[], Any]]] = []

    def track(self, trackers: Mapping[str, str | None], config: Mapping[str, Any]) -> None:
        """From now on, `record` also logs to the trackers that have a project: {"wandb": project, …}."""
        for name, project in trackers.items():
            if self.folder is not None and project:
                self._trackers.append(open_tracker(name, project, self.folder, config))

    def record(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Appends a line to metrics.jsonl; `kind` is train (at log steps, on every rank), monitor or event."""
        if kind == "train":
            self.at_log_steps()
        if self.folder is None or (kind, step) in self._kept:  # a finished run that is resumed evaluates again
            return
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        named = {f"{kind}/{key}": value for key, value in values.items()}
        try:
            self._file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")
            self._file.flush()
            for name, value in named.items():
                self._board.add_scalar(name, value, step)
        except OSError as error:
            raise ValueError(
                f"can't write {self.path} ({error.strerror}); free some space, then repeat the call (pretrain and "
                "adapt: with --resume auto)"
            ) from error
        for log, _ in self._trackers:
            log(named, step=step)

    def say(self, line: str, style: str | None = None) -> None:
        """A line on the console, above the bar; with --quiet only warnings, which have a style."""
        if is_quiet() and style is None:
            return
        try:
            self.console.print(Text(line, style=style or ""), soft_wrap=True)
        except (OSError, SystemExit):  # the terminal or pipe is closed, where rich would exit: the training goes on
            self.console.quiet = True

    def show_progress(self, fraction: float, line: str, *, remaining: float, final: bool = False) -> None:
        """Moves the bar on a terminal; elsewhere prints the line occasionally, with the seconds that remain."""
        if self.folder is None or is_quiet():
            return
        if self.console.is_terminal and not is_verbose():
            if self._progress is None:
                self._progress = new_bar(self.console)
                self._task = self._progress.add_task("", total=1.0)
                self._progress.start()
            self._progress.update(self._task, completed=fraction, description=line)
        elif final or is_verbose() or time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            minutes, seconds = divmod(round(remaining), 60)
            self.say(f"{100 * fraction:5.1f} %  {line}  ETA {minutes}:{seconds:02d}")

    def close(self) -> None:
        if self._progress is not None:
            with suppress(OSError, SystemExit):  # likewise
                self._progress.stop()
        if self.folder is not None:
            with suppress(OSError):  # a full disk: `record` has said so
                self._file.close()
            with suppress(OSError):
                self._board.close()
            for _, finish in self._trackers:
                finish()


class BadSamples:
    """Reports every image that can't be decoded once, and stops when they are more than `limit`, if there is one.

    Several ranks tell each other at log steps, where they wait for each other anyway.
    """

    def __init__(self, log: RunLog, limit: float = math.inf) -> None:
        self._log, self._limit = log, limit
        self._new, self._seen = list[str](), set[str]()
        log.at_log_steps = self._report

    def __call__(self, names: Iterable[str]) -> None:
        self._new += names
        if distributed.world_size() == 1:
            self._report()

    def _report(self) -> None:
        found = self._new
        if distributed.world_size() > 1:
            device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
            if distributed.any_process(bool(found), device):
                found = [name for names in distributed.gather_json(found, device) for name in names]
        self._new = []
        for name in found:
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
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def forget_after(path: Path, step: int) -> set[tuple[str, int]]:
    """Drops what a killed run logged after the checkpoint that it resumes from: those steps are taken again.

    At step 0 nothing is kept, because there was no checkpoint. Returns kind and step of the rows that are kept.
    """
    if not path.exists():
        return set()
    kept = [row for row in read_metrics(path) if row["step"] <= step and step > 0]
    write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
    return {(row["kind"], row["step"]) for row in kept}
