"""A training to do harm to, in its own process; forked from one that has imported everything, it starts at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from patchmix.train.checkpoint import Checkpoints, load_checkpoint
from patchmix.train.log import read_metrics

STEPS = 16  # 512 images in batches of 32
TINY = [
    *("--recipe", "demo", "--model", "vit_tiny_patch8_32", "--batch-size", "32"),
    *("--dim", "24", "--depth", "2", "--drop-path", "0.2"),
    *("--head-hidden", "32", "--head-out", "16"),
    *("--monitor-bank", "64", "--monitor-queries", "32"),
    *("--log-every", "1", "--checkpoint-epochs", "0.25"),
    *("--area", "0.4", "1"),  # the demo's let rounding grow to 2e-4 when processes change (in fp64 to 1e-14)
]

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["patchmix.run", "patchmix.cli", "torch.utils.tensorboard", "tests.faults.trainee"])
_logs = tempfile.TemporaryDirectory(prefix="trainees-")  # not beside OUT, whose disk may be full


class Trainee:
    """`patchmix pretrain DATA --out OUT …` with everything that it says in `output`."""

    def __init__(
        self, out: Path, *more: str, data: str = "shapes:512", inject: Callable[[], None] | None = None
    ) -> None:
        self.out = out
        self._log = Path(_logs.name) / f"{out.name}-{time.monotonic_ns()}.txt"
        length = [] if "--budget" in more else ["--epochs", "1"]
        arguments = ["pretrain", data, "--out", str(out), *TINY, *length, *more]
        if "--workers" not in more:
            arguments += ["--workers", "0"]
        self.process = FORKSERVER.Process(target=_train, args=(arguments, str(self._log), inject))
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def last_line(self) -> str:
        return self.output.strip().splitlines()[-1]

    @property
    def peak_memory(self) -> int:
        """Bytes."""
        return int(self._log.with_suffix(".memory").read_text())

    def wait_for_step(self, step: int) -> Trainee:
        metrics = self.out / "metrics.jsonl"
        self._wait(
            lambda: metrics.exists() and any(row["step"] >= step for row in read_metrics(metrics)), f"step {step}"
        )
        return self

    def wait_for_checkpoint(self) -> Trainee:
        self._wait(lambda: Checkpoints(self.out / "checkpoints").last is not None, "the first checkpoint")
        return self

    def _wait(self, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 300
        while not reached():
            assert self.process.exitcode is None, f"{what} was not reached: {self.output}"
            assert time.monotonic() < deadline, f"{what} was not reached: {self.output}"
            time.sleep(0.005)

    def send(self, signum: int) -> Trainee:
        os.kill(self.pid, signum)
        return self

    def ends(self, code: int) -> Trainee:
        self.process.join(300)
        assert self.process.exitcode == code, (self.process.exitcode, self.output)
        assert code < 0 or "Traceback" not in self.output, self.output
        return self

    def children(self) -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == self.pid:
                found.append(int(folder.name))
        return found


def _train(arguments: list[str], log: str, inject: Callable[[], None] | None) -> None:
    from patchmix.cli import main

    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # as in a run of its own; else workers come from our server
    if inject is not None:
        inject()
    try:
        main(arguments)
    finally:
        memory = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        Path(log).with_suffix(".memory").write_text(str(int(memory.split()[1]) * 1024))


def losses(out: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "train"]


# Shifts without effect on the loss: a bias-free layer and then a batch norm, which subtracts the mean, follow on the
# encoder's last norm. Their gradient is nothing but rounding, which Adam magnifies to full steps, so that they differ
# with the number of processes; and with them the mean that this batch norm keeps.
SUBTRACTED_AGAIN = {"encoder.norm.bias", "momentum_copy.network.0.norm.bias", "norm.bias"}
MEAN_OF_IT = {"projector.1.running_mean", "momentum_copy.network.1.1.running_mean"}


def with_effect(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """All that can change the loss of PatchMix. A key's bias can't: it adds the same to all of a query's similarities,
    and softmax takes that out again."""
    kept = {name: tensor for name, tensor in state.items() if name not in SUBTRACTED_AGAIN | MEAN_OF_IT}
    for name in [name for name in kept if name.endswith("attn.qkv.bias")]:
        query, _, value = kept.pop(name).chunk(3)
        kept |= {f"{name} (query)": query, f"{name} (value)": value}
    return kept


def assert_same(a: Path, b: Path, tolerance: float = 0.0) -> None:
    """The same encoder, heads and momentum encoder, and the same losses on the way.

    With a tolerance: of every weight that has an effect, and ten times it of the losses, which are about 10.
    """
    files = [load_file(run / "encoder.safetensors") for run in (a, b)]
    states = [load_checkpoint(run / "checkpoints" / "last")["method"] for run in (a, b)]
    for one, other in (files, states):
        assert one.keys() == other.keys()
        if tolerance:
            one, other = with_effect(one), with_effect(other)
        for name in one:
            assert (one[name].double() - other[name].double()).abs().max() <= tolerance, name
    left, right = losses(a), losses(b)
    assert [step for step, _ in left] == [step for step, _ in right]
    assert max(abs(x - y) for (_, x), (_, y) in zip(left, right, strict=True)) <= 10 * tolerance


def assert_tidy(out: Path) -> None:
    """The last checkpoint can be read, is finite, and nothing half-written lies about."""
    last = Checkpoints(out / "checkpoints").last
    assert last is not None
    assert all(torch.isfinite(tensor).all() for tensor in load_checkpoint(last)["method"].values())
    assert not list(out.rglob(".*.unfinished"))
