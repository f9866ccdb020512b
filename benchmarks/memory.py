"""The most memory that a training step holds: ours against the plain baseline, each in a process of its own.

Model, optimizer and activations count; the interpreter and its libraries do not. Both sides have glibc's defaults, and
then keep freed memory, as runs do; a run that recomputes activations returns it.
"""

from __future__ import annotations

from typing import Any

from benchmarks.children import children
from benchmarks.result import Result
from patchmix.study.bench import Spread

MODEL, BATCH, STEPS = "vit_tiny_patch2_32", 64, 2


def run(quick: bool = False) -> list[Result]:
    ours, plain = peak(kind="ours"), peak(kind="plain")
    less = peak(kind="ours", allocator="returned", settings={"recompute": True})
    results = [
        Result("memory T/2: ours ÷ plain", Spread.of([ours / plain]), at_most=0.6),
        Result("memory T/2: ours, recomputing ÷ plain", Spread.of([less / plain]), at_most=0.25),
        Result("memory T/2: plain, GB", Spread.of([plain / 1e9])),
    ]
    if not quick:
        both = [peak(kind=kind, allocator="kept") for kind in ("ours", "plain")]
        results.append(Result("memory T/2: ours ÷ plain, both keeping freed memory", Spread.of([both[0] / both[1]])))
    return results


def peak(**what: Any) -> float:
    with children(one={"model": MODEL, "batch": BATCH, **what}) as kids:
        return max(float(kids["one"].ask(do="step")["peak"]) for _ in range(STEPS))
