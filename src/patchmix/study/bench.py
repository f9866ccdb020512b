"""`patchmix bench`: how fast a configuration trains on this machine, and the tools to measure it.

A machine's speed drifts with its load and temperature. What is compared is therefore run in turns, A B A B …; each
round gives one ratio, and the median of the ratios is reported with the lowest and the highest.
"""

import itertools
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from patchmix import build
from patchmix.config import Config
from patchmix.data.decode import pixel_channels
from patchmix.device import resolve_device
from patchmix.methods.method import Method
from patchmix.progress import progress_bar
from patchmix.settings import Bench
from patchmix.study.flops import config_flops, shape_of
from patchmix.study.plan import check_model
from patchmix.train.allocator import keep_freed_memory, return_freed_memory
from patchmix.train.loop import Plan, train_step, wrap
from patchmix.train.optimizer import build_optimizer

PROGRESS = 0.999  # of the training, in every measured step: the last stage, in which everything learns
# Large enough for any machine's best rate, and a tenth of a second on two cores: (rows, inner, columns).
GEMM_SHAPES = ((2048, 2048, 2048), (4096, 1024, 2048), (8192, 768, 1536), (1536, 4096, 1536))


@dataclass(frozen=True)
class Spread:
    """The median of some values, with the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g}–{self.high:.3g})"


def bench(settings: Bench[Any]) -> dict[str, Any]:
    """Prints how fast the run's configuration trains here."""
    check_model(settings.run)
    speed, title = measure_speed(settings.run, settings.steps), f"{settings.run.method.name}, {settings.run.model.name}"
    table = Table(title=title, box=None, padding=(0, 2, 0, 0), show_header=False)
    how = f"(batch {speed['batch_size']}, {speed['device']})"
    table.add_row("images per second", f"{speed['images_per_second']:.1f} {how}")
    table.add_row("one step", f"{speed['step_seconds']} s, median (lowest–highest)")
    if speed["ceiling_share"] is not None:
        table.add_row("share of the GEMM ceiling", f"{speed['ceiling_share']} of {speed['gemm_gflops']:.0f} GFLOP/s")
    table.add_row("phases", ", ".join(f"{name} {100 * share:.1f} %" for name, share in speed["phases"].items()))
    table.add_row("peak memory", f"{speed['peak_gb']:.2f} GB")
    if speed["compiling_seconds"] is not None:
        table.add_row("compiling", f"{speed['compiling_seconds']:.0f} s, then again {speed['recompilations']} times")
        table.add_row("eager ÷ compiled step", str(speed["compiled_gain"]))
    table.add_row("waiting for data", f"{100 * speed['loader_wait']:.1f} % of the time")
    Console().print(table)
    return speed


def measure_speed(config: Config, steps: int) -> dict[str, Any]:
    """Trains a few steps on the same views, times large matrix products in turns with them, then loads views again."""
    device = resolve_device(config.runtime.device)
    if device.type == "cpu":
        (return_freed_memory if config.runtime.recompute else keep_freed_memory)()
    method = build.build_method(config).to(device).train()
    source, image_size = build.build_source(config), shape_of(config.model).image_size
    loader = build.build_loader(config, source, image_size, pin_memory=device.type == "cuda")
    channels = pixel_channels(config.model.in_chans)
    views = replace(config.views, mean=(0.0,) * channels, std=(1.0,) * channels)  # any: they cost the same
    prepare = build.build_prepare(views=views, in_chans=config.model.in_chans)
    plan = build.build_plan(config, method.encoder, loader.steps_per_epoch, device)
    batches = loader.batches()

    before = 0 if device.type == "cuda" else resident_bytes()
    reset_peak(device)
    step = RepeatedStep(method, prepare(next(batches).to(device)), plan, config.optim.name)
    with progress_bar("measuring", 2 * steps + 4 + plan.compile * (steps + 3), unit="steps") as advance:
        step.done = advance
        first = seconds(step, device)
        step()  # now with the optimizer's state besides the activations
        peak = peak_bytes(device) - before
        products = Gemm(device, plan.autocast or torch.float32)
        measures = {"step": lambda: seconds(step, device), "gemm": products.rate}
        if plan.compile:
            graphs = _graphs()
            twin = build.build_method(config).to(device).train()
            eager = RepeatedStep(twin, step.views, replace(plan, compile=False), config.optim.name)
            eager.done = advance
            eager()
            measures["eager"] = lambda: seconds(eager, device)
        times = in_turns(measures, steps, warm_up=int(plan.compile))

        waited, began = 0.0, time.perf_counter()
        for _ in range(steps):
            waiting_since = time.perf_counter()
            *_, batch = itertools.islice(batches, plan.accumulate)
            waited += time.perf_counter() - waiting_since
            step.views = prepare(batch.to(device))
            step()
        wait = waited / (time.perf_counter() - began)

        phases = step.time_phases()
        for _ in range(2):
            step()
    images = config.train.batch_size
    spread = Spread.of(times["step"])
    flops = config_flops(config, class_token=False, at=PROGRESS)  # of the plain iteration: work left out is speed
    shares = [images * (flops or 0) / t / rate for t, rate in zip(times["step"], times["gemm"], strict=True)]
    gains = [e / t for e, t in zip(times.get("eager", ()), times["step"], strict=False)]
    return {
        "device": str(device),
        "batch_size": images,
        "images_per_second": images / spread.median,  # without waiting for data
        "step_seconds": spread,
        "gemm_gflops": max(times["gemm"]) / 1e9,
        "ceiling_share": Spread.of(shares) if flops else None,
        "phases": {name: spent / sum(phases.seconds.values()) for name, spent in phases.seconds.items()},  # of a step
        "peak_gb": peak / 2**30,  # model, optimizer and activations
        "loader_wait": wait,  # share of the time, with views from the loader
        "compiling_seconds": max(0.0, first - spread.median) if plan.compile else None,
        "compiled_gain": Spread.of(gains) if gains else None,  # time of an eager step ÷ time of a compiled one
        "recompilations": _graphs() - graphs if plan.compile else None,  # after the first two steps
    }


def _graphs() -> int:
    """How many were compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


class RepeatedStep:
    """The loop's `train_step` with a new optimizer, on the same views again and again."""

    def __init__(self, method: Method, views: list[Tensor], plan: Plan, optim: str = "adamw") -> None:
        self.method, self.views, self.plan = method, views, plan
        self.optimizer = build_optimizer(method, name=optim, autocast=plan.autocast)
        self._device = views[0].device
        self._module = wrap(method, self._device, plan)
        self._phases = Phases(torch.device("cpu"))
        self._steps = 0
        self.done: Callable[[int], None] = lambda count: None  # told of every step

    def time_phases(self) -> "Phases":
        """Measures the phases of a step from now on, which makes a GPU wait between them.

        In a compiled method keys and mixing count as forward: its graph is not cut to time them.
        """
        self._phases = Phases(self._device)
        for name, phase in () if self.plan.compile else (("mixed", "mixing"), ("keys", "keys")):
            if hasattr(self.method, name):
                setattr(self.method, name, self._phases.of(phase)(getattr(self.method, name)))
        return self._phases

    def __call__(self) -> float:
        """One step; returns the loss."""
        losses = train_step(
            self._module,
            self.method,
            self.optimizer,
            itertools.repeat(self.views),
            self.plan,
            step=self._steps,
            progress=PROGRESS,
            device=self._device,
            prepare=lambda views: views,
            phase=self._phases.of,
        )
        self._steps += 1
        wait_for(self._device)
        self.done(1)
        return float(losses["loss"].detach())


def in_turns(measures: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: int = 1) -> dict[str, list[float]]:
    """Calls every measure once a round, in turns; the values of the warm-up rounds are dropped."""
    values: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(warm_up + rounds):
        for name, measure in measures.items():
            values[name].append(measure())
    return {name: measured[warm_up:] for name, measured in values.items()}


def seconds(function: Callable[[], object], device: torch.device | None = None) -> float:
    """How long one call takes, including what it queued on the device."""
    wait_for(device)
    began = time.perf_counter()
    function()
    wait_for(device)
    return time.perf_counter() - began


def wait_for(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


class Gemm:
    """The ceiling of everything made of matrix products: the best rate over a few large ones, twice each."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.device = device
        create = partial(torch.randn, device=device, dtype=dtype)
        self._pairs = [(create(m, k), create(k, n)) for m, k, n in GEMM_SHAPES]

    def rate(self) -> float:
        """FLOPs per second, now: 2 per multiply-add."""
        return max(
            2 * a.numel() * b.shape[1] / seconds(partial(torch.mm, a, b), self.device)
            for a, b in self._pairs
            for _ in range(2)
        )


class Phases:
    """Where the time of a step goes: seconds by name. Time in a nested phase counts for the inner one only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[str] = []
        self._since = 0.0
        self.seconds: dict[str, float] = {}

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
        """The time since the last call belongs to the innermost phase."""
        wait_for(self._device)
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now


def resident_bytes(key: str = "VmRSS") -> int:
    """What this process holds in memory now; 0 where the system does not say."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(key + ":")), 0)


def peak_bytes(device: torch.device | None = None) -> int:
    """The most that was held: on a GPU by torch's allocator, else by the process."""
    if device is not None and device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resident_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak(device: torch.device | None = None) -> None:
    """Start the peak again, where the system allows it."""
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # not Linux, or not allowed: the peak stays that of the whole process
        Path("/proc/self/clear_refs").write_text("5")
