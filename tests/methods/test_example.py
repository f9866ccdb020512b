from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from patchmix.build import METHOD_OPTIONS, METHODS

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "new_method.py"


def test_the_example_of_a_new_method_runs_and_is_short(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 60
    spec = importlib.util.spec_from_file_location("new_method", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        small = ["model.dim=24", "model.depth=1", "model.heads=2", "runtime.monitor_bank=50"]
        small += ["runtime.monitor_queries=50", "train.batch_size=512", "runtime.workers=0", "method.hidden=32"]
        run = module.main(str(tmp_path / "run"), 0.1, small)
        assert run.backbone()(torch.zeros(1, 3, 32, 32)).shape == (1, 24)
    finally:
        METHODS.pop("simsiam", None)
        METHOD_OPTIONS.pop("simsiam", None)
