"""How long one waits: for the help, and for the first step of the demo, from the start of the process on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.children import ROOT
from benchmarks.result import Result
from patchmix.study.bench import Spread

POLL = 0.02


def run(quick: bool = False) -> list[Result]:
    rounds = 2 if quick else 5
    help_times = [_seconds([sys.executable, "-m", "patchmix", "--help"]) for _ in range(rounds)]
    first = [first_step() for _ in range(1 if quick else 3)]
    return [
        Result("patchmix --help, s", Spread.of(help_times), at_most=0.5),
        Result("first step of the demo, s", Spread.of(first), at_most=6.0),
    ]


def _seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return time.perf_counter() - began


def first_step() -> float:
    """Until metrics.jsonl has the values of step 1; the process is then ended."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        metrics = run / "metrics.jsonl"
        command = [sys.executable, "-m", "patchmix", "pretrain", "shapes", "--recipe", "demo", "--out", str(run)]
        began = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--log-every", "1"], cwd=ROOT, stdout=subprocess.DEVNULL, env=dict(os.environ)
        )
        try:
            while process.poll() is None and not _has_step(metrics):
                time.sleep(POLL)
            elapsed = time.perf_counter() - began
            if process.returncode is not None:
                raise RuntimeError(f"the demo ended with code {process.returncode} before its first step")
            return elapsed
        finally:
            process.kill()
            process.wait()


def _has_step(metrics: Path) -> bool:
    if not metrics.exists():
        return False
    for line in metrics.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line).get("kind", "train") == "train" and "loss" in line:
                return True
        except json.JSONDecodeError:  # half written
            continue
    return False
