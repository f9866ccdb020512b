"""One progress bar for everything that takes long, and how much a command prints."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

OUTPUT = "PATCHMIX_OUTPUT"  # environment variable: quiet or verbose
_QUIET_SECONDS = 1.0  # what takes less needs no line


def is_quiet() -> bool:
    return os.environ.get(OUTPUT) == "quiet"


def is_verbose() -> bool:
    return os.environ.get(OUTPUT) == "verbose"


def warn(text: str) -> None:
    print(f"patchmix: warning: {' '.join(text.split())}", file=sys.stderr, flush=True)


def new_bar(console: "Console") -> "Progress":
    """The layout of every bar: how far, time so far and to go, and what it is about."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = BarColumn(bar_width=24), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(*columns, TextColumn("{task.description}", markup=False), console=console, transient=True)


@contextmanager
def progress_bar(
    what: str, total: int | None, wanted: bool = True, unit: str = "images"
) -> Iterator[Callable[[int], None]]:
    """A bar on stderr at a terminal, else one line if it takes long. Yields what to call with the number done.

    total: None where it is not known in advance. Of several processes only the first shows anything.
    """
    what = what if total is None else f"{what}: {total} {unit}"
    if not wanted or is_quiet() or os.environ.get("RANK", "0") != "0":
        yield lambda count: None
    elif sys.stderr.isatty():
        from rich.console import Console

        with new_bar(Console(stderr=True)) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)
    else:
        start = time.monotonic()
        done, printed = 0, False

        def advance(count: int) -> None:
            nonlocal done, printed
            done += count
            if not printed and done != total and time.monotonic() - start > _QUIET_SECONDS:
                printed = True
                print(what, file=sys.stderr, flush=True)

        yield advance
