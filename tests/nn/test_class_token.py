"""The shortened last block against timm's own forward, for values, gradients and random paths."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch.utils.flop_counter import FlopCounterMode

from patchmix.nn.tokens import class_tokens
from patchmix.nn.vit import create_encoder

IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def build(**options: Any) -> VisionTransformer:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        **{"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 3, "depth": 3, "num_classes": 0} | options,
    )
    assert isinstance(model, VisionTransformer)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"depth": 1},
        {"qkv_bias": False, "qk_norm": True},
        {"init_values": 0.1, "reg_tokens": 2},
        {"drop_path_rate": 0.5, "proj_drop_rate": 0.0},
        {"class_token": False, "global_pool": "avg"},  # no class token: the encoder's own way
        {"fc_norm": True, "pre_norm": True},
        {"scale_attn_norm": True, "scale_mlp_norm": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_equals_the_encoder_in_values_and_gradients(options: dict[str, Any]) -> None:
    encoder = build(**options).train()
    torch.manual_seed(1)
    expected = encoder(IMAGES)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    wanted = torch.autograd.grad((expected * weight).sum(), list(encoder.parameters()))
    torch.manual_seed(1)
    found = class_tokens(encoder, IMAGES)
    gradients = torch.autograd.grad((found * weight).sum(), list(encoder.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for gradient, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5)


def test_the_last_block_costs_little() -> None:
    encoder = create_encoder("vit_tiny_patch2_32", dim=48, depth=2, heads=3)
    with FlopCounterMode(display=False) as whole:
        encoder(IMAGES)
    with FlopCounterMode(display=False) as short:
        class_tokens(encoder, IMAGES)
    assert short.get_total_flops() < 0.62 * whole.get_total_flops()
