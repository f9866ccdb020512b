from __future__ import annotations

import torch

from patchmix.mixing import block_masks


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


def test_works_on_any_grid() -> None:
    for rows, columns in ((1, 1), (2, 3), (4, 4), (16, 16)):
        assert block_masks(5, rows, columns, probability=1.0).shape == (5, rows * columns)
