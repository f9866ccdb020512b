from __future__ import annotations

import math
import random

import pytest
import torch

from patchmix.methods.ibot import block_masks


def draw(n: int = 2000, **options: object) -> torch.Tensor:
    return block_masks(n, 14, 14, generator=torch.Generator().manual_seed(0), **options)  # type: ignore[arg-type]


def test_half_of_the_images_is_masked_by_a_tenth_to_a_half() -> None:
    share = draw().float().mean(dim=1)
    some = share[share > 0]
    assert abs(len(some) / len(share) - 0.5) < 0.04
    assert some.max() <= 0.5 and some.min() > 0.05
    assert abs(some.mean().item() - 0.3) < 0.02  # the mean of U(0.1, 0.5); rectangles fall a little short


def test_a_fixed_ratio_is_met_from_below() -> None:
    share = draw(probability=1.0, ratio=(0.3, 0.3)).float().mean(dim=1)
    assert share.max() <= 0.3 + 1e-6
    assert share.mean() > 0.28


def test_no_mask_without_probability() -> None:
    assert not draw(probability=0.0).any()


def test_masks_are_blocks() -> None:
    """Masked patches have more masked neighbors than patches masked at random would."""
    masks = draw(probability=1.0, ratio=(0.3, 0.3)).view(-1, 14, 14).float()
    beside = (masks[:, :, 1:] * masks[:, :, :-1]).sum() / masks[:, :, 1:].sum()
    assert beside > 0.7  # at random: 0.3


def slow_mask(rng: random.Random, side: int) -> list[list[bool]]:
    """iBOT's loop: up to ten attempts for each rectangle, none as long as the grid, until none fits any more."""
    mask = [[False] * side for _ in range(side)]
    left_over = rng.uniform(0.1, 0.5) * side * side
    found = True
    while found:
        found = False
        for _ in range(10):
            area, aspect = (
                rng.uniform((side // 3) ** 2, left_over),
                math.exp(rng.uniform(math.log(0.3), -math.log(0.3))),
            )
            h, w = round(math.sqrt(max(area, 0) * aspect)), round(math.sqrt(max(area, 0) / aspect))
            if h >= side or w >= side:
                continue
            top, left = rng.randint(0, side - h), rng.randint(0, side - w)
            cells = [(y, x) for y in range(top, top + h) for x in range(left, left + w) if not mask[y][x]]
            if 0 < len(cells) <= left_over:
                for y, x in cells:
                    mask[y][x] = True
                left_over, found = left_over - len(cells), True
                break
    return mask


def test_whole_rows_and_columns_are_as_rare_as_in_ibots_loop() -> None:
    def share(masks: torch.Tensor) -> float:
        return (masks.all(dim=2).any(dim=1) | masks.all(dim=1).any(dim=1)).float().mean().item()

    rng = random.Random(0)
    expected = share(torch.tensor([slow_mask(rng, 14) for _ in range(4000)]))
    assert 0.02 < expected < 0.06
    assert share(draw(8000, probability=1.0).view(-1, 14, 14)) == pytest.approx(expected, abs=0.012)


def test_works_on_any_grid() -> None:
    for rows, columns in ((1, 1), (2, 3), (4, 4), (16, 16)):
        assert block_masks(5, rows, columns, probability=1.0).shape == (5, rows * columns)
