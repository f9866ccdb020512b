"""One process of two threads against two processes of one: images per second, in turns, and their ratio.

python -m benchmarks.scaling [--rounds 3] [--epochs 1]: prints the median of each and 2 × 1 over 1 × 2.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from patchmix.train.log import read_metrics

MODEL = [
    *("--recipe", "paper", "--model", "vit_tiny_patch8_32", "--batch-size", "128", "--workers", "0"),
    *("--monitor-bank", "64", "--monitor-queries", "32", "--log-every", "5"),
    *("--checkpoint-epochs", "1000", "--checkpoint-minutes", "1000"),
]


def images_per_second(processes: int, threads: int, epochs: float) -> float:
    """The median over the log's lines; the first, in which everything is new, is left out."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "patchmix", "pretrain", "shapes:2560", "--out", str(out), *MODEL]
        command += ["--epochs", str(epochs), "--devices", str(processes), "--warmup-epochs", "0"]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": str(threads)}
        )
        rows = [row for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "train"]
    return statistics.median(row["images_per_second"] for row in rows[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=1.0)
    options = parser.parse_args()
    speeds: dict[tuple[int, int], list[float]] = {(1, 2): [], (2, 1): []}
    for _ in range(options.rounds):
        for (processes, threads), found in speeds.items():
            found.append(images_per_second(processes, threads, options.epochs))
            print(f"{processes} process(es) × {threads} thread(s): {found[-1]:.1f} images/s", flush=True)
    one, two = (statistics.median(found) for found in speeds.values())
    print(f"median {one:.1f} and {two:.1f} images/s; two processes / one: {two / one:.3f}")


if __name__ == "__main__":
    main()
