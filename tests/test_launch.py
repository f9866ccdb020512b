"""`--devices N`: exit codes, messages and signals of several processes, played by scripts that start at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from patchmix import distributed, launch

PREAMBLE = f"""#!{sys.executable} -S
import os, signal, sys, time
rank = os.environ["RANK"]
def say(text): print(text, file=sys.stderr, flush=True)
"""


def play(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch, devices: int = 2) -> int:
    program = folder / "program"
    program.write_text(PREAMBLE + script)
    program.chmod(0o755)
    monkeypatch.setattr(launch.sys, "executable", str(program))
    return launch.launch(["pretrain", "data"], devices)


@pytest.mark.parametrize(
    ("script", "code", "line"),
    [
        ("print(sys.argv[1:], flush=True) if rank == '0' else say('noise')", 0, ""),
        ("say('patchmix: mistake'); sys.exit(2)", 2, "patchmix: mistake\n"),
        (
            "say('patchmix: nan') if rank == '0' else say('lost'); sys.exit(3 if rank == '0' else 4)",
            3,
            "patchmix: nan\n",
        ),
        ("rank == '1' and say('patchmix: my mistake'); sys.exit(2 if rank == '1' else 4)", 2, "patchmix: my mistake\n"),
        (
            "rank == '1' and os.kill(os.getpid(), 9); sys.exit(4)",
            137,
            "patchmix: process 1 of 2 was killed by SIGKILL; continue with --resume auto\n",
        ),
    ],
)
def test_the_one_to_blame_gives_the_code_and_the_line(
    script: str,
    code: int,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert play(script, tmp_path, monkeypatch) == code
    out, err = capfd.readouterr()
    assert err == line
    assert out == ("['-m', 'patchmix', 'pretrain', 'data']\n" if code == 0 else "")


def test_a_process_that_does_not_end_by_itself_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.2)
    assert play("rank == '0' and sys.exit(2); time.sleep(600)", tmp_path, monkeypatch) == 2


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_every_process_once(
    signum: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""
def note(signum, frame):
    open({str(tmp_path)!r} + "/caught" + rank, "a").write("x")
    global caught
    caught = signum
caught = 0
for s in (signal.SIGTERM, signal.SIGINT): signal.signal(s, note)
open({str(tmp_path)!r} + "/ready" + rank, "w")
while not caught: time.sleep(0.01)
time.sleep(0.2)
sys.exit(128 + caught)
"""

    def send() -> None:
        while not all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)):
            time.sleep(0.01)
        os.kill(os.getpid(), signum)

    threading.Thread(target=send).start()
    assert play(script, tmp_path, monkeypatch) == 128 + signum
    assert [(tmp_path / f"caught{rank}").read_text() for rank in (0, 1)] == ["x", "x"]


def test_each_process_is_told_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launch, "usable_cores", lambda: 5)
    script = f"""
keys = "LOCAL_RANK WORLD_SIZE OMP_NUM_THREADS GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME".split()
open({str(tmp_path)!r} + "/environment" + rank, "w").write(" ".join(os.environ[k] for k in keys))
assert os.environ[{distributed.RENDEZVOUS!r}].startswith("file:///")
"""
    assert play(script, tmp_path, monkeypatch) == 0
    lo = "lo" if sys.platform == "linux" else "lo0"
    assert [(tmp_path / f"environment{r}").read_text() for r in (0, 1)] == [f"{r} 2 2 {lo} {lo}" for r in (0, 1)]


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl: run on Linux")
def test_processes_end_with_their_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"""
def note(signum, frame):
    open({str(tmp_path)!r} + "/ended" + rank, "w")
    sys.exit()
signal.signal(signal.SIGTERM, note)
open({str(tmp_path)!r} + "/ready" + rank, "w")
time.sleep(600)
"""
    child = os.fork()
    if child == 0:
        play(script, tmp_path, monkeypatch)
        os._exit(1)
    wait_for(tmp_path, "ready")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_for(tmp_path, "ended")


def wait_for(folder: Path, name: str) -> None:
    deadline = time.monotonic() + 60
    while not all((folder / f"{name}{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
