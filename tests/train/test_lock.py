"""A run's folder has one owner at a time, and a dead owner has none."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from patchmix.files import HOLDER, LOCK, run_lock

HOLD = "import sys, time; from pathlib import Path; from patchmix.files import run_lock\n"
HOLD += "with run_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
FORK = HOLD.replace("print(", "import os; os.fork() and time.sleep(600); print(os.getpid(), ")  # the child says so


def holder(folder: Path, code: str = HOLD) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()  # not read to its end: a forked child may hold the other one


def test_a_second_start_is_refused_by_name_and_a_dead_holder_does_not_count(tmp_path: Path) -> None:
    process, _ = holder(tmp_path)
    try:
        with pytest.raises(ValueError, match=rf"process {process.pid} on {socket.gethostname()}, since 2") as refusal:
            run_lock(tmp_path).__enter__()
        assert "\n" not in str(refusal.value) and "choose another --out" in str(refusal.value)
    finally:
        end(process)
    with run_lock(tmp_path):
        assert json.loads((tmp_path / HOLDER).read_text())["pid"] == os.getpid()
        with pytest.raises(ValueError, match=f"process {os.getpid()}"):
            run_lock(tmp_path).__enter__()
    with run_lock(tmp_path):
        pass


def test_a_forked_worker_does_not_keep_the_lock_of_a_dead_run(tmp_path: Path) -> None:
    process, line = holder(tmp_path, FORK)
    end(process)
    worker = int(line.split()[0])
    try:
        os.kill(worker, 0)  # it lives on
        with run_lock(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_folder_made_for_the_lock_alone_goes_with_it(tmp_path: Path) -> None:
    with run_lock(tmp_path / "a" / "run"):
        pass
    assert not (tmp_path / "a" / "run").exists()
    with run_lock(tmp_path / "b"):
        (tmp_path / "b" / "config.yaml").write_text("")
    assert (tmp_path / "b" / "config.yaml").exists()


@pytest.mark.parametrize("kind", ["alive", "dead", "elsewhere", "nobody"])
def test_without_locks_the_holders_name_decides(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    pid = gone.pid if kind == "dead" else os.getpid()
    host = "another-machine" if kind == "elsewhere" else socket.gethostname()
    if kind != "nobody":
        (tmp_path / HOLDER).write_text(json.dumps({"host": host, "pid": pid, "since": "2020-01-01 00:00:00"}))
        (tmp_path / f"{LOCK}.soft").write_text(f"{pid}\n{host}\n")  # as filelock writes it
    if kind in ("dead", "nobody"):
        with run_lock(tmp_path):
            pass
    else:
        with pytest.raises(ValueError, match=f"process {pid} on {host}.*if it is gone, remove"):
            run_lock(tmp_path).__enter__()


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="choose another --out"):
        run_lock(tmp_path / "file" / "run").__enter__()
