"""python -m tests.faults.soak MINUTES [--kill-every SECONDS] [--data DATA]: a training that is killed again and again.

It is measured first how many steps fit into the time; then the same run is trained side by side once in peace and once
with a kill -9 every so often, always continued by --resume auto. Both must end with the same weights, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from patchmix.train.checkpoint import Checkpoints
from patchmix.train.log import read_metrics
from tests.faults.trainee import assert_same, assert_tidy

MODEL = [
    *("--recipe", "paper", "--model", "vit_tiny_patch8_32", "--batch-size", "64", "--workers", "1", "--resume", "auto"),
    *(
        "--dim",
        "48",
        "--depth",
        "3",
        "--head-hidden",
        "64",
        "--head-out",
        "32",
    ),
    *("--monitor-bank", "200", "--monitor-queries", "100", "--log-every", "1"),
    *("--warmup-epochs", "0"),
]
STEPS_BETWEEN_CHECKPOINTS = 10


def start(data: str, out: Path, epochs: float, per_epoch: int, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "patchmix", "pretrain", data, "--out", str(out), *MODEL, "--epochs", str(epochs)]
    command += ["--checkpoint-epochs", f"{STEPS_BETWEEN_CHECKPOINTS / per_epoch}"]
    with log.open("ab") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )


def steps_of(out: Path) -> list[dict[str, float]]:
    path = out / "metrics.jsonl"
    return [row for row in read_metrics(path) if row["kind"] == "train"] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--kill-every", type=float, default=120.0, help="seconds")
    parser.add_argument("--data", default="shapes:2048")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "log.txt"

        assert start(options.data, folder / "trial", 1, 1000, log).wait() == 0, log.read_text()
        rows = steps_of(folder / "trial")
        per_epoch = len(rows)
        seconds = (rows[-1]["seconds"] - rows[0]["seconds"]) / max(1, per_epoch - 1)
        epochs = max(1, round(options.minutes * 60 / seconds / per_epoch))
        print(f"{per_epoch} steps an epoch, {1000 * seconds:.0f} ms each: {epochs} epochs", flush=True)
        peace = start(options.data, folder / "peace", epochs, per_epoch, log)

        began, moments, kills, repeated = time.monotonic(), random.Random(0), 0, 0
        while True:
            checkpoints = folder / "war" / "checkpoints"
            before = Checkpoints(checkpoints).last
            process = start(options.data, folder / "war", epochs, per_epoch, log)
            try:
                code = process.wait(options.kill_every * moments.uniform(0.7, 1.3))
                assert code == 0, log.read_text()
                break
            except subprocess.TimeoutExpired:
                while process.poll() is None and Checkpoints(checkpoints).last == before:
                    time.sleep(0.1)  # a machine too slow to get anywhere between two kills would never end
                if process.poll() == 0:  # it has come to its end meanwhile
                    break
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
                reached = len(steps_of(folder / "war"))
                repeated += reached % STEPS_BETWEEN_CHECKPOINTS
                print(f"{time.strftime('%H:%M:%S')} kill {kills} at step {reached}", flush=True)
        minutes = (time.monotonic() - began) / 60
        assert peace.wait() == 0, log.read_text()
        assert_same(folder / "peace", folder / "war")
        assert_tidy(folder / "war")
        total = len(steps_of(folder / "war"))
        print(f"{total} steps in {minutes:.0f} min, {kills} kills, about {repeated} steps taken twice: bit-equal")


if __name__ == "__main__":
    main()
