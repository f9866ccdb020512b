"""What reaches a run from outside: signals to stop, and the death of a process that prepares its images."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):
    """The run was asked to stop; its checkpoint is written."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM are noted for the loop to act on; a second one acts at once.

    A launcher hands on what the terminal has sent already: two within a second count as one.
    """
    caught: list[int] = []
    first = -math.inf

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal first
        if not caught:
            first = time.monotonic()
            caught.append(signum)
        elif time.monotonic() - first > 1.0:
            raise KeyboardInterrupt

    previous = {}
    try:
        for signum in (signal.SIGINT, signal.SIGTERM):
            previous[signum] = signal.signal(signum, note)
    except ValueError:  # not in the main thread: whoever runs us handles signals
        pass
    try:
        yield caught
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextmanager
def name_dead_workers() -> Iterator[None]:
    """torch raises wherever the main thread happens to be when a loader's process dies: said in one line.

    A batch that was being handed over is a connection that breaks.
    """
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:
        if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"a process that prepares images died ({reason}); memory may have run out: take fewer "
            "--workers or more memory, then continue with --resume auto"
        ) from error
