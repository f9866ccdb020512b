"""Something to look at while a wait is long."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_QUIET_SECONDS = 1.0  # shorter waits need no words


@contextmanager
def progress_bar(what: str, total: int, wanted: bool, unit: str = "images") -> Iterator[Callable[[int], None]]:
    """Something to look at on stderr when the wait is long: a bar on a terminal, else a line."""
    if not wanted:
        yield lambda count: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)
    else:
        start = time.monotonic()
        done = 0
        told = False

        def advance(count: int) -> None:
            nonlocal done, told
            done += count
            if not told and done < total and time.monotonic() - start > _QUIET_SECONDS:
                told = True
                print(f"{what}: {total} {unit}", file=sys.stderr, flush=True)

        yield advance
