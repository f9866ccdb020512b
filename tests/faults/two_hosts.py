"""Two hosts that are network namespaces: one is cut off while both train, and comes back.

Needs root and iproute2. Each host has its own torchrun, run folder handling is that of any two machines with a shared
file system. The one that is cut off, and the one that is left, end by the stated time-out and are started again.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.elastic import COMMON, wait_for_checkpoint
from tests.faults.injections import CONTINUED
from tests.faults.trainee import assert_same

Row = tuple[str, int, str]
HOSTS = ("patchmix-a", "patchmix-b")
ADDRESSES = ("10.231.7.1", "10.231.7.2")
TIMEOUT_MINUTES = 0.5


def can_make_hosts() -> str | None:
    """Why not, or None."""
    if shutil.which("ip") is None:
        return "there is no `ip`; install iproute2"
    made = subprocess.run(["ip", "netns", "add", HOSTS[0]], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"`ip netns` needs rights that are missing: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", HOSTS[0]], check=True)
    return None


@contextmanager
def hosts() -> Iterator[None]:
    """Two namespaces joined by a pair of virtual cables, eth0 in each."""
    try:
        for host in HOSTS:
            _ip("netns", "add", host)
        _ip("link", "add", "pmx-a", "netns", HOSTS[0], "type", "veth", "peer", "name", "pmx-b", "netns", HOSTS[1])
        for host, name, address in zip(HOSTS, ("pmx-a", "pmx-b"), ADDRESSES, strict=True):
            _ip("-n", host, "link", "set", name, "name", "eth0")
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
            _ip("-n", host, "link", "set", "lo", "up")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def start(out: Path, number: int) -> subprocess.Popen[str]:
    """torchrun on one of the hosts, in a process group of its own."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)]
    place = ["--nproc-per-node", "1", "--master-addr", ADDRESSES[0], "--master-port", "29400"]
    training = ["-m", "patchmix", "pretrain", "shapes:512", "--out", str(out), *COMMON]
    training += ["--timeout-minutes", f"{TIMEOUT_MINUTES}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    return subprocess.Popen(
        ["ip", "netns", "exec", HOSTS[number], *torchrun, *place, *training],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def both(out: Path) -> list[subprocess.Popen[str]]:
    return [start(out, number) for number in (0, 1)]


def end(processes: list[subprocess.Popen[str]], seconds: float) -> list[tuple[int, str]]:
    """Exit code and output of each; one that hangs longer than it may is an error, and is killed."""
    try:
        return [(process.wait(seconds), process.communicate()[0]) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def cut_off_and_back(folder: Path, times: int = 1) -> Row:
    with hosts():
        alone, longest = folder / "hosts", 0.0
        assert [code for code, _ in end(both(alone), 900)] == [0, 0]
        for i in range(times):
            out = folder / f"hosts{i}"
            processes = both(out)
            wait_for_checkpoint(processes[0], out)
            _ip("-n", HOSTS[1], "link", "set", "eth0", "down")
            cut = time.monotonic()
            ended = end(processes, 600)  # the time-out, torchrun's own patience, and a busy machine
            longest = max(longest, time.monotonic() - cut)
            assert all(code != 0 for code, _ in ended), ended
            assert any("patchmix: process" in text and "lost another one" in text for _, text in ended), ended
            _ip("-n", HOSTS[1], "link", "set", "eth0", "up")
            assert [code for code, _ in end(both(out), 900)] == [0, 0]
            assert_same(alone, out)
    return (
        "one of two hosts cut off (link down), then back and started again",
        times,
        f"both had ended {longest:.0f} s after the cut (time-out {60 * TIMEOUT_MINUTES:.0f} s); {CONTINUED}",
    )


def main() -> None:
    if reason := can_make_hosts():
        print(f"skipped: {reason}")
        return
    with tempfile.TemporaryDirectory() as folder:
        print(cut_off_and_back(Path(folder), int(sys.argv[1]) if len(sys.argv) > 1 else 1))


if __name__ == "__main__":
    main()
