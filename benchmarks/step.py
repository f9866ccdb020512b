"""A training step: ours against the plain baseline, and against the rate of bare matrix products.

Both sides have the same allocator; what the allocator gives is reported apart. FLOPs are those that the iteration
takes as the plain version does it (2 a multiply-add, attention included, backward = 2 × forward), whoever is timed:
work that is left out counts as speed. What is really executed is counted and reported beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.children import children
from benchmarks.result import Result, ratio
from patchmix.config import ModelConfig
from patchmix.device import has_bf16
from patchmix.study.bench import Spread, in_turns
from patchmix.study.flops import method_flops, shape_of

CASES = {"T/2": ("vit_tiny_patch2_32", 64, 0.75), "S/16": ("vit_small_patch16_224", 8, 0.80)}


def run(quick: bool = False) -> Iterator[Result]:
    for case, (model, batch, share) in CASES.items():
        yield from compare(case, model, batch, share, rounds=2 if quick else 3)
        yield from allocators(case, model, batch, rounds=1 if quick else 2)
        if has_bf16(torch.device("cpu")):
            yield in_bf16(case, model, batch, rounds=2 if quick else 5)


def compare(case: str, model: str, batch: int, share: float, rounds: int) -> list[Result]:
    flops = method_flops("patchmix", shape_of(ModelConfig(model)), batch=batch, attention=True)
    common: dict[str, Any] = {"model": model, "batch": batch, "allocator": "kept"}
    phases_of: dict[str, list[dict[str, float]]] = {"ours": [], "plain": []}
    with children(
        ours={"kind": "ours", "phases": True, **common},
        plain={"kind": "plain", **common},
        gemm={"kind": "gemm", **common},
    ) as kids:

        def step(name: str) -> float:
            answer = kids[name].ask(do="step")
            phases_of[name].append(answer["phases"])
            return float(answer["seconds"])

        times = in_turns(
            {
                "ours": lambda: step("ours"),
                "gemm": lambda: float(kids["gemm"].ask(do="step")["rate"]),
                "products": lambda: float(kids["ours"].ask(do="products")["seconds"]),
                "plain": lambda: step("plain"),
            },
            rounds,
        )
        counted = kids["ours"].ask(do="flops", batch=2)
    executed = counted["executed"] * batch
    shares = [flops / t / rate for t, rate in zip(times["ours"], times["gemm"], strict=True)]
    really = [executed / t / rate for t, rate in zip(times["ours"], times["gemm"], strict=True)]
    limits = [flops / t / rate for t, rate in zip(times["products"], times["gemm"], strict=True)]
    theirs = [flops / t / rate for t, rate in zip(times["plain"], times["gemm"], strict=True)]
    return [
        Result(f"step {case}: plain ÷ ours", ratio(times["plain"], times["ours"]), at_least=1.5),
        Result(f"step {case}: ours, share of the GEMM ceiling", Spread.of(shares), at_least=share),
        Result(f"step {case}: ours, share by FLOPs executed", Spread.of(really)),
        Result(f"step {case}: the limit: its products alone, share of the GEMM ceiling", Spread.of(limits)),
        Result(f"step {case}: plain, share of the GEMM ceiling", Spread.of(theirs)),
        Result(f"step {case}: FLOPs executed ÷ full iteration", Spread.of([executed / flops])),
        Result(f"step {case}: GEMM ceiling, GFLOP/s", Spread.of([rate / 1e9 for rate in times["gemm"]])),
        Result(f"step {case}: ours, s", Spread.of(times["ours"]), parts=_shares(phases_of["ours"][1:])),
        Result(f"step {case}: plain, s", Spread.of(times["plain"]), parts=_shares(phases_of["plain"][1:])),
    ]


def allocators(case: str, model: str, batch: int, rounds: int) -> list[Result]:
    """The step under each allocator: ours as it is shipped keeps freed memory, plain code has glibc's defaults."""
    common: dict[str, Any] = {"model": model, "batch": batch}
    with children(
        kept={"kind": "ours", "allocator": "kept", **common},
        glibc={"kind": "ours", "allocator": "glibc", **common},
        plain={"kind": "plain", "allocator": "glibc", **common},
    ) as kids:
        times = in_turns({name: kid.seconds for name, kid in kids.items()}, rounds)
    return [
        Result(f"step {case}: plain with glibc's defaults ÷ ours as shipped", ratio(times["plain"], times["kept"])),
        Result(f"step {case}: ours with glibc's defaults ÷ as shipped", ratio(times["glibc"], times["kept"])),
    ]


def in_bf16(case: str, model: str, batch: int, rounds: int) -> Result:
    common: dict[str, Any] = {"kind": "ours", "model": model, "batch": batch, "allocator": "kept"}
    with children(fp32=common, bf16={**common, "settings": {"precision": "bf16"}}) as kids:
        times = in_turns({name: kid.seconds for name, kid in kids.items()}, rounds)
    return Result(f"step {case}: fp32 ÷ bf16", ratio(times["fp32"], times["bf16"]))


def _shares(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The share of each phase, as the median over rounds."""
    names = dict.fromkeys(name for phases in rounds for name in phases)
    totals = [sum(phases.values()) for phases in rounds]
    return {
        name: statistics.median([p.get(name, 0.0) / total for p, total in zip(rounds, totals, strict=True)])
        for name in names
    }
