"""torch.compile sees each method whole: only `draw`, with its random numbers on the CPU, stays outside of the graph."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import eager
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from patchmix.build import METHODS, build_method, build_plan
from patchmix.config import Config, validate
from patchmix.methods.method import Method
from patchmix.methods.options import METHOD_OPTIONS
from patchmix.nn.tokens import class_tokens
from patchmix.nn.vit import create_encoder
from patchmix.recipes import fast
from patchmix.schedules import Linear
from patchmix.train.loop import train_step, wrap
from patchmix.train.optimizer import build_optimizer

SMALL = {"head_hidden": 32, "head_out": 16}
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler: install g++")


def make(name: str, **options: Any) -> Method:
    torch.manual_seed(0)
    encoder = create_encoder("vit_tiny_patch4_16", dim=24, depth=2, heads=2, drop_path=0.1)
    return METHODS[name](encoder, validate(METHOD_OPTIONS[name], SMALL | options)).train()


def views() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, 3, 16, 16, generator=generator) for _ in range(2)]


def test_the_encoder_is_one_graph() -> None:
    encoder = make("patchmix").encoder
    x = views()[0]
    torch.manual_seed(1)
    expected = class_tokens(encoder, x)
    torch.manual_seed(1)
    compiled = torch.compile(class_tokens, backend=eager, fullgraph=True)
    torch.testing.assert_close(compiled(encoder, x), expected)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *(pytest.param(n, eager, marks=[] if n in ("patchmix", "dino") else pytest.mark.slow) for n in sorted(METHODS)),
        pytest.param("patchmix", "inductor", marks=[pytest.mark.slow, needs_compiler]),
    ],
)
@inductor.patch(fallback_random=True)  # the same random numbers
def test_a_compiled_method_computes_the_same(name: str, backend: Any) -> None:
    torch._dynamo.reset()
    counters.clear()
    dtype = torch.float32 if backend is eager else torch.float64
    plain, twin, images = make(name).to(dtype), make(name).to(dtype), [view.to(dtype) for view in views()]
    compiled, graphs = torch.compile(twin.forward, backend=backend, fullgraph=True), []
    for step in range(5):
        losses, gradients = [], []
        for method, forward in ((plain, plain.forward), (twin, compiled)):
            torch.manual_seed(step)
            method.generator.manual_seed(step)
            method.before_step(0.1 + 0.02 * step)  # temperatures and momentum change
            method.zero_grad()
            loss = forward(images, *method.draw(images))["loss"]
            loss.backward()
            method.after_step(0.1 + 0.02 * step)
            losses.append(loss.item())
            gradients.append(torch.cat([p.grad.flatten() for p in method.parameters() if p.grad is not None]))
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        # In fp32 both are off by rounding, up to 4e-5 of the largest; similarities are fp32 always.
        torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-6 * gradients[0].abs().max().item())
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[2] <= 3  # nothing is compiled again after the first steps


@pytest.mark.parametrize("ends", [(0.6, 0.2), (0.5, 0.5)])
def test_dropped_tokens(ends: tuple[float, float]) -> None:
    torch._dynamo.reset()
    counters.clear()
    config = Config().replace(**SMALL, model="vit_tiny_patch4_16", dim=24, depth=2, heads=2, region_weight=1.0)
    plain, twin = (build_method(config.replace(token_dropout=ends)).train() for _ in range(2))
    compiled, graphs = torch.compile(twin.forward, backend=eager), []
    for step in range(5):
        losses = []
        for method, forward in ((plain, plain.forward), (twin, compiled)):
            torch.manual_seed(step)
            method.generator.manual_seed(step)
            method.drop_tokens(Linear(*ends, duration=1.0)(step / 4))
            loss = forward(views(), *method.draw(views()))["loss"]
            loss.backward()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == (graphs[2] if ends[0] != ends[1] else 1)


def test_every_image_size_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **how: compiled(module, backend=eager, **how))
    cpu, sizes = torch.device("cpu"), (8, 8, 12, 16, 16)
    config = fast("vit_tiny_patch4_16").replace(**SMALL, dim=24, depth=2, heads=2, image_sizes=sizes, precision="fp32")
    losses = []
    for compiles in (False, True):
        method = build_method(config).train()
        plan = replace(build_plan(config, method.encoder, 1, cpu), compile=compiles)
        how = {"optimizer": build_optimizer(method), "batches": itertools.repeat(views()), "plan": plan, "device": cpu}
        step = partial(train_step, wrap(method, cpu, plan), method, **how, prepare=lambda batch: batch)
        losses += [[float(step(step=i, progress=i / 5)["loss"].detach()) for i in range(5)]]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert counters["stats"]["unique_graphs"] == 3


@pytest.mark.slow
@needs_compiler
def test_a_compiled_run(tmp_path: Path) -> None:
    from patchmix import pretrain

    settings = {"dim": 24, "depth": 2, "heads": 2, "monitor_every": 0, "monitor_bank": 64}
    run = pretrain("shapes", tmp_path / "run", recipe="demo", epochs=0.02, batch_size=32, compile=True, **settings)
    assert run.config.runtime.compile
    assert run.encoder_path.is_file()
