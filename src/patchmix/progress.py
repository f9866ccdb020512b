"""One progress bar for everything that takes long, and how much a command prints."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OUTPUT = "PATCHMIX_OUTPUT"  # environment variable: quiet or verbose
_QUIET_SECONDS = 1.0  # what takes less needs no line


def is_quiet() -> bool:
    return os.environ.get(OUTPUT) == "quiet"


def is_verbose() -> bool:
    return os.environ.get(OUTPUT) == "verbose"


@contextmanager
def progress_bar(
    what: str, total: int | None, wanted: bool = True, unit: str = "images"
) -> Iterator[Callable[[int], None]]:
    """A bar on stderr at a terminal, else one line if it takes long. Yields what to call with the number done.

    total: None where it is not known in advance. Of several processes only the first shows anything.
    """
    if not wanted or is_quiet() or os.environ.get("RANK", "0") != "0":
        yield lambda count: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
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
                print(what if total is None else f"{what}: {total} {unit}", file=sys.stderr, flush=True)

        yield advance
