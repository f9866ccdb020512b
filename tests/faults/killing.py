"""A process that does nothing but write checkpoints, killed at random moments."""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch

from patchmix.files import remove_unfinished
from patchmix.train.checkpoint import Checkpoints, CheckpointWriter, load_checkpoint
from tests.faults.trainee import FORKSERVER


def kill_while_writing(folder: Path, *, times: int, seed: int) -> int:
    """Kills a writer `times` times; returns how many of the kills left a half-written file behind.

    After each the last checkpoint can be read, is consistent, and is not older than what was known to be complete.
    """
    checkpoints, random_moment, unfinished = Checkpoints(folder), random.Random(seed), 0
    checkpoints.save({"step": 0, "method": {"w": torch.zeros(1)}}, 0)
    for _ in range(times):
        before = _last_step(checkpoints)
        child = FORKSERVER.Process(target=_write_on, args=(checkpoints, before))
        child.start()
        while _last_step(checkpoints) == before:
            assert child.is_alive()
            time.sleep(0.001)
        time.sleep(random_moment.uniform(0.0, 0.1))
        complete = _last_step(checkpoints)
        child.kill()
        child.join()
        last = checkpoints.last
        assert last is not None
        state = load_checkpoint(last)
        assert state["step"] >= complete
        assert (state["method"]["w"] == state["step"]).all()
        unfinished += bool(list(folder.glob(".*.unfinished")))
        remove_unfinished(folder)
    assert not list(folder.glob(".*.unfinished"))
    return unfinished


def _write_on(checkpoints: Checkpoints, step: int) -> None:
    """In the child, until it is killed."""
    writer, weight = CheckpointWriter(checkpoints), torch.zeros(2_000_000)
    while True:
        step += 1
        weight.fill_(step)
        writer.save({"step": step, "method": {"w": weight}}, step)


def _last_step(checkpoints: Checkpoints) -> int:
    last = checkpoints.last
    return int(last.stem.removeprefix("step-")) if last else -1
