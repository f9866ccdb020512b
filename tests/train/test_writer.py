"""Checkpoints that are written beside the training: consistent, whole, and not silent about a full disk."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from patchmix.train.checkpoint import Checkpoints, CheckpointWriter, load_checkpoint
from tests.faults.killing import kill_while_writing


class Gated(Checkpoints):
    """Writes only when the gate is open."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, keep=5)
        self.gate = threading.Event()

    def save(self, state: dict[str, Any], step: int) -> Path:
        assert self.gate.wait(60)
        return super().save(state, step)


def test_what_happens_after_the_save_is_not_in_the_file(tmp_path: Path) -> None:
    checkpoints = Gated(tmp_path)
    writer = CheckpointWriter(checkpoints)
    weight, moments = torch.arange(5.0), {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}}
    writer.save({"step": 1, "method": {"w": weight}, "optimizer": {"state": moments, "groups": [{"lr": 0.1}]}}, 1)
    weight.fill_(-1.0)
    moments[0]["exp_avg"].fill_(-1.0)
    assert checkpoints.last is None  # it has returned before anything was written
    checkpoints.gate.set()
    writer.wait()
    state = load_checkpoint(tmp_path / "last")
    assert torch.equal(state["method"]["w"], torch.arange(5.0))
    assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], torch.ones(2))
    assert state["optimizer"]["groups"] == [{"lr": 0.1}]


def test_a_save_waits_for_the_one_before_it_and_their_copies_do_not_mingle(tmp_path: Path) -> None:
    checkpoints = Gated(tmp_path)
    checkpoints.gate.set()
    writer = CheckpointWriter(checkpoints)
    weight = torch.zeros(1000)
    for step in range(1, 6):
        weight.fill_(step)
        writer.save({"step": step, "method": {"w": weight}}, step)
    weight.fill_(-1.0)
    writer.wait()
    for step in range(1, 6):
        state = load_checkpoint(checkpoints.path(step))
        assert state["step"] == step and (state["method"]["w"] == step).all()


def test_a_failed_write_is_told_once_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    writer = CheckpointWriter(Checkpoints(tmp_path / "checkpoints"))
    writer.save({"step": 1, "method": {}}, 1)
    writer.close()
    with pytest.raises(ValueError, match=r"can't write checkpoint .*there is none yet") as error:
        writer.check()
    assert "\n" not in str(error.value) and "--resume auto" in str(error.value)
    writer.check()


def test_killed_while_writing_there_is_always_a_checkpoint(tmp_path: Path) -> None:
    kill_while_writing(tmp_path, times=5, seed=0)
