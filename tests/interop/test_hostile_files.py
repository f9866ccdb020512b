"""Files that are not what they seem: one clear line each, and no code of theirs runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file

from patchmix.interop.importing import import_checkpoint
from patchmix.interop.loading import load_backbone


def refusal(path: Path, load: Callable[[Path], object] = import_checkpoint) -> str:
    with pytest.raises(ValueError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message and len(message) < 400
    return message


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_truncated(share: float, suffix: str, make_foreign, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    state = make_foreign("timm").encoders[None]
    torch.save(state, path) if suffix == ".pth" else save_file(state, path)
    import_checkpoint(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert "is it complete?" in refusal(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html>\n<html>Not found</html>", "it begins with text"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "bytes 89 50 4e 47"),
        (b"\x80\x02nonsense", "can't be"),
    ],
)
def test_not_a_checkpoint(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    path.write_bytes(content)
    assert message in refusal(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.pth")
    assert "is a folder" in refusal(tmp_path)


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_code_in_a_pickle_does_not_run(make_foreign, tmp_path: Path) -> None:
    path, marker = tmp_path / "model.pth", tmp_path / "ran"
    torch.save({"state_dict": make_foreign("timm").encoders[None], "callback": Bomb(marker)}, path)
    message = refusal(path)
    assert "needs code to be unpickled (posix.mkdir)" in message and "weights_only=False" in message
    assert not marker.exists()


def test_pickled_module(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pth")
    assert "torch.nn.modules.linear.Linear" in refusal(tmp_path / "model.pth")


def test_other_contents(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save({}, path)
    assert "empty dictionary" in refusal(path)
    torch.save([torch.ones(2)], path)
    assert "holds a list" in refusal(path)
    torch.save({"epoch": 3, "state_dict": {}}, path)
    assert "among 0 tensors" in refusal(path)
    torch.save(torchvision.models.resnet18().state_dict(), path)
    assert "no ViT in timm's names: conv1.weight, bn1.weight" in refusal(path)
    torch.save({"a": torch.ones(1), "b": torch.ones(1)}, path)
    assert "no ViT in timm's names: a, b" in refusal(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value: float, make_foreign, tmp_path: Path) -> None:
    state = make_foreign("timm").encoders[None]
    state["blocks.0.mlp.fc1.weight"][3, 4] = value
    torch.save(state, tmp_path / "model.pth")
    assert "NaN or infinite weights in blocks.0.mlp.fc1.weight" in refusal(tmp_path / "model.pth")


def test_quantized_weights(make_foreign, tmp_path: Path) -> None:
    state = make_foreign("timm").encoders[None]
    state["blocks.0.mlp.fc1.weight"] = state["blocks.0.mlp.fc1.weight"].to(torch.int8)
    torch.save(state, tmp_path / "model.pth")
    assert "holds int8 weights" in refusal(tmp_path / "model.pth")


def test_our_file_with_damaged_metadata(backbone, tmp_path: Path) -> None:
    path = tmp_path / "encoder.safetensors"
    weights = {name: tensor.contiguous() for name, tensor in backbone.weights.items()}
    save_file(weights, path, metadata={"patchmix": "{"})
    assert "damaged patchmix metadata" in refusal(path, load_backbone)
    header = {"architecture": vars(backbone.architecture) | {"depth": 3}, "mean": [0] * 3, "std": [1] * 3}
    save_file(weights, path, metadata={"patchmix": json.dumps(header | {"origin": {}})})
    assert "blocks.2.norm1.weight is missing" in refusal(path, load_backbone)


@pytest.mark.parametrize("change", [{"dim": "48"}, {"heads": 0}, {"depth": 10**9}, {"heads": 7}, {"color": 1}], ids=str)
def test_our_file_with_impossible_sizes(change: dict[str, object], backbone, tmp_path: Path) -> None:
    path = tmp_path / "encoder.safetensors"
    header = {"architecture": vars(backbone.architecture) | change, "mean": [0] * 3, "std": [1] * 3, "origin": {}}
    save_file(backbone.weights, path, metadata={"patchmix": json.dumps(header)})
    refusal(path, load_backbone)


@pytest.mark.parametrize("config", [{}, {"model": 3}, {"model": {"name": "vit_tiny_patch4_16", "dim": "x"}}], ids=str)
def test_our_checkpoint_with_another_configuration(config: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "step-1.pt"
    torch.save({"method": {"encoder.norm.weight": torch.ones(3), "encoder.x": "no tensor"}, "config": config}, path)
    refusal(path, load_backbone)
