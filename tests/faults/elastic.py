"""Two processes: one is killed, all are stopped, and fewer or more go on than began."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from patchmix.train.checkpoint import Checkpoints, load_checkpoint
from patchmix.train.loop import STEPS_BETWEEN_AGREEMENTS
from tests.faults.trainee import STEPS, TINY, assert_same, assert_tidy

Row = tuple[str, int, str]
COMMON = [*TINY, "--epochs", "2", "--workers", "0", "--resume", "auto", "--drop-path", "0", "--mix-across"]
ALL_STEPS = 2 * STEPS


def start(out: Path, processes: int, *more: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """`torchrun --nproc-per-node PROCESSES -m patchmix pretrain …`."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*torchrun, *launcher, "-m", "patchmix", "pretrain", "shapes:512", "--out", str(out), *COMMON, *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=900)
    assert process.returncode == code, output
    return output


def wait_for_checkpoint(process: subprocess.Popen[str], out: Path) -> None:
    deadline = time.monotonic() + 600
    while Checkpoints(out / "checkpoints").last is None:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ranks(out: Path) -> list[int]:
    """The processes that train in `out`, but not their children."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(out).encode() in words and b"pretrain" in words:
            rank = next((int(e[5:]) for e in environment if e.startswith(b"RANK=")), None)
            if rank is not None:
                found.append((rank, int(folder.name)))
    return [pid for _, pid in sorted(found)]


def undisturbed(folder: Path) -> Path:
    out = folder / "two"
    if not (out / "encoder.safetensors").exists():
        finish(start(out, 2))
    return out


def killed_rank(folder: Path, times: int = 1) -> Row:
    for i in range(times):
        out = folder / f"rank{i}"
        process = start(out, 2, launcher=("--max-restarts", "1"))
        wait_for_checkpoint(process, out)
        os.kill(ranks(out)[i % 2], signal.SIGKILL)
        output = finish(process)
        assert "continuing at step" in output
        assert_same(undisturbed(folder), out)
    return (
        "kill -9 of one of two processes under torchrun --max-restarts",
        times,
        ("nothing: started again by itself, every weight and loss bit-equal"),
    )


def other_number_of_processes(folder: Path, times: int = 1) -> Row:
    """2 → 1 and 1 → 2, by SIGTERM and --resume auto."""
    for i in range(times):
        for before, after in ((2, 1), (1, 2)):
            out = folder / f"from{before}to{after}-{i}"
            process = start(out, before)
            wait_for_checkpoint(process, out)
            for pid in ranks(out):
                os.kill(pid, signal.SIGTERM)
            output, _ = process.communicate(timeout=600)
            assert "its checkpoint is written" in output, output
            assert f"{after} process" in finish(start(out, after))
            assert load_checkpoint(out / "checkpoints" / "last")["step"] == ALL_STEPS
            assert_same(undisturbed(folder), out, tolerance=1e-5)
    return "2 → 1 and 1 → 2 processes with the same global batch and --mix-across", times, "nothing (weights to 1e-5)"


def stopped_by_signals(folder: Path, times: int = 1) -> Row:
    """SIGTERM, and SIGINT to the process group as a terminal's Ctrl-C, to `patchmix pretrain --devices 2`."""
    for i in range(times):
        for signum in (signal.SIGTERM, signal.SIGINT):
            out, scratch = folder / f"{signum.name}{i}", folder / f"tmp-{signum.name}{i}"
            scratch.mkdir()
            process = start_devices(out, scratch)
            wait_for_checkpoint(process, out)
            assert len(descendants(scratch)) >= 5  # the command, two that train, one each that prepares images
            send = os.killpg if signum == signal.SIGINT else os.kill
            send(process.pid, signum)
            output = finish(process, 128 + signum)
            assert output.count("its checkpoint is written") == 1 and "Traceback" not in output, output
            assert load_checkpoint(out / "checkpoints" / "last")["step"] % STEPS_BETWEEN_AGREEMENTS == 0
            assert descendants(scratch) == [] and not list(scratch.glob("patchmix-*"))
            assert "continuing at step" in finish(start_devices(out, scratch))
            assert_same(undisturbed(folder), out)
            assert_tidy(out)
    return (
        "SIGTERM, and Ctrl-C, to --devices 2",
        times,
        "exit codes 143 and 130, no process left; resumed: every weight and loss bit-equal",
    )


def start_devices(out: Path, scratch: Path) -> subprocess.Popen[str]:
    """`patchmix pretrain --devices 2`, in a process group of its own; its processes know `scratch`."""
    command = [sys.executable, "-m", "patchmix", "pretrain", "shapes:512", "--out", str(out), *COMMON]
    return subprocess.Popen(
        [*command, "--workers", "1", "--devices", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)},
        start_new_session=True,
    )


def descendants(scratch: Path) -> list[int]:
    """All processes that were started with this TMPDIR, and theirs."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={scratch}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


ELASTIC = [killed_rank, other_number_of_processes, stopped_by_signals]
