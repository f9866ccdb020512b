from __future__ import annotations

from typing import Any

import pytest
import torch

from patchmix.build import build_encoder, build_method, build_plan, build_views
from patchmix.config import ModelConfig, TrainConfig, ViewsConfig
from patchmix.nn.tokens import class_tokens
from patchmix.recipes import fast


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_sizes": (16, 20, 32)}, "images of 20 px do not divide into patches of 8 px"),
        ({"image_sizes": (16, 20, 32), "method": "mocov3"}, "images of 20 px do not divide"),
        ({"local_crops": 1, "local_size": 20, "method": "mocov3"}, "images of 20 px do not divide"),
        ({"model": "deit3_small_patch16_224", "image_size": 40}, "images of 40 px do not divide into patches of 16 px"),
        ({"image_sizes": (16, 64)}, "image_sizes has 64; the model takes images of 32 px at most"),
        ({"image_sizes": (24, 32), "mix_blocks": (2, 1)}, "mix_blocks has 2; the 3 × 3 patches of images of 24 px"),
        ({"mix_blocks": (4, 2, 1)}, "num_mix has 2; images of 32 px have 1 blocks to mix"),
        ({"image_sizes": (32, 8), "patch_size": 4, "num_mix": 9}, "num_mix has 9; images of 8 px have 4 blocks"),
        ({"local_crops": 1, "local_size": 8, "num_mix": 2}, "num_mix has 2; images of 8 px have 1 blocks"),
        (
            {"image_sizes": (32, 8), "mix": "regionswap", "region_weight": 0.0},
            "images of 8 px are one patch, which has no",
        ),
        ({"image_sizes": (32, 8), "method": "regioncl"}, "images of 8 px are one patch, which has no regions"),
        (
            {"mix": "regionswap", "region_weight": 0.0, "local_crops": 1, "local_size": 8},
            "images of 8 px are one patch",
        ),
        ({"image_sizes": (16, 20.5)}, "image_sizes has 20.5; give whole pixels, or fractions up to 1"),
        ({"image_sizes": (32, *[24] * 8), "mix_blocks": (2, *[1] * 7), "num_mix": 1}, "mix_blocks has 2; the 3 × 3"),
        ({"method": "distill", "local_crops": 1, "teacher": "timm:vit"}, "distill has no use for local crops"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_the_training(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_method(fast().replace(**changes))


def test_the_area_of_local_crops_is_named_in_full() -> None:
    with pytest.raises(ValueError, match=r"^local_area is \(0.5, 1.5\)"):
        build_views(ViewsConfig(local_area=(0.5, 1.5)), 32)


def test_stages_are_checked_in_the_order_they_take() -> None:
    build_method(fast().replace(patch_size=4, image_sizes=(16, 24, 32), mix_blocks=(2, 3, 4)))
    build_method(fast().replace(mix_blocks=(4, 1), num_mix=(1, 2), num_mix_stages=True))
    build_method(fast().replace(mix="cutmix", region_weight=0, local_crops=1, local_size=8))


@pytest.mark.parametrize(
    ("sizes", "whole", "patch", "expected"),
    [
        ((), 32, 8, (32,)),
        ((0.5, 0.75, 1), 32, 8, (16, 24, 32)),
        ((0.5, 0.75, 1), 96, 16, (48, 64, 96)),  # 72 px are 4.5 patches, and a half is rounded to even
        ((0.5, 0.75, 1), 16, 8, (16, 16, 16)),  # of one patch nothing could be mixed
        ((0.5, 1), 8, 8, (8, 8)),
        ((24, 32, 1), 32, 8, (24, 32, 32)),
    ],
)
def test_sides_in_pixels_or_fractions(sizes: tuple[float, ...], whole: int, patch: int, expected: Any) -> None:
    assert TrainConfig(image_sizes=sizes).sides(whole, patch) == expected


def test_the_plan_has_sides_in_pixels() -> None:
    for side, sizes, expected in ((32, (), ()), (32, (0.5, 1), (16, 32)), (64, (0.5, 0.75, 1), (32, 48, 64))):
        config = fast().replace(image_size=side, image_sizes=sizes)
        assert build_plan(config, build_method(config).encoder, 10, torch.device("cpu")).image_sizes == expected


def test_a_vit_without_a_position_for_its_class_token_takes_other_sizes() -> None:
    model = ModelConfig("deit3_small_patch16_224", image_size=64, dim=24, depth=2, heads=2)
    encoder = build_encoder(model, any_image_size=True)
    assert class_tokens(encoder, torch.randn(2, 3, 32, 32)).shape == (2, 24)
