from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from patchmix.build import METHODS
from patchmix.methods.options import METHOD_OPTIONS

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "new_method.py"


def test_the_example_of_a_new_method_runs_and_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 60
    spec = importlib.util.spec_from_file_location("new_method", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look up annotations
    try:
        spec.loader.exec_module(module)
        small = {"dim": 24, "depth": 1, "heads": 2, "monitor_bank": 50, "monitor_queries": 50, "batch_size": 512}
        run = module.main(str(tmp_path / "run"), epochs=0.1, workers=0, head_hidden=32, **small)
        assert run.encoder()(torch.zeros(1, 3, 32, 32)).shape == (1, 24)
    finally:
        METHODS.pop("simsiam", None)
        METHOD_OPTIONS.pop("simsiam", None)
