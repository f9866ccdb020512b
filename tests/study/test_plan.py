from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.products import count_flops
from patchmix.build import METHODS, build_method, build_plan, build_weightless
from patchmix.cli import from_keywords, main
from patchmix.config import Config
from patchmix.interop.backbone import Architecture
from patchmix.recipes import PAPER_ROWS, start
from patchmix.settings import Plan
from patchmix.study.bench import RepeatedStep
from patchmix.study.flops import config_flops, encoder_flops, shape_of
from patchmix.study.plan import HARDWARE, estimate, largest_batch, memory

T2, S16, SMALL = ("paper", "vit_tiny_patch2_32"), ("paper", "vit_small_patch16_224"), ("fast", "vit_tiny_patch8_32")


def step_flops(config: Config, n: int) -> int:
    """FLOPs of a PatchMix step of n images: the plan's, which leave out the similarities and count gradients of images,
    which nobody computes."""
    flops, shape, options = config_flops(config), shape_of(config.model), config.method.options
    assert flops is not None and config.method.name == "patchmix"
    oto, mto, mtm = options.weights
    plain, mixed, groups = _queries(config, n)
    crops = config.views.local_crops
    rows = plain * bool(oto) + mixed * (bool(mto) + bool(mtm)) + mixed * groups * bool(options.region_weight)
    rows += crops * n * 2 * 2
    whole, small = (_embedding(s) for s in (shape, dataclasses.replace(shape, image_size=config.views.local_size)))
    images = (plain * bool(oto) + mixed) * whole + crops * 2 * n * small
    exact = flops * n - images + 4 * rows * n * options.head_out
    return int(exact)


def _queries(config: Config, n: int) -> tuple[int, int, int]:
    """Plain and mixed images among n that are queries, and the regions of a mixed one."""
    options = config.method.options
    shares = [max(2, round(share * n)) for share in (options.plain_share, options.mixed_share)]
    return shares[0], shares[1], int(np.mean(options.num_mix))


def _embedding(shape: Architecture) -> int:
    """The layer that sees the image."""
    one, two = (encoder_flops(dataclasses.replace(shape, in_chans=channels)) for channels in (1, 2))
    return shape.in_chans * (two - one)


@pytest.mark.parametrize(
    "recipe",
    [SMALL, *(pytest.param(each, marks=pytest.mark.slow) for each in (T2, S16, ("official", "vit_small_patch16_224")))],
    ids=str,
)
def test_flops_are_exactly_torchs_count(recipe: tuple[str, str]) -> None:
    config = start(recipe[0], model=recipe[1])
    crops = {"local_crops": config.views.local_crops, "local_size": config.views.local_size}
    assert step_flops(config, 8) == sum(count_flops(*build_weightless(config.model, config.method, batch=8, **crops)))


def measured_peak(config: Config, n: int) -> int:
    """Bytes that tensors hold at the peak of the second step, on this CPU: what stays, and what torch's profiler sees
    come and go.
    """
    method = build_method(config).train()
    side = shape_of(config.model).image_size
    plan = build_plan(config, method.encoder, steps_per_epoch=100, device=torch.device("cpu"))
    step = RepeatedStep(method, [torch.randn(n, 3, side, side) for _ in range(2)], plan)
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    stays = [*method.state_dict().values()]
    stays += [x for state in step.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    return peak + sum(x.numel() * x.element_size() for x in stays)


@pytest.mark.parametrize(
    ("recipe", "n", "recompute"),
    [
        (SMALL, 64, False),
        pytest.param(T2, 4, False, marks=pytest.mark.slow),
        pytest.param(T2, 4, True, marks=pytest.mark.slow),
        pytest.param(S16, 4, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_memory_is_within_a_tenth_of_the_measured_peak(recipe: tuple[str, str], n: int, recompute: bool) -> None:
    config = start(recipe[0], model=recipe[1]).replace(batch_size=n, recompute=recompute, precision="fp32")
    expected = sum(memory(config, n, low=False, recompute=recompute).values())
    assert expected == pytest.approx(measured_peak(config, n), rel=0.1)


def plan_of(**settings: Any) -> Plan[Any]:
    settings = {"model": "vit_small_patch16_224", "data": "imagenet", "gpus": "8xA100-80GB"} | settings
    found: Plan[Any] = from_keywords(Plan, **settings)
    return found


def test_hours_energy_and_data_follow_from_the_flops() -> None:
    found = estimate(plan_of(utilization=0.5))
    seconds = found["flops_per_image"] * 1_281_167 * 300 / (8 * 312e12 * 0.5)
    assert found["hours"] == pytest.approx(seconds / 3600)
    assert found["kwh"] == pytest.approx(found["hours"] * 8 * 0.4)
    assert found["images_per_second"] == pytest.approx(1_281_167 * 300 / seconds)
    assert found["disk_gb"] == pytest.approx(138, rel=0.01)
    slower = estimate(plan_of(utilization=0.25))
    assert slower["hours"] == pytest.approx(2 * found["hours"]) and slower["loader_cores"] == pytest.approx(
        found["loader_cores"] / 2
    )


def test_a_budget_gives_the_epochs() -> None:
    whole = estimate(plan_of())
    found = estimate(plan_of(budget=f"{30 * whole['hours']}min"))
    assert found["hours"] == pytest.approx(whole["hours"] / 2)
    assert found["epochs"] == pytest.approx(whole["epochs"] / 2)


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    config = plan_of().run
    how: dict[str, Any] = {"low": True, "recompute": False, "several": True}
    most = largest_batch(config, 40e9, **how)
    fits, next_one = (sum(memory(config, n, **how).values()) for n in (most, most + 1))
    assert fits <= 40e9 < next_one
    assert largest_batch(config, 40e9, **how | {"recompute": True}) > 2 * most
    assert largest_batch(config, 1e8, **how) == 0


def test_every_method_has_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    for method in METHODS:
        main(["plan", "imagenet", "--gpus", "2xL4-24GB", "--method", method, "--json"])
        found = json.loads(capsys.readouterr().out)
        assert found["method"] == method and found["memory"]["activations"] > 0
        assert found["hours"] == pytest.approx(found["flops"] / (2 * 121e12 * 0.2) / 3600)
        exchanged = {name for name, size in found["traffic"].items() if size}
        expected = set() if method in ("byol", "dino", "ibot") else {"keys"}
        assert exchanged == {"gradients", "statistics", *expected}


def test_without_data_a_recipe_plans_for_the_papers_images(capsys: pytest.CaptureFixture[str]) -> None:
    for model, images in (("vit_small_patch16_224", 1_281_167), ("vit_tiny_patch2_32", 50_000)):
        main(["plan", "--recipe", "paper", "--model", model, "--gpus", "8xA100-80GB", "--json"])
        assert json.loads(capsys.readouterr().out)["images"] == images


def test_mistakes_are_named() -> None:
    for settings, text in (
        ({"gpus": "8xA100"}, "A100-"),
        ({"gpus": "0xA100-80GB"}, "--gpus 0xA100-80GB are none; give at least one, such as 1xA100-80GB"),
        ({"gpus": None}, "which hardware"),
        ({"gpus": "8xA100-80GB", "here": True}, "--gpus and --here both give the hardware"),
        ({"gpus": None, "here": True, "tflops": 1.0}, "--tflops and --here both give the hardware"),
        ({"model": "same"}, "recipe adapt takes its model from the weights; add --model"),
        ({"gpus": "3xL4-24GB"}, "batch size 1024"),
        (
            {"accumulate": 3},
            "batch size 1024 does not divide among 8 devices and 3 micro-batches; use --batch-size 1032",
        ),
        ({"data": "photos"}, "--images"),
    ):
        with pytest.raises(ValueError, match=text):
            estimate(plan_of(**settings))
    with pytest.raises(ValueError, match="the number of images of 'your images' is not known"):
        estimate(from_keywords(Plan, recipe="adapt", model=S16[1], gpus="8xA100-80GB"))
    assert all(each.source and each.tflops > 50 for each in HARDWARE.values())


def test_micro_batches_exchange_what_the_whole_batch_does_and_statistics_each() -> None:
    whole, four = (estimate(plan_of(accumulate=passes))["traffic"] for passes in (1, 4))
    assert (four["keys"], four["gradients"]) == (whole["keys"], whole["gradients"])
    assert four["statistics"] == pytest.approx(4 * whole["statistics"])


def test_this_machine_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--dim", "24", "--depth", "1", "--heads", "2", "--workers", "0"]
    main(["plan", "--recipe", "demo", "--here", "--epochs", "1", "--in-chans", "5", *small])
    out = capsys.readouterr().out
    assert "here (cpu)" in out and "measured by a step" in out
    assert "min at the measured speed" in out and "0.0 h" not in out and "% of the peak" not in out


def test_the_tables_of_the_docs_are_what_the_command_says() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (imagenet|cifar10) \| (\S+) \| (\d+) \| (.*) \|$", text, flags=re.MULTILINE)
    assert len(rows) == len([row for row in PAPER_ROWS if row.data != "cifar100"])

    def gb(*memories: dict[str, int]) -> str:
        return "; ".join(f"{sum(each.values()) / 1e9:.1f}" for each in memories)

    for data, model, epochs, rest in rows:
        found = estimate(plan_of(data=data, model=model, epochs=float(epochs)))
        largest = f"{found['largest_batch']}; {found['largest_batch_recomputing']}"
        cells = [f"{found['flops']:.2e}", f"{found['hours']:.1f}", f"{found['kwh']:.0f}"]
        cells += [gb(found["memory"], found["memory_recomputing"]), largest]
        assert rest.split(" | ") == [*cells, f"{found['images_per_second']:,.0f}", f"{found['loader_cores']:.0f}"]
    for gpus, hours, rest in re.findall(r"^\| (64|128|256|512) \| ([\d.]+) \| (.*) \|$", text, flags=re.MULTILINE):
        many: dict[str, Any] = {"data": "web", "images": 10**9, "image_kb": 100.0, "model": "vit_large_patch16_224"}
        found = estimate(plan_of(**many, gpus=f"{gpus}xH100-80GB", epochs=10.0, batch_size=4096))
        cells = [gb(found["memory"], found["memory_recomputing"]), f"{found['images_per_second']:,.0f}"]
        cells += [f"{8 * found['loader_cores'] / int(gpus):.0f}", f"{found['read_mb_s'] / 1000:.1f} GB/s"]
        assert [hours, *rest.split(" | ")] == [f"{found['hours']:.1f}", *cells, f"{found['traffic_share']:.2f}"]
