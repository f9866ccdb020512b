"""What runs in a measuring process: `python -m benchmarks.child '{"kind": "ours", …}'`; see children.py."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.plain import PlainPatchMix, PlainViT, plain_optimizer
from benchmarks.products import Products, count_flops
from patchmix import build
from patchmix.config import Config, ModelConfig
from patchmix.recipes import start
from patchmix.study.bench import Gemm, Phases, RepeatedStep, peak_bytes, resident_bytes
from patchmix.study.flops import shape_of
from patchmix.train.allocator import keep_freed_memory, return_freed_memory

CPU = torch.device("cpu")
Answer = dict[str, Any]


def main(what: dict[str, Any]) -> None:
    if what.get("allocator") == "kept":
        keep_freed_memory()
    elif what.get("allocator") == "returned":
        return_freed_memory()
    torch.manual_seed(0)
    do = KINDS[what["kind"]](what)
    _say({"ready": True})
    for line in sys.stdin:
        _say(do(json.loads(line)))


def _say(answer: Answer) -> None:
    print(json.dumps(answer), flush=True)


def recipe(what: dict[str, Any]) -> Config:
    settings = {"batch_size": what["batch"], "precision": "fp32", **what.get("settings", {})}  # the plain one has fp32
    return start(model=what["model"]).replace(**settings)


def random_views(size: int, batch: int) -> list[torch.Tensor]:
    return [torch.randn(batch, 3, size, size) for _ in range(2)]


def ours(what: dict[str, Any]) -> Callable[[Answer], Answer]:
    """The package's own step, with the recipe's settings."""
    before = resident_bytes()
    config = recipe(what)
    method = build.build_method(config).train()
    views = random_views(shape_of(ModelConfig(what["model"])).image_size, what["batch"])
    plan = build.build_plan(config, method.encoder, steps_per_epoch=1000, device=CPU)
    iterate = RepeatedStep(method, views, plan)
    phases = iterate.time_phases() if what.get("phases") else None
    products = Products()

    def do(request: Answer) -> Answer:
        if request["do"] == "flops":
            small = random_views(views[0].shape[-1], request["batch"])
            return {"executed": sum(count_flops(method, small)) / request["batch"]}
        if request["do"] == "products":
            if not products.calls:
                with products:
                    iterate()
            return {"seconds": products.seconds()}
        return _step(iterate, phases, before)

    return do


def plain(what: dict[str, Any]) -> Callable[[Answer], Answer]:
    """The plain baseline's step, from the same weights."""
    before = resident_bytes()
    config = recipe(what)
    sizes = shape_of(ModelConfig(what["model"]))
    heads = {"tiny": 3, "small": 6, "base": 12}[what["model"].split("_")[1]]
    encoder = PlainViT(
        sizes.image_size, sizes.patch_size, sizes.dim, sizes.depth, heads, drop_path=config.model.drop_path
    )
    model = PlainPatchMix(encoder, patch_size=sizes.patch_size).train()
    optimizer = plain_optimizer(model)
    views = random_views(sizes.image_size, what["batch"])
    phases = Phases(CPU)
    model.key = phases.of("keys")(model.key)  # type: ignore[method-assign, assignment]

    def iterate() -> float:
        with phases.of("forward"):
            loss = model(views)["loss"]
        with phases.of("backward"):
            loss.backward()
        with phases.of("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        with phases.of("EMA"):
            model.follow(0.996)
        return float(loss.detach())

    return lambda request: _step(iterate, phases, before)


def _step(iterate: Callable[[], float], phases: Phases | None, before: int) -> Answer:
    if phases is not None:
        phases.seconds.clear()
    began = time.perf_counter()
    loss = iterate()
    elapsed = time.perf_counter() - began
    return {"seconds": elapsed, "loss": loss, "phases": phases.seconds if phases else {}, "peak": peak_bytes() - before}


def gemm(what: dict[str, Any]) -> Callable[[Answer], Answer]:
    """The machine's best rate for matrix products."""
    products = Gemm(CPU)
    return lambda request: {"rate": products.rate()}


KINDS: dict[str, Callable[[dict[str, Any]], Callable[[Answer], Answer]]] = {"ours": ours, "plain": plain, "gemm": gemm}

if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
