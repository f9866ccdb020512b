"""Windows against a loop over windows, positions, shapes, sizes and costs of the pyramid."""

from __future__ import annotations

import copy

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from patchmix.nn.pyramid import Pyramid, TokenMaps, even_blocks, rescale, windowed_attention
from patchmix.nn.vit import create_encoder


def small(depth: int = 4, patch: int = 8, size: int = 32, **options: object) -> VisionTransformer:
    name = f"vit_tiny_patch{patch}_{size}"
    return create_encoder(name, dim=24, depth=depth, heads=3, any_image_size=True, **options).eval()  # type: ignore[arg-type]


def slow_windows(attention: nn.Module, tokens: Tensor, grid: tuple[int, int], window: int, prefix: int) -> Tensor:
    """One window after another; a window at the edge is simply smaller."""
    out = torch.zeros_like(tokens)
    height, width = grid
    position = torch.arange(height * width).view(grid)
    windows = 0
    for top in range(0, height, window):
        for left in range(0, width, window):
            inside = position[top : top + window, left : left + window].flatten() + prefix
            chosen = torch.cat([torch.arange(prefix), inside])
            attended = attention(tokens[:, chosen])
            out[:, inside] = attended[:, prefix:]
            out[:, :prefix] += attended[:, :prefix]
            windows += 1
    out[:, :prefix] /= windows
    return out


@pytest.mark.parametrize("grid", [(6, 6), (6, 9), (7, 5), (2, 8), (3, 3)])
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_windows_are_attention_one_window_at_a_time(grid: tuple[int, int], prefix: int) -> None:
    attention = small().blocks[0].attn
    tokens = torch.randn(2, prefix + grid[0] * grid[1], 24)
    got = windowed_attention(attention, tokens, grid=grid, window=3, prefix=prefix)
    torch.testing.assert_close(got, slow_windows(attention, tokens, grid, 3, prefix))


@pytest.mark.parametrize("window", [4, 5, 14])
def test_one_window_over_the_image_is_full_attention(window: int) -> None:
    encoder = small()
    images = torch.randn(2, 3, 32, 32)
    full = TokenMaps(copy.deepcopy(encoder), blocks=(1, 3))(images)
    windowed = TokenMaps(encoder, blocks=(1, 3), window=window)(images)
    for a, b in zip(full, windowed, strict=True):
        torch.testing.assert_close(a, b)


def test_a_smaller_window_is_not_full_attention_and_global_blocks_see_all() -> None:
    encoder = small()
    images = torch.randn(1, 3, 32, 32)
    changed = images.clone()
    changed[..., -8:, -8:] += 1.0  # the last patch, far from the first window

    def moved(**options: object) -> float:
        maps = TokenMaps(copy.deepcopy(encoder), blocks=(3,), **options)  # type: ignore[arg-type]
        maps.encoder.num_prefix_tokens = 0  # the class token would carry it from window to window
        maps.encoder.cls_token = None
        maps.encoder.pos_embed = None
        return float((maps(images)[0] - maps(changed)[0])[..., 0, 0].abs().max().detach())

    assert moved(window=2) == 0.0
    assert moved(window=2, global_blocks=(2,)) > 1e-4


def test_maps_are_timms_intermediate_tokens() -> None:
    encoder = small(depth=5)
    images = torch.randn(2, 3, 48, 64)  # not the native size, not square
    expected = encoder.forward_intermediates(images, indices=[1, 4], intermediates_only=True)
    got = TokenMaps(encoder, blocks=(1, 4))(images)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == (2, 24, 6, 8)
        torch.testing.assert_close(a, b)


def test_positions_are_exact_at_native_size_and_interpolated_per_axis() -> None:
    fixed = create_encoder("vit_tiny_patch8_32", dim=24, depth=1, heads=3).eval()
    flexible = small(depth=1)
    flexible.load_state_dict(fixed.state_dict())
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(flexible._pos_embed(flexible.patch_embed(images)), fixed._pos_embed(fixed.patch_embed(images)))
    # A position embedding that only depends on the row still does so on a grid of another shape.
    rows = torch.arange(4.0).repeat_interleave(4)[:, None].expand(16, 24)
    with torch.no_grad():
        flexible.pos_embed[:, 1:] = rows
        flexible.patch_embed.proj.weight.zero_()
    wide = flexible._pos_embed(flexible.patch_embed(torch.zeros(1, 3, 32, 80)))[0, 1:, 0].view(4, 10)
    torch.testing.assert_close(wide, torch.arange(4.0)[:, None].expand(4, 10) + wide[0, 0])


def test_recomputing_changes_neither_values_nor_gradients() -> None:
    images = torch.randn(1, 3, 32, 32)
    outcomes = []
    for recompute in (False, True):
        torch.manual_seed(0)
        pyramid = Pyramid(small(), channels=16, window=2, global_blocks=2, recompute=recompute)
        levels = pyramid(images)
        sum(level.square().mean() for level in levels.values()).backward()  # type: ignore[union-attr]
        outcomes.append((levels, [p.grad for p in pyramid.parameters()]))
    for name in outcomes[0][0]:
        assert torch.equal(outcomes[0][0][name], outcomes[1][0][name])
    for a, b in zip(outcomes[0][1], outcomes[1][1], strict=True):
        assert a is not None and b is not None, "every parameter has a gradient, or DDP would wait for it"
        torch.testing.assert_close(a, b)


# ----------------------------------------------------------------------------------------------------- whole pyramids


@pytest.mark.parametrize("patch", [4, 8, 16, 32])
def test_strides_do_not_depend_on_the_patch(patch: int) -> None:
    pyramid = Pyramid(small(patch=patch, size=64), channels=16)
    levels = pyramid(torch.randn(2, 3, 64, 128))
    assert [tuple(level.shape) for level in levels.values()] == [
        (2, 16, 64 // stride, 128 // stride) for stride in (4, 8, 16, 32, 64)
    ]
    assert list(levels) == ["0", "1", "2", "3", "pool"]


def deconv(a: int, b: int) -> int:
    return 4 * a * b + b


# Beside the ViT: deconvolutions to strides 4 and 8 with a norm between, then for each level 1 × 1 and 3 × 3
# convolutions without bias, each with a norm.
LEVELS = 4 * (9 * 256 * 256 + 2 * 2 * 256)
FPN = 3 * deconv(768, 768) + 2 * 768 + 4 * 768 * 256 + LEVELS


def test_vit_b_at_1024_px() -> None:
    """Shapes and size of the real thing on the meta device: ViT-B is 85.8 M without its last norm."""
    with torch.device("meta"):
        pyramid = Pyramid(create_encoder("vit_base_patch16_224", any_image_size=True), window=16)
        levels = pyramid(torch.empty(1, 3, 1024, 1024))
    assert [tuple(level.shape) for level in levels.values()] == [
        (1, 256, side, side) for side in (256, 128, 64, 32, 16)
    ]
    assert sum(p.numel() for p in pyramid.tokens.parameters()) == 85_797_120
    assert sum(p.numel() for p in pyramid.parameters()) == 85_797_120 + FPN


def test_windows_save_what_they_should() -> None:
    """A ViT-B block at 4,096 tokens: attention is 4·n·n·d, in windows of 16 × 16 tokens 16 times less."""

    def flops(window: int, global_blocks: int) -> int:
        with torch.device("meta"):
            encoder = create_encoder("vit_base_patch16_224", any_image_size=True)
            maps = TokenMaps(
                encoder, blocks=(11,), window=window, global_blocks=even_blocks(12, global_blocks) if window else ()
            )
            with FlopCounterMode(display=False) as counter:
                maps(torch.empty(1, 3, 1024, 1024))
        return counter.get_total_flops()

    n, d = 4096, 768
    full_block = 4 * (n + 1) ** 2 * d
    windowed_block = 16 * 4 * 257**2 * d
    extra_class_tokens = 15 * 8 * d * d  # 15 more class tokens through q, k, v and the projection
    saved = 8 * (full_block - windowed_block - extra_class_tokens)
    assert flops(0, 0) - flops(16, 4) == saved


def test_even_blocks() -> None:
    assert even_blocks(12, 4) == (2, 5, 8, 11)
    assert even_blocks(24, 4) == (5, 11, 17, 23)
    assert even_blocks(4, 4) == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="the encoder has 3; use a deeper one"):
        even_blocks(3, 4)


def test_rescale_goes_up_and_down() -> None:
    assert rescale(32, 16, 4)(torch.randn(1, 32, 2, 3)).shape == (1, 32, 8, 12)
    assert rescale(32, 4, 32)(torch.randn(1, 32, 8, 8)).shape == (1, 32, 1, 1)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"patches of 2 px .* resample them to 16"):
        Pyramid(small(patch=2))
    with pytest.raises(ValueError, match="4 blocks at even depths, but the encoder has 2"):
        Pyramid(small(depth=2))
