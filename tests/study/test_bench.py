from __future__ import annotations

import json
import mmap
import shutil
import time

import pytest
import torch

from benchmarks.result import ratio
from patchmix.cli import main
from patchmix.study import bench
from patchmix.study.bench import Gemm, Phases, Spread, in_turns, peak_bytes, reset_peak, resident_bytes

CPU = torch.device("cpu")
SMALL = ["--dim", "24", "--depth", "1", "--heads", "2", "--head-hidden", "32", "--head-out", "16"]


def test_measures_take_turns_and_the_warm_up_is_dropped() -> None:
    calls: list[str] = []

    def record(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    values = in_turns({"a": lambda: record("a"), "b": lambda: record("b")}, rounds=2, warm_up=1)
    assert calls == ["a", "b"] * 3
    assert values == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def test_a_ratio_is_taken_round_by_round() -> None:
    # The machine is ten times slower in the second round: that may not show.
    assert ratio([2.0, 20.0, 2.2], [1.0, 10.0, 1.0]) == Spread(2.0, 2.0, 2.2)


def test_a_phase_inside_another_counts_once() -> None:
    phases = Phases(CPU)
    with phases.of("outer"):
        with phases.of("inner"):
            time.sleep(0.05)
        time.sleep(0.01)
    assert phases.seconds["inner"] > phases.seconds["outer"] >= 0.01


def test_the_peak_sees_what_was_freed() -> None:
    reset_peak()
    before = resident_bytes()
    with mmap.mmap(-1, 120_000_000) as block:  # not malloc, which may have as much to give away already
        block[:: mmap.PAGESIZE] = b"1" * -(-len(block) // mmap.PAGESIZE)
    assert peak_bytes() - before > 100e6


def test_the_rate_of_products_is_that_of_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "GEMM_SHAPES", [(4, 5, 6), (2, 3, 4)])
    times = iter([0.5, 0.25, 0.5, 0.5])
    monkeypatch.setattr(bench, "seconds", lambda product, device: product() is not None and next(times))
    assert Gemm(CPU).rate() == 2 * 4 * 5 * 6 / 0.25


@pytest.mark.parametrize("method", ["patchmix", "simclr"])
def test_the_command_measures_a_model(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["bench", "shapes:32", "--recipe", "demo", "--method", method, "--batch-size", "8"]
    main([*common, "--workers", "0", "--steps", "1", "--json", *SMALL])
    summary = json.loads(capsys.readouterr().out)
    assert summary["batch_size"] == 8
    assert summary["images_per_second"] == pytest.approx(8 / summary["step_seconds"]["median"])
    assert sum(summary["phases"].values()) == pytest.approx(1.0)
    assert {"forward", "backward", "optimizer"} <= set(summary["phases"])
    assert ("keys" in summary["phases"] and "mixing" in summary["phases"]) == (method == "patchmix")
    assert 0 <= summary["loader_wait"] <= 1 and 0 < summary["ceiling_share"]["median"] < 1


def test_the_share_of_the_ceiling_has_the_cost_of_the_measured_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(bench, "config_flops", lambda config, **how: given.update(how))
    main(["bench", "shapes:32", "--recipe", "demo", "--batch-size", "8", "--workers", "0", "--steps", "1", *SMALL])
    assert given["at"] == bench.PROGRESS


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler: install g++")
def test_the_time_of_compiling_is_reported_apart(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["bench", "shapes:32", "--recipe", "demo", "--batch-size", "8", "--workers", "0"]
    main([*common, "--steps", "2", "--json", "--compile", *SMALL])
    summary = json.loads(capsys.readouterr().out)
    assert summary["compiling_seconds"] > summary["step_seconds"]["high"]
    assert "keys" not in summary["phases"] and {"forward", "backward"} <= set(summary["phases"])
    assert summary["recompilations"] == 0 and summary["compiled_gain"]["median"] > 0
