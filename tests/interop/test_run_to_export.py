"""A real run, from its first image to other programs: the encoder that was trained is the one that comes out."""

from __future__ import annotations

from pathlib import Path

import torch

from patchmix.interop.exporting import export
from patchmix.interop.loading import load_backbone


def test_run_checkpoint_and_export_agree(trained_run: Path, tmp_path: Path) -> None:
    images = torch.rand(4, 3, 32, 32)
    finished = load_backbone(trained_run)
    features = finished.embed(images)
    assert finished.name == "tiny" and finished.mean == (0.4, 0.5, 0.6)

    checkpoint = load_backbone(trained_run / "checkpoints" / "last")
    assert checkpoint.name == "tiny/step-000000004"
    assert checkpoint.digest() == finished.digest()
    assert checkpoint.architecture == finished.architecture and checkpoint.mean == finished.mean
    momentum = load_backbone(trained_run, encoder="momentum").embed(images)
    assert 1e-6 < (momentum - features).abs().max() < 1  # four steps behind

    scope: dict[str, object] = {}
    exec(export(finished, tmp_path / "hub", "huggingface").usage, scope)
    model = scope["model"]
    assert isinstance(model, torch.nn.Module)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (finished.mean, finished.std))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()((images - mean) / std), features, atol=1e-5, rtol=0)
