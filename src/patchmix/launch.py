"""Starts the processes of `patchmix pretrain --devices N` on this machine and ends as they do.

They meet by a file and talk over the loopback interface only. Several machines, and restarts, are torchrun's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

RENDEZVOUS = "PATCHMIX_RENDEZVOUS"  # as in distributed.py, which needs torch
LOST_PEER = 4  # exit code of a process that ended because another one did
_GRACE_SECONDS = 20.0  # for the others to notice that one has failed, and again to end when told to


def launch(arguments: Sequence[str], devices: int) -> int:
    """Runs `python -m patchmix ARGUMENTS` in so many processes; returns the exit code for the command.

    The first process owns the console. What the others say is told only where the first is not to blame.
    """
    with tempfile.TemporaryDirectory(prefix="patchmix-") as folder, _Handing() as handing:
        errors = [Path(folder) / f"{rank}.err" for rank in range(devices)]
        for rank in range(devices):
            handing.workers.append(_start(arguments, rank, devices, Path(folder) / "store", errors[rank]))
        codes = _wait(handing.workers)
        for signum in handing.received:
            if -signum in codes:  # it came before there was anything to keep
                return 128 + signum
        rank = _culprit(codes)
        code = codes[rank]
        if code < 0:
            name = signal.Signals(-code).name
            print(
                f"patchmix: process {rank} of {devices} was killed by {name}; continue with --resume auto",
                file=sys.stderr,
                flush=True,
            )
        elif rank > 0:
            sys.stderr.write(errors[rank].read_text(encoding="utf-8", errors="replace"))
        return 128 - code if code < 0 else code


class _Handing:
    """Hands SIGINT and SIGTERM on to the workers, which stand outside of the terminal's process group."""

    def __init__(self) -> None:
        self.workers: list[subprocess.Popen[bytes]] = []
        self.received: list[int] = []

    def __enter__(self) -> _Handing:
        self._previous = {s: signal.signal(s, self._hand_on) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        _end(self.workers)

    def _hand_on(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)
        for worker in self.workers:
            worker.send_signal(signum)


def _start(arguments: Sequence[str], rank: int, devices: int, store: Path, error: Path) -> subprocess.Popen[bytes]:
    environment = {
        "OMP_NUM_THREADS": str(max(1, _cores() // devices)),
        "GLOO_SOCKET_IFNAME": _loopback(),
        "NCCL_SOCKET_IFNAME": _loopback(),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(devices),
        "LOCAL_WORLD_SIZE": str(devices),
        RENDEZVOUS: store.as_uri(),
    }
    command = [sys.executable, "-m", "patchmix", *arguments]
    if rank == 0:
        return subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=_follow_parent())
    with error.open("wb") as file:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
            preexec_fn=_follow_parent(),
        )


def _wait(workers: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """The exit codes of all; once one has failed the others have not much time left."""
    failed: float | None = None
    while any(worker.poll() is None for worker in workers):
        if failed is None and any(worker.poll() for worker in workers):
            failed = time.monotonic()
        if failed is not None and time.monotonic() - failed > _GRACE_SECONDS:
            _end(workers)
        time.sleep(0.05)
    return [worker.wait() for worker in workers]


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    for worker in workers:
        if worker.poll() is None:
            worker.kill()
            worker.wait()


def _culprit(codes: Sequence[int]) -> int:
    """The first process that failed by itself; one that was told to end, or lost another, only if there is no such."""
    blameless = (0, LOST_PEER, -signal.SIGTERM)
    candidates = [rank for rank, code in enumerate(codes) if code not in blameless]
    return (candidates or [rank for rank, code in enumerate(codes) if code] or [0])[0]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _loopback() -> str:
    return "lo" if sys.platform.startswith("linux") else "lo0"


def _follow_parent() -> Callable[[], None] | None:
    """A worker whose launcher is killed gets SIGTERM: it writes its checkpoint and ends. Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    prctl, set_parent_death_signal = ctypes.CDLL(None).prctl, 1
    return lambda: prctl(set_parent_death_signal, signal.SIGTERM)
