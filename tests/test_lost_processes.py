"""A process that dies or falls silent: the others end with one line, and no later than the stated time-out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from patchmix import distributed

CODE = """
import sys, time, torch
from patchmix import cli, distributed

def work():
    with distributed.process_group(torch.device("cpu"), timeout_minutes=0.1):
        distributed.barrier()
        if distributed.rank() == 1:
            print("ready", flush=True)
            time.sleep(600)
        distributed.barrier()

cli.resolve_name = lambda name: lambda settings: work()
cli.main(["recipes"])
"""


@pytest.mark.parametrize(
    ("signum", "reason"),
    [(signal.SIGKILL, "it ended, or the network failed"), (signal.SIGSTOP, "no answer within 0.1 min")],
)
def test_the_others_do_not_hang(signum: signal.Signals, reason: str, tmp_path: Path) -> None:
    common = os.environ | {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    common[distributed.RENDEZVOUS] = (tmp_path / "store").as_uri()
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", CODE],
            env=common | {"RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    )
    watchdog = threading.Timer(300, first.kill)
    watchdog.start()
    try:
        assert second.stdout is not None and "ready\n" in second.stdout  # after lines of Gloo, with some torch
        second.send_signal(signum)
        _, output = first.communicate()
        assert first.returncode == 4, output
        line = output.strip().splitlines()[-1]
        assert line.startswith(f"patchmix: process 0 of 2 lost another one ({reason})") and "--resume auto" in line
        assert "Traceback" not in output
    finally:
        watchdog.cancel()
        second.kill()
        second.communicate()


def test_processes_that_see_other_data_are_refused(tmp_path: Path) -> None:
    """Each node has a disk of its own, where one has to be shared."""
    common = os.environ | {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    common[distributed.RENDEZVOUS] = (tmp_path / "store").as_uri()
    options = ["--recipe", "demo", "--device", "cpu", "--workers", "0", "--timeout-minutes", "1"]
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "patchmix", "pretrain", data, "--out", "run", *options],
            cwd=tmp_path,
            env=common | {"RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, data in (("0", "shapes:300"), ("1", "shapes:301"))
    ]
    for process in both:
        _, output = process.communicate(timeout=120)
        assert process.returncode == 2
        assert "see different checkpoints in run, or different data; use a file system that all share" in output


def test_only_rank_0_is_the_main_one_outside_of_the_group_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert distributed.is_main()
    monkeypatch.setenv("RANK", "1")
    assert not distributed.is_main()
