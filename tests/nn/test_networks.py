from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from timm.layers.drop import DropPath
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from patchmix.build import build_encoder, encoder_config
from patchmix.config import Config
from patchmix.methods.method import MomentumCopy
from patchmix.nn.heads import BatchNorm, mlp_head
from patchmix.nn.vit import (
    create_encoder,
    freeze_blocks,
    initialize_as_mocov3,
    initialize_attention_as_mimetic,
    patch_size_of,
    set_sincos_positions,
)


@pytest.mark.parametrize(
    ("name", "millions", "exact"),
    [
        ("vit_tiny_patch2_32", 5.4, 5_390_784),
        ("vit_small_patch2_32", 21.3, 21_398_400),
        ("vit_base_patch2_32", 85.1, 85_264_128),
        ("vit_small_patch16_224", 21.6, 21_665_664),
        ("vit_base_patch16_224", 85.7, 85_798_656),
    ],
)
def test_parameters_of_the_backbone_table(name: str, millions: float, exact: int) -> None:
    """The table's last digit is now rounded, now cut, now without position embedding: all within 0.2 M."""
    with torch.device("meta"):
        encoder = create_encoder(name)
    count = sum(p.numel() for p in encoder.parameters())
    assert count == exact
    assert abs(count / 1e6 - millions) < 0.2


@pytest.mark.parametrize(
    ("name", "options", "image", "tokens"),
    [
        ("vit_tiny_patch2_32", {"dim": 24, "depth": 1, "heads": 2}, (3, 32, 32), 257),
        ("vit_small_patch8_48", {"dim": 24, "depth": 1, "heads": 2}, (3, 48, 48), 37),
        ("vit_tiny_patch16_224", {"dim": 24, "depth": 1, "image_size": 64, "in_chans": 1}, (1, 64, 64), 17),
        ("vit_small_patch14_reg4_dinov2", {"dim": 24, "depth": 1, "heads": 2, "image_size": 28}, (3, 28, 28), 9),
    ],
)
def test_shapes(name: str, options: dict, image: tuple[int, int, int], tokens: int) -> None:
    encoder = create_encoder(name, **options)
    assert isinstance(encoder, VisionTransformer)
    assert encoder(torch.randn(2, *image)).shape == (2, 24)
    assert encoder.forward_features(torch.randn(2, *image)).shape == (2, tokens, 24)


def test_a_convolutional_stem_is_convolution_norm_and_relu_layer_by_layer() -> None:
    encoder = create_encoder("vit_tiny_patch4_16", dim=24, depth=1, heads=2, in_chans=1, stem="conv").eval()
    stem, x = encoder.patch_embed.proj, torch.randn(2, 1, 16, 16)
    for norm in (stem[1], stem[4]):
        nn.init.normal_(norm.weight)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    assert [tuple(stem[i].weight.shape) for i in (0, 3, 6)] == [(12, 1, 3, 3), (24, 12, 3, 3), (24, 24, 1, 1)]
    expected = x
    for convolution, norm in ((stem[0], stem[1]), (stem[3], stem[4])):
        y = F.conv2d(expected, convolution.weight, stride=2, padding=1)
        mean, var, scale, bias = (
            v.view(-1, 1, 1) for v in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        )
        expected = ((y - mean) / (var + 1e-5).sqrt() * scale + bias).clamp(min=0)
    expected = torch.einsum("nchw,dc->nhwd", expected, stem[6].weight[:, :, 0, 0]) + stem[6].bias
    torch.testing.assert_close(encoder.patch_embed(x), expected.flatten(1, 2))  # (2, 16, 24), row by row


def test_any_image_size_interpolates_positions_and_is_exact_at_the_native_size() -> None:
    options = {"dim": 24, "depth": 1, "heads": 2}
    fixed = create_encoder("vit_tiny_patch8_32", **options)
    flexible = create_encoder("vit_tiny_patch8_32", **options, any_image_size=True)
    flexible.load_state_dict(fixed.state_dict())
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(fixed(images), flexible(images))
    assert flexible(torch.randn(2, 3, 48, 24)).shape == (2, 24)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vit_smal_patch16_224", {}, "did you mean vit_small_patch16_224"),
        ("resnet18", {}, "is a ResNet; PatchMix needs a ViT"),
        ("vit_tiny_patch3_32", {}, "image size 32 is not a multiple of patch size 3"),
        ("vit_tiny_patch8_32", {"dim": 64}, "embed_dim 64: dim should be divisible by num_heads; change --dim or"),
        ("vit_tiny_patch8_32", {"dim": 64, "heads": 5}, "embed_dim 64, num_heads 5: dim should be divisible"),
        (
            "vit_tiny_patch8_32",
            {"heads": 5},
            "num_heads 5: dim should be divisible by num_heads; change --dim or --heads",
        ),
        ("deit3_small_patch16_224", {"dim": 100}, "embed_dim 100: dim should be divisible by num_heads"),
        ("vit_tiny_patch8_32", {"depth": 0}, "depth is 0"),
        ("vit_tiny_patch6_36", {"stem": "conv"}, "patch size 6 and width 192: .*; use --stem patch"),
    ],
)
def test_impossible_models_are_refused(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_encoder(name, **options)


def test_initialization() -> None:
    encoder = create_encoder("vit_tiny_patch8_32", depth=2)
    initialize_as_mocov3(encoder)
    d = encoder.embed_dim
    block = encoder.blocks[0]
    for weight, fans in (
        (block.attn.qkv.weight, 2 * d),  # three d × d matrices
        (block.attn.proj.weight, 2 * d),
        (block.mlp.fc1.weight, 5 * d),
        (encoder.patch_embed.proj.weight, 3 * 8 * 8 + d),
    ):
        bound = math.sqrt(6 / fans)
        assert weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    for name, parameter in encoder.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
    assert 0 < encoder.cls_token.abs().max() < 1e-5
    assert encoder.pos_embed.requires_grad
    assert patch_size_of(encoder) == 8


def test_heads_of_the_table() -> None:
    projection, prediction = mlp_head(3, 384, 4096, 256), mlp_head(2, 256, 4096, 256)
    layout = [(type(m).__name__, *(m.weight.shape if isinstance(m, nn.Linear) else ())) for m in projection]
    assert layout == [
        ("Linear", 4096, 384),
        ("BatchNorm",),
        ("ReLU",),
        ("Linear", 4096, 4096),
        ("BatchNorm",),
        ("ReLU",),
        ("Linear", 256, 4096),
        ("BatchNorm",),
    ]
    assert [m.weight.shape for m in prediction if isinstance(m, nn.Linear)] == [(4096, 256), (256, 4096)]
    for head in (projection, prediction):
        assert all(m.bias is None for m in head if isinstance(m, nn.Linear))
        norms = [m for m in head if isinstance(m, BatchNorm)]
        assert [m.affine for m in norms] == [True] * (len(norms) - 1) + [False]


def test_momentum_copy_follows_by_moving_average() -> None:
    encoder = create_encoder("vit_tiny_patch8_32", dim=24, depth=2, heads=2, drop_path=0.3)
    base = nn.ModuleList([encoder, nn.Linear(2, 2)])
    copy = MomentumCopy(*base, momentum=lambda progress: 0.9)
    assert [name for name, _ in copy.named_parameters()] == [f"network.{name}" for name, _ in base.named_parameters()]
    before = [p.clone() for p in copy.network.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, base.parameters(), strict=True))
    assert not any(p.requires_grad for p in copy.parameters())
    assert all(m.drop_prob == 0 for m in copy.modules() if isinstance(m, DropPath))
    assert any(m.drop_prob > 0 for m in base.modules() if isinstance(m, DropPath))
    with torch.no_grad():
        for p in base.parameters():
            p.add_(torch.randn_like(p))
    assert copy.update(0.0) == 0.9
    for xi, old, theta in zip(copy.network.parameters(), before, base.parameters(), strict=True):
        torch.testing.assert_close(xi, 0.9 * old + 0.1 * theta)


def test_sincos_positions_are_moco_v3s() -> None:
    """Its table written out: sine and cosine of the row, then of the column, a quarter of the width each."""
    encoder = create_encoder("vit_tiny_patch4_16", dim=24, depth=1, heads=2)
    set_sincos_positions(encoder, fixed=False)
    assert encoder.pos_embed.requires_grad
    set_sincos_positions(encoder, fixed=True)
    assert not encoder.pos_embed.requires_grad
    assert encoder.pos_embed[0, 0].abs().max() == 0  # the class token's
    for row in range(4):
        for column in range(4):
            angles = [[place / 10000 ** (i / 6) for i in range(6)] for place in (row, column)]
            expected = [wave(a) for quarter in angles for wave in (math.sin, math.cos) for a in quarter]
            torch.testing.assert_close(encoder.pos_embed[0, 1 + 4 * row + column], torch.tensor(expected))
    with pytest.raises(ValueError, match="multiple of 4, not 26"):
        set_sincos_positions(create_encoder("vit_tiny_patch4_16", dim=26, depth=1, heads=2), fixed=True)


def test_positions_are_chosen_by_the_configuration() -> None:
    small = Config().replace(model="vit_tiny_patch4_16", dim=24, depth=1, heads=2).model
    learned, sincos, fixed = (
        build_encoder(dataclasses.replace(small, positions=name)) for name in ("learned", "sincos", "fixed-sincos")
    )
    assert learned.pos_embed.std() < 0.1 < sincos.pos_embed.std()
    assert torch.equal(sincos.pos_embed, fixed.pos_embed)
    assert sincos.pos_embed.requires_grad and not fixed.pos_embed.requires_grad
    for method, positions in (("mocov3", "fixed-sincos"), ("sdmp", "fixed-sincos"), ("dino", None)):
        assert encoder_config(Config().replace(method=method)).positions == positions
    assert encoder_config(Config().replace(method="mocov3", positions="learned")).positions == "learned"


def test_mimetic_attention_has_the_products_of_the_paper() -> None:
    encoder = create_encoder("vit_tiny_patch4_16", dim=96, depth=2, heads=3)
    initialize_as_mocov3(encoder)
    mlp = encoder.blocks[0].mlp.fc1.weight.clone()
    initialize_attention_as_mimetic(encoder)
    assert torch.equal(encoder.blocks[0].mlp.fc1.weight, mlp)
    for block in encoder.blocks:
        q, k, v = (weight.detach() for weight in block.attn.qkv.weight.chunk(3))
        x, y = torch.randn(64, 96), torch.randn(64, 96)
        values = x @ v.T @ block.attn.proj.weight.detach().T  # what attention to x itself adds
        assert values.shape == x.shape
        product = v.T @ block.attn.proj.weight.detach().T
        rest = product + 0.4 * torch.eye(96)
        assert float(product.diagonal().mean()) == pytest.approx(-0.4, abs=0.05)
        assert float(rest.std()) == pytest.approx(0.4 / 96**0.5, rel=0.1)
        for q_head, k_head in zip(q.chunk(3), k.chunk(3), strict=True):
            scores = (x @ q_head.T) @ (x @ k_head.T).T
            others = (x @ q_head.T) @ (y @ k_head.T).T
            assert float(scores.diagonal().mean()) > 5 * abs(
                float(others.diagonal().mean())
            )  # a token attends to itself
            assert float((q_head.T @ k_head).diagonal().mean()) == pytest.approx(0.4, abs=0.15)  # the best of rank 32


def test_attention_pooling_stands_above_the_frozen_blocks() -> None:
    with torch.device("meta"):
        encoder = create_encoder("vit_base_patch16_siglip_224", depth=2)
    freeze_blocks(encoder, 1)
    assert all(parameter.requires_grad for parameter in encoder.attn_pool.parameters())
    assert not any(parameter.requires_grad for parameter in encoder.blocks[0].parameters())
