"""Distillation against a slow version of it, through checkpoints, and out to timm."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file

import patchmix
from patchmix.cli import main
from patchmix.interop.exporting import export, timm_arguments
from patchmix.interop.loading import load_backbone
from patchmix.methods.distill import Distill, Teacher
from patchmix.methods.options import DistillOptions
from patchmix.nn.vit import create_encoder
from patchmix.train.checkpoint import load_checkpoint
from patchmix.train.log import read_metrics

MEANS: dict[str, Any] = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7)}
STUDENT: dict[str, Any] = {"student_mean": (0.4, 0.4, 0.4), "student_std": (0.2, 0.3, 0.4)}


def pair(options: DistillOptions, *, teacher: str = "vit_tiny_patch4_16") -> Distill:
    torch.manual_seed(0)
    student = create_encoder("vit_tiny_patch4_16", dim=12, depth=1, heads=2)
    large = create_encoder(teacher, dim=24, depth=2, heads=3)
    return Distill(student, Teacher(large, **MEANS, **STUDENT), options)


@pytest.mark.parametrize("distance", ["cosine", "mse"])
def test_against_a_loop_over_tokens(distance: str) -> None:
    method = pair(DistillOptions(distance=distance, weights=(2.0, 3.0)))  # type: ignore[arg-type]
    raw = torch.rand(2, 2, 3, 16, 16)
    student_mean, student_std = (torch.tensor(STUDENT[f"student_{k}"]).view(3, 1, 1) for k in ("mean", "std"))
    mean, std = (torch.tensor(MEANS[k]).view(3, 1, 1) for k in ("mean", "std"))
    out = method([(view - student_mean) / student_std for view in raw])
    sums, counts = {"class": 0.0, "patch": 0.0}, {"class": 0, "patch": 0}
    with torch.no_grad():
        for image in raw.flatten(0, 1):
            s = method.encoder.forward_features(((image - student_mean) / student_std)[None])[0]
            t = method.teacher[0].encoder.forward_features(((image - mean) / std)[None])[0]
            for i in range(17):
                kind, layer = ("class", method.projector) if i == 0 else ("patch", method.patch_projector)
                a, b = layer(s[i]).tolist(), t[i].tolist()
                if distance == "mse":
                    value = sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / 24
                else:
                    dot = sum(x * y for x, y in zip(a, b, strict=True))
                    value = 1 - dot / math.hypot(*a) / math.hypot(*b)
                sums[kind], counts[kind] = sums[kind] + value, counts[kind] + 1
    for kind in sums:
        assert out[kind].item() == pytest.approx(sums[kind] / counts[kind], rel=1e-4)
        assert out[f"{kind}/floor"] == 0 < out[f"{kind}/chance"]
    assert out["loss"].item() == pytest.approx(2 * out["class"].item() + 3 * out["patch"].item())


def test_a_teacher_of_another_image_and_patch_size() -> None:
    method = pair(DistillOptions(), teacher="vit_tiny_patch8_48")  # 6 × 6 patches for 4 × 4
    seen: list[torch.Tensor] = []
    method.teacher[0].encoder.patch_embed.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    method([torch.randn(2, 3, 16, 16)] * 2)["loss"].backward()
    assert seen[0].shape == (4, 3, 48, 48)
    assert all(p.grad is not None for p in method.parameters()) and len(list(method.parameters())) > 10
    assert all(p.grad is None for p in method.teacher[0].parameters())
    assert not any("teacher" in name for name in method.state_dict())


def test_the_teacher_itself_has_loss_zero() -> None:
    torch.manual_seed(0)
    encoder = create_encoder("vit_tiny_patch4_16", dim=24, depth=2, heads=3).eval()
    method = Distill(
        encoder, Teacher(create_encoder("vit_tiny_patch4_16", dim=24, depth=2, heads=3), **MEANS, **STUDENT)
    )
    method.teacher[0].encoder.load_state_dict(encoder.state_dict())
    method.teacher[0].scale.fill_(1), method.teacher[0].shift.fill_(0)
    for layer in (method.projector, method.patch_projector):
        torch.nn.init.eye_(layer.weight), torch.nn.init.zeros_(layer.bias)
    assert method([torch.randn(2, 3, 16, 16)] * 2)["loss"].item() == pytest.approx(0, abs=1e-5)


def test_a_run_resumes_exactly_and_is_exported(trained_run: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"recipe": "demo", "method": "distill", "teacher": str(trained_run), "epochs": 4}
    settings |= {"model": "vit_tiny_patch8_32", "dim": 12, "depth": 1, "heads": 2, "stem": "patch"}
    settings |= {"monitor_bank": 32, "monitor_queries": 16, "log_every": 1, "device": "cpu", "keep_checkpoints": 9}
    settings |= {"batch_size": 32, "workers": 0}
    whole = patchmix.pretrain("shapes:64", tmp_path / "whole", **settings)
    losses = [row["loss"] for row in read_metrics(whole.path / "metrics.jsonl") if row["kind"] == "train"]
    assert len(losses) == 8 and losses[-1] < losses[0]
    cut = tmp_path / "cut" / "checkpoints"
    cut.mkdir(parents=True)
    (cut / "step-000000004.pt").write_bytes((whole.path / "checkpoints" / "step-000000004.pt").read_bytes())
    again = patchmix.pretrain("shapes:64", tmp_path / "cut", resume="auto", **settings)
    assert again.load().digest() == whole.load().digest()
    state = load_checkpoint(whole.path / "checkpoints" / "last")["method"]
    assert {name.split(".")[0] for name in state} == {"encoder", "projector", "patch_projector"}

    exported = export(whole.load(), tmp_path / "student.safetensors", "timm")
    name, arguments = timm_arguments(load_backbone(whole.path).architecture)
    model = timm.create_model(name, num_classes=0, **arguments)
    model.load_state_dict(load_file(exported.files[0]))


def test_a_teacher_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["pretrain", "shapes:64", "--out", str(tmp_path / "x"), "--recipe", "demo", "--method", "distill"])
    assert "method distill learns from another encoder; give it with --teacher WEIGHTS" in capsys.readouterr().err
