"""How things are measured: in turns, as ratios, with their spread. A time alone is worth nothing.

A machine's speed drifts with its load and its temperature. What is compared is therefore run A B A B …, each round
gives one ratio, and the median of the ratios is reported with the lowest and the highest.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

# Large enough for any machine's best rate, small enough for a tenth of a second on two cores: (rows, inner, columns).
GEMM_SHAPES = ((2048, 2048, 2048), (4096, 1024, 2048), (8192, 768, 1536), (1536, 4096, 1536))


@dataclass(frozen=True)
class Spread:
    """The median of some values, with the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g}–{self.high:.3g})"


def in_turns(measures: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: int = 1) -> dict[str, list[float]]:
    """Calls every measure once a round, in turns; what the warm-up rounds gave is dropped."""
    values: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(warm_up + rounds):
        for name, measure in measures.items():
            value = measure()
            if number >= warm_up:
                values[name].append(value)
    return values


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Of two series that were measured in turns, round by round."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def seconds(function: Callable[[], object], device: torch.device | None = None) -> float:
    """How long one call takes, what it left to the device included."""
    wait_for(device)
    began = time.perf_counter()
    function()
    wait_for(device)
    return time.perf_counter() - began


def wait_for(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


class Gemm:
    """The ceiling of everything that is made of matrix products: the best rate over a few large ones."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.device = device
        self._pairs = [
            (torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype))
            for m, k, n in GEMM_SHAPES
        ]

    @torch.no_grad()
    def rate(self, repeats: int = 2) -> float:
        """FLOPs a second, now: 2 a multiply-add."""
        best = 0.0
        for a, b in self._pairs:
            flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]
            for _ in range(repeats):
                best = max(best, flops / seconds(lambda a=a, b=b: torch.mm(a, b), self.device))  # type: ignore[misc]
        return best


class Phases:
    """Where the time of a step goes: seconds by name, one inside another counted once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[str] = []
        self._since = 0.0
        self.seconds: dict[str, float] = {}

    def reset(self) -> None:
        self.seconds = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        """What has passed belongs to the innermost phase."""
        wait_for(self._device)
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now

    def wrap(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: object, **kwargs: object) -> object:
            with self.of(name):
                return function(*args, **kwargs)

        return timed


# --------------------------------------------------------------------------------------------------------- memory


def resident_bytes() -> int:
    """What this process holds in memory now; 0 where the system does not say."""
    return _status("VmRSS")


def peak_bytes(device: torch.device | None = None) -> int:
    """The most that was held: on a GPU by torch's allocator, else by the process; 0 where nobody says."""
    if device is not None and device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    found = _status("VmHWM")
    if not found and sys.platform != "win32":
        import resource

        found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return found


def reset_peak(device: torch.device | None = None) -> None:
    """Start the peak anew, where the system allows it."""
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not Linux, or not allowed: the peak stays that of the whole process
        return


def proportional_bytes(pid: int) -> int:
    """PSS of a process: its own memory, and its part of what it shares; 0 where the system does not say."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


def _status(key: str) -> int:
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(key + ":")), 0)
