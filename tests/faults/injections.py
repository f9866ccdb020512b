"""The faults. Each function injects one, `times` times, checks that nothing was lost, and says so in a row.

A row is (what was injected, how often, what was lost); what should not have been lost is an AssertionError.
"""

from __future__ import annotations

import math
import os
import random
import resource
import signal
import subprocess
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import cv2
import numpy as np
import torch

from patchmix.train.log import read_metrics
from tests.faults.killing import kill_while_writing
from tests.faults.trainee import STEPS, Trainee, assert_same, assert_tidy, losses

Row = tuple[str, int, str]
CONTINUED = "nothing: resumed, every weight and loss bit-equal"


def undisturbed(folder: Path) -> Path:
    """The run that all others are compared with."""
    out = folder / "undisturbed"
    if not (out / "encoder.safetensors").exists():
        Trainee(out).ends(0)
        assert [step for step, _ in losses(out)] == list(range(1, STEPS + 1))
    return out


def _resumes(out: Path, folder: Path, *more: str) -> None:
    assert "continuing at step" in Trainee(out, "--resume", "auto", *more).ends(0).output
    assert_same(undisturbed(folder), out)
    assert_tidy(out)


def killed(folder: Path, times: int = 1) -> Row:
    moments = random.Random(1)
    for i in range(times):
        out = folder / f"killed{i}"
        trainee = Trainee(out).wait_for_checkpoint().wait_for_step(moments.randint(5, STEPS - 3))
        trainee.send(signal.SIGKILL).ends(-signal.SIGKILL)
        _resumes(out, folder)
    return "kill -9 of a training process", times, CONTINUED


def killed_worker(folder: Path, times: int = 1) -> Row:
    for i in range(times):
        out = folder / f"worker{i}"
        trainee = Trainee(out, "--workers", "1").wait_for_checkpoint()
        os.kill(trainee.children()[0], signal.SIGKILL)
        line = trainee.ends(2).last_line
        assert "a data-loading worker died" in line and "--resume auto" in line
        _resumes(out, folder, "--workers", "1")
    return "kill -9 of a data-loading worker", times, "one line, exit code 2; " + CONTINUED


def stopped_and_started_twice(folder: Path, times: int = 1) -> Row:
    for i in range(times):
        out = folder / f"stopped{i}"
        first = Trainee(out).wait_for_step(2).send(signal.SIGSTOP)  # or it might be done before the second starts
        second = Trainee(out, "--resume", "auto").ends(2)
        first.send(signal.SIGCONT)
        assert f"process {first.pid} on " in second.last_line and "choose another --out" in second.last_line
        line = first.send(signal.SIGTERM).ends(128 + signal.SIGTERM).last_line
        assert "its checkpoint is written" in line
        _resumes(out, folder)
    return "a second start in the same folder, then SIGTERM to the first", times, "one line each; " + CONTINUED


def killed_while_writing(folder: Path, times: int = 5) -> Row:
    half = kill_while_writing(folder / "writing", times=times, seed=2)
    return "kill -9 of a process that only writes checkpoints", times, f"nothing ({half} half-written files removed)"


def disk_full(folder: Path, times: int = 1) -> Row:
    """Files may not grow beyond 64 KB from the first checkpoint on."""
    for i in range(times):
        out = folder / f"full{i}"
        trainee = Trainee(out).wait_for_checkpoint()
        resource.prlimit(trainee.pid, resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))
        line = trainee.ends(2).last_line
        assert "can't write checkpoint" in line and "File too large" in line and "--resume auto" in line, line
        assert_tidy(out)
        _resumes(out, folder)
    return "no more room for a checkpoint (file size limit)", times, "one line, previous checkpoint kept; " + CONTINUED


def tmpfs_full(folder: Path, times: int = 1) -> Row:
    """A real file system, filled to the last page after the first checkpoint."""
    for i in range(times):
        with _tmpfs(folder / f"small{i}", "size=8m") as disk:
            trainee = Trainee(disk / "run").wait_for_checkpoint()
            filler = disk / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            line = trainee.ends(2).last_line
            assert "can't write" in line and "No space left on device" in line and "--resume auto" in line, line
            assert_tidy(disk / "run")
            filler.unlink()
            _resumes(disk / "run", folder)
    return "a full disk (tmpfs)", times, "one line, previous checkpoint kept; " + CONTINUED


def read_only(folder: Path, times: int = 1) -> Row:
    for i in range(times):
        with _tmpfs(folder / f"readonly{i}", "ro") as disk:
            line = Trainee(disk / "run").ends(2).last_line
            assert "Read-only file system" in line and "choose another --out" in line
    return "a read-only output folder", times, "one line, exit code 2"


def damaged_images(folder: Path, times: int = 1) -> Row:
    """Bit flips, truncation, two kinds of bomb, and a file that vanishes while training."""
    for i in range(times):
        data, out = _photos(folder / f"photos{i}", seed=i), folder / f"damaged{i}"
        trainee = Trainee(out, "--cache-gb", "0", "--workers", "1", data=str(data)).wait_for_step(1)
        (data / "500.png").unlink()
        output = trainee.ends(0).output
        assert "its pixels are more than the limit" in output
        assert "truncated.png: " in output and "(replaced by another image)" in output
        assert trainee.peak_memory < 1_500_000_000  # 30,000 × 30,000 × 3 bytes alone are 2.7 GB
    return "damaged images, bombs, files that vanish while training", times, "the images: named and replaced"


def nan_in_weights(folder: Path, times: int = 1) -> Row:
    for i in range(times):
        trainee = Trainee(folder / f"nan{i}", inject=poison_weights).ends(3)
        assert " is nan; training stopped, the last good checkpoint is" in trainee.last_line, trainee.last_line
        assert_tidy(folder / f"nan{i}")
    return "NaN put into the weights", times, "one line, exit code 3, last good checkpoint kept"


def poison_weights() -> None:
    from patchmix.methods.patchmix import PatchMixMethod

    original, calls = PatchMixMethod.before_step, iter(range(10_000))

    def poisoned(self: PatchMixMethod, progress: float) -> None:
        if next(calls) == 6:
            with torch.no_grad():
                next(self.encoder.parameters()).fill_(math.nan)
        original(self, progress)

    PatchMixMethod.before_step = poisoned  # type: ignore[method-assign]


def clock_jumps(folder: Path, times: int = 1) -> Row:
    for i in range(times):
        out = folder / f"clock{i}"
        Trainee(out, "--budget", "2s", inject=jumping_clock).ends(0)
        rows = [row for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "train"]
        progress, seconds = [row["progress"] for row in rows], [row["seconds"] for row in rows]
        assert progress == sorted(progress) and progress[-1] == 1.0 and seconds == sorted(seconds)
        assert 0.0 < seconds[-1] < 3600.0  # a single jump is a million
    return "the system's clock jumps at every look, with --budget", times, "nothing"


def jumping_clock() -> None:
    jumps = random.Random(0)
    time.time = lambda: jumps.uniform(-1e6, 1e6) + 1.7e9


FAST = [
    killed, killed_worker, stopped_and_started_twice, killed_while_writing, disk_full, damaged_images, nan_in_weights,
    clock_jumps,
]  # fmt: skip
WITH_ROOT = [tmpfs_full, read_only]


# -------------------------------------------------------------------------------------------------------- the means


@contextmanager
def _tmpfs(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _photos(folder: Path, seed: int) -> Path:
    """512 images, some of which are not what they seem."""
    folder.mkdir()
    generator = np.random.default_rng(seed)
    for i in range(508):
        cv2.imwrite(str(folder / f"{i:03d}.png"), generator.integers(0, 255, (40, 40, 3), np.uint8))
    whole = (folder / "000.png").read_bytes()
    (folder / "truncated.png").write_bytes(whole[: len(whole) // 2])
    flipped = bytearray(whole)
    for position in generator.integers(50, len(whole) - 20, 8):
        flipped[position] ^= 1 << int(generator.integers(8))
    (folder / "flipped.png").write_bytes(bytes(flipped))
    (folder / "bomb.png").write_bytes(bomb(30_000, 30_000))
    (folder / "zeros.jpg").write_bytes(bytes(1000))
    return folder


def bomb(width: int, height: int) -> bytes:
    """A small PNG that unpacks to width × height pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    packer, rows = zlib.compressobj(9), []
    for _ in range(height):
        rows.append(packer.compress(bytes(1 + width)))
    pixels = b"".join(rows) + packer.flush()
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
