"""How long the step of a small ViT waits for data from one worker, and what the worker holds in memory."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing

from benchmarks.children import ROOT
from benchmarks.result import Result
from patchmix import build
from patchmix.recipes import start
from patchmix.study.bench import RepeatedStep, Spread
from patchmix.train.allocator import keep_freed_memory

CIFAR = ROOT.parent / "shared" / "data" / "cifar10"
MODEL = {"dim": 128, "depth": 4, "heads": 4}


def run(quick: bool = False) -> list[Result]:
    keep_freed_memory()
    data: str | Path = CIFAR if CIFAR.is_dir() else "shapes"
    config = start(data=str(data), model="vit_tiny_patch8_32").replace(batch_size=64, workers=1, **MODEL)
    source = build.build_source(config)
    method = build.build_method(config).train()
    prepare = build.build_prepare(config.views, config.model.in_chans)
    loader = build.build_loader(config, source, 32)
    batches = loader.batches()
    plan = build.build_plan(config, method.encoder, loader.steps_per_epoch, torch.device("cpu"))
    step = RepeatedStep(method, prepare(next(batches)), plan)
    step()
    shares = []
    for _ in range(2 if quick else 4):
        waited, began = 0.0, time.perf_counter()
        for _ in range(10):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            step.views = prepare(batch.to(torch.device("cpu")))
            step()
        shares.append(waited / (time.perf_counter() - began))
    worker = sum(proportional_bytes(child.pid) for child in multiprocessing.active_children() if child.pid)
    pixels = source.load(0).size * len(source)
    batches.close()  # type: ignore[attr-defined]
    return [
        Result("loader: share of time that a step waits, one worker", Spread.of(shares), at_most=0.02),
        Result("loader: worker's own memory (PSS), GB", Spread.of([worker / 2**30])),
        Result("loader: decoded data set, GB", Spread.of([pixels / 2**30])),
    ]


def proportional_bytes(pid: int) -> int:
    """PSS of a process: its own memory and its part of what it shares; 0 where the system does not say."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)
