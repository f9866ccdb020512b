"""A killed run, resumed, ends with exactly the weights and losses of one that was left alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from patchmix.cli import main
from patchmix.config import Config
from patchmix.run import Run, _find_checkpoint
from patchmix.train.checkpoint import Checkpoints, load_checkpoint
from patchmix.train.log import read_metrics

EPOCHS, STEPS = 2, 32  # 512 images in batches of 32
TINY = [
    *("--recipe", "demo", "--model", "vit_tiny_patch8_32", "--epochs", str(EPOCHS), "--batch-size", "32"),
    *("--dim", "24", "--depth", "2", "--drop-path", "0.2"),
    *("--head-hidden", "32", "--head-out", "16", "--num-mix", "2", "3"),
    *("--monitor-bank", "64", "--monitor-queries", "32", "--monitor-every", "1"),
    *("--log-every", "1", "--checkpoint-epochs", "0.25"),
]


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "patchmix", "pretrain", "shapes:512", "--out", str(out), *TINY, *more]
    environment, pipe = os.environ | {"OMP_NUM_THREADS": "1"}, subprocess.PIPE
    hear = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment, preexec_fn=hear)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def wait_for_step(process: subprocess.Popen[str], out: Path, step: int) -> None:
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if metrics.exists() and any(row["step"] >= step for row in read_metrics(metrics)):
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def losses(out: Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["loss"], r["lr"]) for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "train"]


def assert_same(a: Path, b: Path) -> None:
    left, right = (load_file(run / "encoder.safetensors") for run in (a, b))
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name
    states = [load_checkpoint(run / "checkpoints" / "last") for run in (a, b)]
    for name, tensor in states[0]["method"].items():  # the momentum encoder and the heads, too
        assert torch.equal(tensor, states[1]["method"][name]), name
    assert losses(a) == losses(b)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(start(out, "--workers", "0"))
    assert [step for step, _, _ in losses(out)] == list(range(1, STEPS + 1))
    return out


@pytest.mark.parametrize(("kill_at", "workers"), [(5, 0), (13, 2), (27, 0), (5, 2), (13, 0), (27, 2)])
def test_kill_and_resume(undisturbed: Path, tmp_path: Path, kill_at: int, workers: int) -> None:
    out = tmp_path / "run"
    process = start(out, "--workers", str(workers))
    wait_for_step(process, out, kill_at)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    last = Checkpoints(out / "checkpoints").last
    assert last is not None
    assert 0 < load_checkpoint(last)["step"] < STEPS
    assert not (out / "encoder.safetensors").exists()
    output = finish(start(out, "--workers", str(workers), "--resume", "auto"))
    assert "continuing at step" in output
    assert_same(undisturbed, out)


def test_views_on_the_device_resume_exactly(undisturbed: Path, tmp_path: Path) -> None:
    alone, out = tmp_path / "alone", tmp_path / "run"
    device = [*TINY, "--views", "device", "--keep-checkpoints", "9"]
    main(["pretrain", "shapes:512", "--out", str(alone), *device, "--workers", "0"])
    assert Run(alone).config.runtime.views == "device"
    # The same views, but for rounding, which batch norm over eight plain queries of an untrained network magnifies.
    assert 0 < abs(losses(alone)[0][1] - losses(undisturbed)[0][1]) < 0.1

    halfway = Checkpoints(alone / "checkpoints").path(12)  # what a killed run would have left
    main(["pretrain", "shapes:512", "--out", str(out), *device, "--workers", "2", "--resume", str(halfway)])
    one, other = (load_checkpoint(run / "checkpoints" / "last")["method"] for run in (alone, out))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert losses(out) == losses(alone)[12:]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_write_a_checkpoint_and_end_the_run(undisturbed: Path, tmp_path: Path, signum: signal.Signals) -> None:
    out = tmp_path / "run"
    process = start(out, "--workers", "1")
    wait_for_step(process, out, 6)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert "its checkpoint is written; continue with --resume auto" in output
    assert "Traceback" not in output
    stopped_at = load_checkpoint(out / "checkpoints" / "last")["step"]
    assert stopped_at == losses(out)[-1][0]
    finish(start(out, "--workers", "1", "--resume", "auto"))
    assert_same(undisturbed, out)


def test_refusals(undisturbed: Path, tmp_path: Path) -> None:
    again = start(undisturbed, "--workers", "0")
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 2
    assert "already holds a run; continue it with --resume auto" in output

    other = tmp_path / "other"
    Checkpoints(other / "checkpoints").save({"step": 900}, 900)
    with pytest.raises(ValueError, match=r"other already holds a run, which .* would replace"):
        _find_checkpoint(Config(), other, undisturbed / "checkpoints" / "last")

    changed = start(undisturbed, "--workers", "0", "--resume", "auto", "--base-lr", "0.5")
    output, _ = changed.communicate(timeout=60)
    assert changed.returncode == 2
    assert "optim.base_lr: 0.004 → 0.5" in output
    assert "Traceback" not in output

    encoder = shutil.copytree(undisturbed, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    finished = start(encoder, "--workers", "0", "--resume", "auto")
    output, _ = finished.communicate(timeout=60)
    assert finished.returncode == 2
    assert "holds a finished run without its checkpoints; choose another --out" in output
