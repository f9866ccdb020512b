"""How fast a configuration trains on this machine: images a second, share of the machine's best, phases, memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from patchmix.data.loader import Batch
from patchmix.methods.method import Method
from patchmix.study.iteration import Iteration
from patchmix.study.measure import Gemm, Phases, Spread, in_turns, peak_bytes, reset_peak, resident_bytes, seconds
from patchmix.train.loop import build_optimizer


@dataclass(frozen=True)
class Speed:
    """What `measure_speed` found. `ceiling_share` is None where the method's FLOPs are not known."""

    device: str
    batch_size: int
    images_per_second: float  # of steps, views being there
    step_seconds: Spread
    gemm_gflops: float
    ceiling_share: Spread | None
    phases: dict[str, float]  # shares of a step
    peak_gb: float  # model, optimiser and activations
    loader_wait: float | None  # share of the time, when views are made on the way
    compiling_seconds: float | None = None  # by which the first step was longer than the others

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_speed(
    method: Method,
    batches: Callable[[], Iterator[Batch]],
    prepare: Callable[[Batch], list[Tensor]],
    *,
    device: torch.device,
    flops: float | None,
    autocast: torch.dtype | None = None,
    steps: int = 5,
    compiled: bool = False,
) -> Speed:
    """Trains a few steps. `flops`: of one step by the closed form, forward and backward.

    With `compiled` the method is compiled, as `pretrain --compile` does it.
    """
    if compiled:
        method.compile()
    before = 0 if device.type == "cuda" else resident_bytes()
    reset_peak(device)
    optimizer = build_optimizer(method)
    stream = batches()
    views = prepare(next(stream).to(device))
    step = Iteration(method, optimizer, views, autocast=autocast)
    first = seconds(step, device)
    step()  # now with the optimiser's state beside the activations
    peak = peak_bytes(device) - before
    products = Gemm(device, autocast or torch.float32)
    times = in_turns({"step": lambda: seconds(step, device), "gemm": products.rate}, steps, warm_up=0)

    waited, began = 0.0, time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(stream)
        waited += time.perf_counter() - asked
        step.views = prepare(batch.to(device))
        step()
    wait = waited / (time.perf_counter() - began)

    phases = Phases(device)
    timed = Iteration(method, optimizer, views, autocast=autocast, phases=phases, compiled=compiled)
    for _ in range(2):
        timed()
    whole = sum(phases.seconds.values())
    share = None
    if flops is not None:
        share = Spread.of([flops / t / rate for t, rate in zip(times["step"], times["gemm"], strict=True)])
    spread = Spread.of(times["step"])
    return Speed(
        device=str(device),
        batch_size=len(views[0]),
        images_per_second=len(views[0]) / spread.median,
        step_seconds=spread,
        gemm_gflops=max(times["gemm"]) / 1e9,
        ceiling_share=share,
        phases={name: spent / whole for name, spent in phases.seconds.items()},
        peak_gb=peak / 2**30,
        loader_wait=wait,
        compiling_seconds=max(0.0, first - spread.median) if compiled else None,
    )


def print_speed(speed: Speed, title: str, console: Console | None = None) -> None:
    table = Table(title=title, box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_row("images a second", f"{speed.images_per_second:.1f} (batch {speed.batch_size}, {speed.device})")
    table.add_row("a step", f"{speed.step_seconds} s, median (lowest–highest)")
    if speed.ceiling_share is not None:
        table.add_row("share of the GEMM ceiling", f"{speed.ceiling_share} of {speed.gemm_gflops:.0f} GFLOP/s")
    phases = ", ".join(f"{name} {100 * share:.1f} %" for name, share in speed.phases.items())
    table.add_row("phases", phases)
    table.add_row("peak memory", f"{speed.peak_gb:.2f} GB")
    if speed.compiling_seconds is not None:
        table.add_row("compiling", f"{speed.compiling_seconds:.0f} s, once")
    if speed.loader_wait is not None:
        table.add_row("waiting for data", f"{100 * speed.loader_wait:.1f} % of the time")
    (console or Console()).print(table)
