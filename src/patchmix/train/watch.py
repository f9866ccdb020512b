"""What the loop watches besides the training: time, speed, losses, signals, and the loader's processes."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import torch
from torch import Tensor

from patchmix import distributed


class NonFiniteLoss(ArithmeticError):
    """The loss is NaN or infinite."""

    exit_code = 3


class Interrupted(Exception):
    """The run was stopped by a signal; its checkpoint is written."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


class Clock:
    """Progress of the training from 0 to 1: by steps, or by (monotonic) time where there is a budget in seconds."""

    def __init__(self, total_steps: int, budget: float | None, *, first_step: int, spent_before: float) -> None:
        self.total_steps, self.budget = total_steps, budget
        self.reserve = 0.0  # seconds to keep for what follows the last step
        self._first_step, self._before = first_step, spent_before
        self._began = self._previous = time.monotonic()
        self._slowest = self._reached = 0.0

    def spent(self, progress: float = 0.0) -> float:
        """Seconds of training. A run that is done has used up its budget: it takes no more steps if it is resumed."""
        spent = self._before + time.monotonic() - self._began
        return max(spent, self.budget or 0.0) if progress >= 1.0 else spent

    def progress(self, step: int, device: torch.device) -> float:
        if self.budget is None:
            return step / self.total_steps
        now = time.monotonic()
        if step > self._first_step:
            self._slowest = max(self._slowest * 0.9, min(now - self._previous, self.budget))
        self._previous = now
        usable = max(self.budget - min(self.reserve, 0.5 * self.budget), 1e-3)
        done = self.spent() / usable
        if self.spent() + 0.5 * self._slowest >= usable:  # the next step would end beyond the budget
            done = 1.0
        # It stays where it is for a while if the last evaluation was quicker than the one before.
        self._reached = max(self._reached, distributed.broadcast_float(min(done, 1.0), device))
        return self._reached

    def remaining(self, progress: float) -> float:
        """Seconds to go, at the speed so far."""
        if self.budget is not None:
            return max(self.budget - self.spent(), 0.0)
        elapsed = time.monotonic() - self._began
        return elapsed * (1.0 - progress) / max(progress - self._first_step / self.total_steps, 1e-9)


class Meter:
    """Images per second, and the share of time spent waiting for data, since the last reading."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._began, self._waited, self._images = time.perf_counter(), 0.0, 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    def count(self, images: int) -> None:
        self._images += images

    def read(self) -> tuple[float, float]:
        elapsed = max(time.perf_counter() - self._began, 1e-9)
        reading = self._images / elapsed, self._waited / elapsed
        self.restart()
        return reading


class LossWatch:
    """Raises NonFiniteLoss without making the device wait.

    On the CPU the values of a step are checked at once. On a GPU they are copied asynchronously and checked after the
    next step, and before every checkpoint, so that no bad state is saved.
    """

    def __init__(self, device: torch.device) -> None:
        self._asynchronous = device.type == "cuda"
        self._pending: tuple[int, list[str], Tensor, torch.cuda.Event | None] | None = None
        self._latest: dict[str, float] = {}

    def push(self, step: int, out: dict[str, Tensor]) -> None:
        self.check()
        values = torch.stack([value.detach().float() for value in out.values()])
        event = None
        if self._asynchronous:
            values = values.to("cpu", non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._pending = (step, list(out), values, event)
        if not self._asynchronous:
            self.check()

    def check(self) -> None:
        if self._pending is None:
            return
        step, names, values, event = self._pending
        self._pending = None
        if event is not None:
            event.synchronize()
        self._latest = dict(zip(names, values.tolist(), strict=True))
        bad = [name for name in names if not math.isfinite(self._latest[name])]
        if bad:
            terms = [name for name in bad if name != "loss"] or bad
            raise NonFiniteLoss(f"step {step}: {', '.join(f'{t} is {self._latest[t]}' for t in terms)}")

    def latest(self) -> dict[str, float]:
        self.check()
        return self._latest


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collects SIGINT, SIGTERM and SIGHUP (of a closed terminal) in a list that the loop looks at; a second one raises
    KeyboardInterrupt.

    A launcher may forward what the terminal has sent already, so two within a second count as one.
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
    with suppress(ValueError):  # not in the main thread: whoever runs us handles signals
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # which is nohup's
                previous[signum] = signal.signal(signum, note)
    try:
        yield caught
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextmanager
def name_dead_workers() -> Iterator[None]:
    """Turns the errors that torch raises when a loader's process dies, wherever it is, into one line."""
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:
        if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"a data-loading worker died ({reason}); memory may have run out: use fewer "
            "--workers or more memory, then repeat the call (pretrain and adapt: with --resume auto)"
        ) from error
