"""Files of DINOv2 and DINOv3 as released, against timm's models whose tensors are renamed here by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from patchmix.interop.importing import import_checkpoint
from patchmix.interop.loading import load_backbone


def released(model: Any, *, rotary: bool) -> dict[str, torch.Tensor]:
    """timm's state dict in the names of the official files."""
    file = {"mask_token": torch.zeros(1, model.embed_dim)}
    weights = dict(model.state_dict())
    if "reg_token" in weights:
        file["storage_tokens" if rotary else "register_tokens"] = weights.pop("reg_token")
        if not rotary:  # in timm, the class token's position is part of the token
            file["pos_embed"] = torch.cat(
                [torch.full_like(weights["cls_token"], 0.25), weights.pop("pos_embed")], dim=1
            )
            file["cls_token"] = weights.pop("cls_token") - 0.25
    for name, tensor in weights.items():
        if name.endswith(("q_bias", "k_bias", "v_bias")):
            continue
        file[name.replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma")] = tensor
    if rotary:
        file["rope_embed.periods"] = torch.ones(16)
        for i, block in enumerate(model.blocks):
            zero = torch.zeros(model.embed_dim)
            q, v = (zero, zero) if block.attn.q_bias is None else (block.attn.q_bias.data, block.attn.v_bias.data)
            file[f"blocks.{i}.attn.qkv.bias"] = torch.cat([q, zero, v])
            file[f"blocks.{i}.attn.qkv.bias_mask"] = torch.ones(3 * model.embed_dim)
    return file


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("vit_small_patch14_dinov2", "dinov2_vits14_pretrain.pth"),
        pytest.param("vit_small_patch14_reg4_dinov2", "dinov2_vits14_reg4_pretrain.pth", marks=pytest.mark.slow),
        pytest.param(
            "vit_small_patch16_dinov3", "dinov3_vits16_pretrain_lvd1689m-08c60483.pth", marks=pytest.mark.slow
        ),
        ("vit_small_patch16_dinov3_qkvb", "dinov3_vits16_pretrain_sat493m-0123abcd.pth"),
    ],
)
def test_released_files(name: str, file: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = timm.create_model(name, num_classes=0).eval()
    for parameter in model.parameters():
        if parameter.numel() < 10**6:  # those that start equal in all blocks
            torch.nn.init.uniform_(parameter, -0.02, 0.02)
    torch.save(released(model, rotary="dinov3" in name), tmp_path / file)
    backbone = load_backbone(tmp_path / file)
    assert backbone.architecture.name == name
    torch.testing.assert_close(backbone.weights, dict(model.state_dict()), atol=1e-7, rtol=0)
    assert backbone.mean == ((0.430, 0.411, 0.296) if "sat493m" in file else (0.485, 0.456, 0.406))
    if name.endswith("14_dinov2"):
        smaller = import_checkpoint(tmp_path / file, image_size=224)
        assert smaller.backbone.weights["pos_embed"].shape == (1, 257, 384) and smaller.format == "dinov2"
        assert smaller.dropped == {"not used after pre-training": ["mask_token"]}


@pytest.mark.parametrize("wrong", [{"encoder": "momentum"}, {"heads": 12}], ids=str)
def test_it_is_one_encoder_of_known_heads(wrong: dict[str, Any], tmp_path: Path) -> None:
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0)
    torch.save(released(model, rotary=False), tmp_path / "x.pth")
    with pytest.raises(
        ValueError, match=r"x\.pth: a released dinov2 backbone has one encoder; leave encoder and heads out"
    ):
        load_backbone(tmp_path / "x.pth", **wrong)


def test_another_size_is_refused(tmp_path: Path) -> None:
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, depth=2)
    torch.save(released(model, rotary=False), tmp_path / "x.pth")
    with pytest.raises(ValueError, match="no dinov2 model of timm has this width, depth and MLP") as error:
        load_backbone(tmp_path / "x.pth")
    assert "\n" not in str(error.value)
