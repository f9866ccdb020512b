"""`--encoder momentum` finds the teacher of every method that has one, DINO and iBOT among them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from patchmix import build
from patchmix.config import Config, to_dict, to_yaml
from patchmix.interop.loading import load_backbone
from patchmix.methods.method import MomentumCopy

WITHOUT = ("simclr", "swav")
SMALL = {
    "model": "vit_tiny_patch4_16",
    "dim": 24,
    "depth": 2,
    "heads": 2,
    "local_crops": 2,
    "local_size": 8,  # encoders for several image sizes export alike
}
HEADS = {name: {"head_bottleneck": 8, "head_out": 16} for name in ("dino", "ibot")}


@pytest.mark.parametrize("name", build.METHODS)
def test_the_momentum_encoder_of_every_method(name: str, tmp_path: Path) -> None:
    config = Config().replace(**SMALL, method=name, head_hidden=8, **HEADS.get(name, {"head_out": 8}))
    method = build.build_method(config)
    with torch.no_grad():
        for parameter in method.encoder.parameters():
            parameter += 0.05 * torch.randn_like(parameter)  # as if it had been trained
    before = method.state_dict()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    state = {"method": before, "optimizer": {}, "step": 3, "config": to_dict(config), "data": "shapes"}
    torch.save(state, tmp_path / "checkpoints" / "step-000000003.pt")
    base = load_backbone(tmp_path).weights
    assert base.keys() == method.encoder.state_dict().keys()
    assert all(torch.equal(base[key], tensor) for key, tensor in method.encoder.state_dict().items())
    if name in WITHOUT:
        with pytest.raises(ValueError, match="there is no momentum encoder"):
            load_backbone(tmp_path, encoder="momentum")
        return
    copies = [module for module in method.modules() if isinstance(module, MomentumCopy)]
    assert len(copies) == 1
    teacher = copies[0].network[0].state_dict()
    found = load_backbone(tmp_path, encoder="momentum").weights
    assert found.keys() == teacher.keys()
    assert all(torch.equal(found[key], teacher[key]) for key in teacher)
    assert any(not torch.equal(found[key], base[key]) for key in teacher)
