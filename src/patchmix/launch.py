"""Starts the processes of `patchmix pretrain --devices N` on this machine and ends as they do.

They meet by a file and talk over the loopback interface only. Several machines, and restarts, are for torchrun.
torch's elastic launcher is not used here: it ends all others as soon as one fails, so that the exit code and message of
the process that caused the failure get lost, and it leaves its processes running if it is killed itself.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType

RENDEZVOUS = "PATCHMIX_RENDEZVOUS"  # as in distributed.py, which needs torch
LOST_PEER = 4  # exit code of a process that ended because another one did
GRACE_SECONDS = 20.0  # for the others to notice a failure and end, and again after SIGTERM
PR_SET_PDEATHSIG = 1  # of linux/prctl.h

Processes = list[subprocess.Popen[bytes]]


def launch(arguments: Sequence[str], devices: int) -> int:
    """Runs `python -m patchmix ARGUMENTS` in `devices` processes; returns the exit code for the command.

    Rank 0 owns the console. The error output of another rank is shown only if it caused the failure.
    """
    workers: Processes = []
    received: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:  # workers are not in the terminal's process group
        received.append(signum)
        for worker in workers:
            worker.send_signal(signum)

    previous = {signum: signal.signal(signum, forward) for signum in (signal.SIGINT, signal.SIGTERM)}
    with tempfile.TemporaryDirectory(prefix="patchmix-") as folder:
        errors = [Path(folder) / f"{rank}.err" for rank in range(devices)]
        try:
            for rank in range(devices):
                workers.append(_start(arguments, rank, devices, Path(folder) / "store", errors[rank]))
            codes = _wait(workers)
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)
            _end(workers)
        early = [number for number in received if -number in codes]  # before there was anything to save
        if early:
            return 128 + early[0]
        rank = _culprit(codes)
        code = codes[rank]
        if code < 0:
            name = signal.Signals(-code).name
            line = f"patchmix: process {rank} of {devices} was killed by {name}; continue with --resume auto"
            print(line, file=sys.stderr, flush=True)
        elif rank > 0:
            sys.stderr.write(errors[rank].read_text(encoding="utf-8", errors="replace"))
        return 128 - code if code < 0 else code


def _start(arguments: Sequence[str], rank: int, devices: int, store: Path, error: Path) -> subprocess.Popen[bytes]:
    loopback = "lo" if sys.platform == "linux" else "lo0"
    environment = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // devices)),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(devices),
        "LOCAL_WORLD_SIZE": str(devices),
        RENDEZVOUS: store.as_uri(),
    }
    end_with_parent = None
    if sys.platform == "linux":  # SIGTERM when the launcher is killed: the worker writes its checkpoint and ends
        end_with_parent = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
    with error.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "patchmix", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL if rank else None,
            stdout=subprocess.DEVNULL if rank else None,
            stderr=file if rank else None,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


def _wait(workers: Processes) -> list[int]:
    """The exit codes of all. Once one has failed, the others have GRACE_SECONDS to end by themselves."""
    failed: float | None = None
    while any(worker.poll() is None for worker in workers):
        if failed is None and any(worker.poll() for worker in workers):
            failed = time.monotonic()
        if failed is not None and time.monotonic() - failed > GRACE_SECONDS:
            _end(workers)
        time.sleep(0.05)
    return [worker.wait() for worker in workers]


def _end(workers: Processes) -> None:
    running = [worker for worker in workers if worker.poll() is None]
    for worker in running:
        worker.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in running:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def _culprit(codes: Sequence[int]) -> int:
    """The first rank that failed by itself; else the first that was ended, or lost another one; else 0."""
    blameless = (0, LOST_PEER, -signal.SIGTERM)
    candidates = [rank for rank, code in enumerate(codes) if code not in blameless]
    return (candidates or [rank for rank, code in enumerate(codes) if code] or [0])[0]


def usable_cores() -> int:
    """Those that this process may use; in a container often fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
