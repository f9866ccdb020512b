"""Attention maps against a plain softmax by hand, for fused attention, any size, any block."""

from __future__ import annotations

import math
from pathlib import Path

import cv2
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from patchmix.nn.vit import create_encoder
from patchmix.report.attention import attention_figure, attention_maps, class_attention, show_attention
from patchmix.settings import ShowAttention


def by_hand(encoder: VisionTransformer, images: torch.Tensor, block: int) -> torch.Tensor:
    """Token by token and head by head, from the weights alone: (N, H, T)."""
    tokens = encoder._pos_embed(encoder.patch_embed(images))
    for before in list(encoder.blocks)[:block]:
        tokens = before(tokens)
    layer = encoder.blocks[block]
    tokens = layer.norm1(tokens)
    weight, bias = layer.attn.qkv.weight, layer.attn.qkv.bias
    dim = weight.shape[1]
    width = dim // layer.attn.num_heads
    out = torch.empty(len(images), layer.attn.num_heads, tokens.shape[1])
    for n in range(len(images)):
        for h in range(layer.attn.num_heads):
            rows = slice(h * width, (h + 1) * width)
            query = weight[:dim][rows] @ tokens[n, 0] + bias[:dim][rows]
            scores = torch.stack(
                [query @ (weight[dim : 2 * dim][rows] @ t + bias[dim : 2 * dim][rows]) for t in tokens[n]]
            )
            exponentials = (scores / math.sqrt(width)).exp()
            out[n, h] = exponentials / exponentials.sum()
    return out


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("block", [0, 2])
def test_attention_is_the_softmax_by_hand(fused: bool, block: int) -> None:
    encoder = create_encoder("vit_tiny_patch8_32", dim=24, depth=3, heads=3).eval()
    for layer in encoder.blocks:
        torch.nn.init.normal_(layer.attn.qkv.weight, std=0.5)  # sharp: far from even attention
        torch.nn.init.normal_(layer.attn.qkv.bias)
        layer.attn.fused_attn = fused
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = by_hand(encoder, images, block)
    found = class_attention(encoder, images, block=block)
    assert expected.max() > 0.3
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(2, 3))
    last = class_attention(encoder, images, block=-1)
    assert torch.equal(last, class_attention(encoder, images, block=2))
    assert encoder.training is False and not encoder.blocks[block].attn._forward_pre_hooks


def test_maps_of_any_size_keep_rows_and_columns() -> None:
    encoder = create_encoder("vit_tiny_patch8_32", dim=24, depth=1, heads=3, any_image_size=True).eval()
    images = torch.randn(1, 3, 24, 56)
    maps = attention_maps(encoder, images)
    assert maps.shape == (1, 3, 3, 7)
    flat = class_attention(encoder, images)
    assert maps[0, 1, 2, 4] == flat[0, 1, 1 + 2 * 7 + 4]
    assert (maps.sum(dim=(2, 3)) + flat[:, :, 0]).allclose(torch.ones(1, 3))


def test_figure_has_a_map_for_each_head_of_each_run() -> None:
    images = torch.zeros(2, 32, 32, 3, dtype=torch.uint8)
    maps = torch.rand(2, 4, 4, 4)
    figure = attention_figure(images, [("a", maps), ("b", maps[:, :3])])
    titles = [axis.get_title() for axis in figure.axes if axis.images]
    assert sum("head" in title for title in titles) == 2 * (4 + 3)
    assert titles.count("a") == titles.count("b") == 2


def test_show_attention_of_a_run_and_its_mistakes(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.png"
    (path,) = show_attention(ShowAttention((run, run), "shapes:64", out=out, images=1, size=64, device="auto"))
    assert cv2.imread(str(path)).std() > 5  # not blank
    with pytest.raises(ValueError, match="multiple of its patch size 8"):
        show_attention(ShowAttention((run,), "shapes:64", out=out, size=33))
    with pytest.raises(ValueError, match="block is 7"):
        show_attention(ShowAttention((run,), "shapes:64", out=out, block=7))
    with pytest.raises(ValueError, match="not among"):
        show_attention(ShowAttention((run,), "shapes:64", out=out, position=(10**6,)))
