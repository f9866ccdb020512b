"""Tiny versions of timm's families of ViTs go through pre-training, evaluation, pictures and export, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import patchmix
from patchmix.build import build_method
from patchmix.data.sources import open_source
from patchmix.evaluate.knn import knn
from patchmix.interop.backbone import Architecture, Backbone
from patchmix.interop.exporting import export
from patchmix.interop.loading import load_backbone
from patchmix.nn.tokens import all_tokens, class_tokens
from patchmix.nn.vit import create_encoder, patch_tokens
from patchmix.recipes import demo
from patchmix.report.attention import attention_maps, encoder_and_images
from patchmix.settings import Knn
from tests.conftest import SMALL_RUN

FAMILIES = {
    "vit_small_patch14_reg4_dinov2": "registers and LayerScale",
    "vit_giant_patch14_dinov2": "SwiGLU",
    "vit_base_patch16_gap_224": "mean over patches, no class token",
    "vit_medium_patch16_reg4_gap_256": "mean over patches, registers",
    "vit_base_patch16_clip_224": "a norm before the blocks",
    "vit_base_patch16_siglip_224": "attention pooling",
    "vit_small_patch16_dinov3": "DINOv3: rotary positions and registers",
    "vit_small_patch16_rope_mixed_224": "learned rotary positions, different in each block",
    "eva02_tiny_patch14_224": "EVA-02: rotary and absolute positions, SwiGLU",
}
SIZES: dict[str, Any] = {"image_size": 32, "patch_size": 8, "dim": 32, "depth": 2, "heads": 2}


@pytest.mark.parametrize("name", FAMILIES)
def test_pretrain_evaluate_draw_and_export(name: str, tmp_path: Path) -> None:
    run = patchmix.pretrain(
        "shapes:64",
        tmp_path / "run",
        recipe="demo",
        model=name,
        epochs=1,
        batch_size=32,
        workers=0,
        device="cpu",
        region_weight=0.0,  # regions are for plain class tokens
        positions="learned",
        recompute=name.startswith("eva"),
        **SIZES,
        **{key: value for key, value in SMALL_RUN.items() if key not in SIZES},
    )
    start = torch.load(run.path / "checkpoints" / "last", weights_only=True)["method"]
    assert all(torch.isfinite(tensor).all() for tensor in start.values() if tensor.is_floating_point())

    result = knn(Knn(str(run.path), data="shapes:64", k=(5,), device="cpu"))
    assert 0 <= result.metrics["top1"] <= 1

    backbone = run.load()
    source = open_source("shapes:64")
    encoder, images = encoder_and_images(backbone, source, [0, 1], size=None)
    with torch.no_grad():
        features = encoder(images)
        torch.testing.assert_close(class_tokens(encoder, images), features)  # the fast path, or timm's own
        pooled, patches = all_tokens(encoder, images)
        torch.testing.assert_close(pooled, features)
        torch.testing.assert_close(patches.view(2, 4, 4, 32), patch_tokens(encoder, images, [-1]))
    if encoder.cls_token is None:
        with pytest.raises(ValueError, match="no class token whose attention could be drawn"):
            attention_maps(encoder, images)
    else:
        maps = attention_maps(encoder, images)
        assert maps.shape == (2, 2, 4, 4) and 0 < maps.sum() < 4 * (1 + 1e-5)

    exported = export(backbone, tmp_path / "timm.safetensors", "timm")
    arguments = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    theirs = timm.create_model(name, num_classes=0, **arguments)
    theirs.load_state_dict(load_file(exported.files[0]))
    torch.testing.assert_close(theirs.eval()(images), features)
    folder = export(backbone, tmp_path / "folder", "huggingface").files[0].parent
    torch.testing.assert_close(load_backbone(folder).encoder()(images), features)


def test_rotary_encoders_refuse_token_dropout() -> None:
    config = demo("vit_tiny_patch8_32").replace(stem="patch", region_weight=0.0, positions="learned")
    config = config.replace(model="vit_small_patch16_dinov3", **SIZES, token_dropout=(0.5, 0.0))
    with pytest.raises(ValueError, match="vit_small_patch16_dinov3 cannot drop tokens; leave --token-dropout out"):
        build_method(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_onnx(name: str, tmp_path: Path) -> None:
    encoder = create_encoder(name, **SIZES)
    small = Backbone(Architecture.of(name, encoder), encoder.state_dict())
    export(small, tmp_path / "encoder.onnx", "onnx")  # compares with torch


@pytest.mark.parametrize(
    "name", ["vit_small_patch14_reg4_dinov2", "vit_small_patch16_dinov3", "eva02_tiny_patch14_224"]
)
def test_published_weights_and_another_image_size(name: str, tmp_path: Path) -> None:
    """As timm keeps them: with a classifier, and where it resamples positions itself."""
    arguments = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    published = timm.create_model(name, num_classes=3, **arguments)
    with torch.no_grad():
        for parameter in published.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file(published.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architecture": name, "model_args": arguments}))
    published.reset_classifier(0)
    images = torch.rand(2, 3, 32, 32)
    loaded = load_backbone(folder)
    torch.testing.assert_close(loaded.encoder()(images), published.eval()(images))
    run = patchmix.adapt(
        folder, "shapes:64", tmp_path / "run", image_size=48, epochs=1, batch_size=32, workers=0, device="cpu",
        head_warmup=0.99, head_hidden=16, head_out=8, num_mix=2, monitor_bank=32, monitor_queries=16,
    )  # fmt: skip
    larger = timm.create_model(name, num_classes=0, **arguments | {"img_size": 48})
    larger.load_state_dict(run.load().weights)
    if larger.pos_embed is None:
        assert run.load().digest() == loaded.digest()  # rotary positions fit any size
    else:
        assert larger.pos_embed.shape[1] == loaded.weights["pos_embed"].shape[1] + 20


@pytest.mark.parametrize(
    ("name", "reason"),
    {
        "beit_base_patch16_224": "is a Beit; PatchMix needs a ViT",
        "swin_tiny_patch4_window7_224": "is a SwinTransformer",
        "vit_relpos_small_patch16_224": "is a VisionTransformerRelPos",
        "vit_small_r26_s32_224": "HybridEmbed",
    }.items(),
)
def test_others_are_refused_by_one_line(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        create_encoder(name)
    assert "\n" not in str(error.value)
