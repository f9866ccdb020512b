"""How long a checkpoint holds up the training: written in place, or by the thread beside it, in turns.

python -m benchmarks.checkpoint_stall [--rounds 2]: the median time of a step without a checkpoint, and what a step with
one takes more, for a ViT-S with PatchMix's heads (about 500 MB with the optimizer's state).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from patchmix.build import METHODS
from patchmix.nn.vit import create_encoder
from patchmix.study.bench import RepeatedStep
from patchmix.train.checkpoint import Checkpoints, CheckpointWriter
from patchmix.train.loop import Plan

STEPS, EVERY = 12, 4


class InPlace(CheckpointWriter):
    """Waits for the disk at once."""

    def save(self, state: dict[str, object], step: int) -> None:
        super().save(state, step)
        self.wait()


def measure(kind: type[CheckpointWriter], folder: Path) -> tuple[list[float], list[float]]:
    """Seconds of the steps without a checkpoint, and of those with one."""
    torch.manual_seed(0)
    method = METHODS["patchmix"](create_encoder("vit_small_patch8_32")).train()
    views = [torch.randn(16, 3, 32, 32) for _ in range(2)]
    train = RepeatedStep(method, views, Plan(lr=lambda _: 1e-4, weight_decay=lambda _: 0.1, batch_size=16, epochs=1))
    writer = kind(Checkpoints(folder))
    plain: list[float] = []
    saving: list[float] = []
    for step in range(STEPS + EVERY):
        began = time.perf_counter()
        train()
        due = step % EVERY == EVERY - 1
        if due:
            writer.save({"method": method.state_dict(), "optimizer": train.optimizer.state_dict(), "step": step}, step)
        if step >= EVERY:  # the first save makes the copies' memory
            (saving if due else plain).append(time.perf_counter() - began)
    writer.wait()
    return plain, saving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    kinds: dict[str, type[CheckpointWriter]] = {"in place": InPlace, "beside the training": CheckpointWriter}
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in kinds}
    for _ in range(parser.parse_args().rounds):
        for name, kind in kinds.items():
            with tempfile.TemporaryDirectory() as folder:
                for all_found, found in zip(times[name], measure(kind, Path(folder)), strict=True):
                    all_found += found
    for name, (plain, saving) in times.items():
        step, more = statistics.median(plain), statistics.median(saving) - statistics.median(plain)
        print(f"{name}: a step {1000 * step:.0f} ms, with a checkpoint {1000 * more:+.0f} ms")


if __name__ == "__main__":
    main()
