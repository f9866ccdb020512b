"""Whole steps on a fake GPU: nothing is left on the CPU, the host waits for nothing, nothing is float64."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from patchmix.build import METHODS, build_method, build_plan, build_prepare, build_views
from patchmix.config import Config, ViewsConfig
from patchmix.data.device_views import Crops
from patchmix.data.loader import Batch
from patchmix.device import autocast_dtype
from patchmix.evaluate.detection.model import Detector, Shape, build_detector
from patchmix.evaluate.finetune import Erasing, FinetuneMethod
from patchmix.evaluate.knn import knn_predict
from patchmix.evaluate.linear import LinearMethod
from patchmix.evaluate.sweep import Candidate, fit_candidates
from patchmix.interop.backbone import Architecture
from patchmix.methods.method import Method
from patchmix.nn.vit import create_encoder
from patchmix.recipes import start
from patchmix.settings import Finetune
from patchmix.train import loop
from patchmix.train.loop import Plan, train_step
from patchmix.train.optimizer import build_optimizer
from patchmix.train.watch import LossWatch, NonFiniteLoss
from tests.fake_gpu import GPU, FakeGPU, Punished

N = 6
SMALL: dict[str, Any] = {"dim": 24, "depth": 2, "heads": 2, "head_hidden": 32, "head_out": 16, "clip_grad": 1.0}


def small(method: str = "patchmix", **settings: Any) -> Config:
    return start(model="vit_tiny_patch4_16", method=method).replace(**SMALL | settings)


def steps_on_gpu(config: Config, count: int = 1) -> FakeGPU:
    """Some whole steps: schedules, forward, backward, clipping, optimizer, moving average."""
    method = build_method(config).train()
    with FakeGPU() as gpu:
        gpu.move(method)
        plan = build_plan(config, method.encoder, steps_per_epoch=10, device=GPU)
        optimizer = build_optimizer(method, name=config.optim.name)
        local = config.views.local_size
        views = [gpu.empty(N, 3, size, size) for size in (16, 16, *[local] * config.views.local_crops)]
        for step in range(count):
            losses = step_of(method, optimizer, views, plan, step)
        assert all(value.device == GPU and value.dtype == torch.float32 for value in losses.values())
    return gpu


def step_of(method: Method, optimizer: Any, batch: Any, plan: Plan, step: int = 0) -> dict[str, Tensor]:
    batches = itertools.repeat(batch)
    how: dict[str, Any] = {"step": step, "progress": 0.5, "device": GPU, "prepare": lambda batch: batch}
    return train_step(method, method, optimizer, batches, plan, **how)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_of_every_method(method: str) -> None:
    gpu = steps_on_gpu(small(method, precision="fp32"))
    assert set(gpu.products) == {torch.float32}


@pytest.mark.parametrize("method", METHODS)
def test_a_step_in_bf16_with_local_crops_that_recomputes(method: str) -> None:
    gpu = steps_on_gpu(small(method, local_crops=2, local_size=8, recompute=True, precision="bf16"))
    assert gpu.products[torch.bfloat16] > 20
    assert gpu.products[torch.float32] > 0 or method in ("byol", "dino", "ibot")  # similarities; these have none


@pytest.mark.parametrize(
    "settings",
    [{"mix": mix} for mix in ("mixup", "cutmix", "cutmix+mixup", "resizemix", "regionswap")]
    + [
        {"region_weight": 1.0, "num_mix": 2, "mix_blocks": (2, 1), "token_dropout": (0.5, 0.5)},
        {"directions": "symmetric", "mixed_ramp": 0.9, "label_smoothing": 0.1, "momentum_update": "before_keys"},
        {"momentum_encoder": False, "plain_share": 0.5, "accumulate": 2, "image_sizes": (8, 16)},
        {"optim": "muon"},
        {"method": "swav", "queue_length": 12},
        {"method": "sdmp", "mix": "all"},
    ],
    ids=str,
)
def test_a_step_with_other_options(settings: dict[str, Any]) -> None:
    config = small(settings.pop("method", "patchmix"))
    steps_on_gpu(config.replace(**settings, precision="bf16"))


def test_views_on_the_device() -> None:
    config = ViewsConfig(local_crops=1, local_size=8)
    views = build_views(config, 16)
    colors = torch.from_numpy(Crops(views, seed=0).colors(epoch=0, indices=torch.arange(N).numpy()))
    images = [torch.zeros(N, view.size, view.size, 3, dtype=torch.uint8) for view in views]
    batch = Batch(images, torch.arange(N), torch.zeros(N, dtype=torch.int64), 0, (), colors)
    with FakeGPU(), torch.autocast("cuda", dtype=torch.bfloat16):
        ready = build_prepare(config, in_chans=3)(batch.to(GPU))
    assert [(tuple(x.shape), x.dtype, x.device) for x in ready] == [
        ((N, 3, view.size, view.size), torch.float32, GPU) for view in views
    ]


@pytest.mark.parametrize(("major", "expected"), [(7, None), (8, torch.bfloat16)])
def test_bf16_that_a_gpu_only_emulates_is_not_chosen(
    major: int, expected: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On V100 and T4 it works, slower than fp32."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)
    assert autocast_dtype(GPU) == expected
    assert autocast_dtype(GPU, "bf16") == torch.bfloat16


@pytest.mark.parametrize(
    ("has", "expected"), [({"avx512_bf16"}, torch.bfloat16), ({"amx_bf16"}, torch.bfloat16), ({"avx512_f"}, None)]
)
def test_bf16_on_cpus_that_compute_in_it(
    has: set[str], expected: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(has, True), raising=False)
    assert autocast_dtype(cpu) == expected
    assert autocast_dtype(cpu, "fp32") is None
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # before torch 2.11
    assert autocast_dtype(cpu) is None


# --------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_knn(leave_one_out: bool) -> None:
    bank, labels = torch.randn(40, 8), torch.arange(40) % 7
    with FakeGPU() as gpu:
        gpu.reads = 1  # one for each k, at the end
        found = knn_predict(bank, labels, bank, ks=(5,), leave_one_out=leave_one_out, device=GPU)
    assert found[5].shape == (40, 5)


def supervised_step(method: Method, optimizer: Any, gpu: FakeGPU, images: Tensor | None = None) -> None:
    plan = Plan(lr=lambda p: 1e-3, weight_decay=lambda p: 0.0, batch_size=N, epochs=1, autocast=torch.bfloat16)
    images = gpu.empty(N, 3, 16, 16) if images is None else images
    for _ in range(2):
        step_of(method, optimizer, (images, gpu.empty(N, dtype=torch.int64)), plan)


def encoder(**options: Any) -> Any:
    return create_encoder("vit_tiny_patch4_16", dim=24, heads=2, **{"depth": 2} | options)


def test_linear() -> None:
    method = LinearMethod(encoder(), 7)
    with FakeGPU() as gpu:
        gpu.move(method)
        groups = [{"params": list(method.head.parameters()), "decayed": False}]
        supervised_step(method, torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True), gpu)


def test_the_fast_linear_protocol() -> None:
    features, labels = torch.randn(64, 8), torch.arange(64) % 7
    with FakeGPU() as gpu:
        gpu.may_wait = True  # at the start: axes and candidates
        fit_candidates(features, labels, [Candidate(0.1, 0.0)], classes=7, epochs=1, device=GPU)


def test_finetune() -> None:
    settings = Finetune("weights", "data")
    model = encoder(drop_path=0.1)
    model.reset_classifier(7)
    method = FinetuneMethod(model, 7, settings)
    with FakeGPU() as gpu:
        gpu.move(method)
        groups = [{"params": list(method.encoder.parameters()), "decayed": True}]
        erased = Erasing(0.9, seed=0)(gpu.empty(N, 3, 16, 16), epoch=0, indices=torch.arange(N))
        supervised_step(method, torch.optim.AdamW(groups), gpu, erased)
    assert method.steps == 2


def detector() -> Detector:
    shape = Shape(image_size=64, window=0, channels=8, head_dim=16)
    return build_detector(Architecture.of("vit_tiny_patch4_16", encoder(depth=4)), 3, shape).train()


def test_detection_up_to_its_proposals() -> None:
    found = detector()
    with FakeGPU() as gpu:
        gpu.move(found)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            levels = found.backbone(gpu.empty(2, 3, 64, 64))
            scores, boxes = found.rpn.head(list(levels.values()))
        sum(x.float().sum() for x in [*scores, *boxes]).backward()
        assert found.backbone.tokens.encoder.patch_embed.proj.weight.grad.device == GPU


def test_which_operator_of_detection_cannot_be_faked() -> None:
    """From the proposals on, torchvision's sizes depend on values: every step waits for the device there."""
    found = detector()
    with FakeGPU() as gpu:
        gpu.move(found)
        target = {"boxes": gpu.empty(1, 4), "labels": gpu.empty(1, dtype=torch.int64), "masks": gpu.empty(1, 64, 64)}
        images = gpu.empty(2, 3, 64, 64)
        with pytest.raises(Punished, match="waits"):
            found(images, [(64, 64)] * 2, [target] * 2)


# --------------------------------------------------------------------------------------- streams, events, processes


class Event:
    """A torch.cuda.Event that remembers what was done with it."""

    calls: list[str]

    def record(self) -> None:
        Event.calls.append("record")

    def synchronize(self) -> None:
        Event.calls.append("synchronize")


def test_losses_are_read_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.calls = []
    watched = LossWatch(GPU)
    copies: list[bool] = []

    def to(self: Tensor, device: str, non_blocking: bool = False) -> Tensor:
        copies.append(non_blocking)
        return self

    monkeypatch.setattr(Tensor, "to", to)
    watched.push(0, {"loss": torch.tensor(1.0), "part": torch.tensor(2.0)})
    assert Event.calls == ["record"] and copies == [True]
    watched.push(1, {"loss": torch.tensor(float("nan"))})  # not looked at yet
    assert Event.calls == ["record", "synchronize", "record"]
    with pytest.raises(NonFiniteLoss, match="step 1: loss is nan"):
        watched.push(2, {"loss": torch.tensor(1.0)})


def test_a_batch_is_pinned_and_copied_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self.numel()) or self)
    views, labels = [torch.zeros(N, 4, 4, 3, dtype=torch.uint8)] * 2, torch.zeros(N, dtype=torch.int64)
    batch = Batch(views, torch.arange(N), labels, 0, ()).pin_memory()
    assert sorted(pinned) == [N, N * 48, N * 48]
    with FakeGPU():
        moved = batch.to(GPU)
    assert {x.device for x in [*moved.views, moved.labels]} == {GPU}
    assert torch.equal(moved.indices, torch.arange(N))  # the host reads them


def test_several_processes_get_ddp_on_their_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(loop.distributed, "world_size", lambda: 2)
    monkeypatch.setattr(loop, "DistributedDataParallel", lambda module, **options: made.update(options) or module)
    method = build_method(small())
    plan = build_plan(small(), method.encoder, 10, torch.device("cpu"))
    loop.wrap(method, torch.device("cuda:3"), plan)
    assert made == {"device_ids": [3], "broadcast_buffers": False, "gradient_as_bucket_view": True}
    loop.wrap(method, torch.device("cpu"), plan)
    assert made["device_ids"] is None


def test_the_fake_gpu_punishes() -> None:
    with FakeGPU() as gpu:
        x = gpu.empty(4)
        for wrong in (
            lambda: x + torch.ones(4),
            lambda: x.sum().item(),
            lambda: x.cpu(),
            lambda: x[x > 0],
            lambda: (x > 0).nonzero(),
            lambda: x.double(),
            lambda: torch.ones(4).to(GPU),
            lambda: torch.tensor(1.0, device=GPU),
            lambda: bool((x > 0).any()),
        ):
            with pytest.raises(Punished):
                wrong()
        assert (x * torch.tensor(2.0)).device == GPU  # a number on the CPU is an argument
        assert torch.ones(4).to(GPU, non_blocking=True).device == GPU
