from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from patchmix.mixing import CutMix, Mixup, OneOf, RegionSwap, ResizeMix, overlap
from patchmix.mixing.pairs import beta

MIXES: dict[str, Callable[[torch.Generator | None], object]] = {
    "mixup": lambda g: Mixup(generator=g),
    "cutmix": lambda g: CutMix(generator=g),
    "resizemix": lambda g: ResizeMix(generator=g),
    "regionswap": lambda g: RegionSwap(2, generator=g),
    "cutmix+mixup": lambda g: OneOf([CutMix(generator=g), Mixup(generator=g)], g),
}


def marked(n: int, height: int, width: int) -> torch.Tensor:
    """Image j is j everywhere."""
    return torch.arange(float(n)).view(n, 1, 1, 1).expand(n, 1, height, width).contiguous()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", ["cutmix", "resizemix", "regionswap"])
@settings(max_examples=60)
@given(n=st.integers(1, 7), rows=st.integers(2, 9), columns=st.integers(2, 9), seed=st.integers(0, 999))
def test_share_counts_the_pixels(name: str, n: int, rows: int, columns: int, seed: int) -> None:
    images = marked(n, 2 * rows, 2 * columns)
    mixed = MIXES[name](seeded(seed))(images)  # type: ignore[operator]
    counted = torch.stack([(mixed.images.round() == j).float().mean(dim=(1, 2, 3)) for j in range(n)], dim=1)
    torch.testing.assert_close(mixed.share, counted)
    torch.testing.assert_close(mixed.share.sum(dim=1), torch.ones(n))


@settings(max_examples=40)
@given(n=st.integers(1, 7), seed=st.integers(0, 999), alpha=st.sampled_from([0.2, 1.0, 3.0]))
def test_share_of_mixup_is_its_weight(n: int, seed: int, alpha: float) -> None:
    images = torch.randn(n, 3, 5, 4, generator=seeded(seed))
    mixed = Mixup(alpha, seeded(seed))(images)
    torch.testing.assert_close(mixed.images, torch.einsum("ij,jchw->ichw", mixed.share, images))
    torch.testing.assert_close(mixed.share.sum(dim=1), torch.ones(n))


@settings(max_examples=40)
@given(n=st.integers(2, 6), height=st.integers(3, 12), width=st.integers(3, 12), seed=st.integers(0, 999))
def test_resizemix_pastes_the_whole_partner_resized(n: int, height: int, width: int, seed: int) -> None:
    images = torch.rand(n, 3, height, width, generator=seeded(seed))
    boxes = ResizeMix(generator=seeded(seed))(marked(n, height, width)).images.round()  # the same draws
    mixed = ResizeMix(generator=seeded(seed))(images).images
    for i in range(n):
        partner = n - 1 - i
        if partner == i:
            continue
        ys, xs = torch.nonzero(boxes[i, 0] == partner, as_tuple=True)
        top, left, bottom, right = ys.min(), xs.min(), ys.max() + 1, xs.max() + 1
        small = F.interpolate(images[partner : partner + 1], (int(bottom - top), int(right - left)), mode="bilinear")
        expected = images[i].clone()
        expected[:, top:bottom, left:right] = small[0]
        torch.testing.assert_close(mixed[i], expected, atol=2e-5, rtol=1e-4)


@settings(max_examples=40)
@given(n=st.integers(2, 6), seed=st.integers(0, 999), name=st.sampled_from(["cutmix", "regionswap"]))
def test_boxes_keep_their_place(n: int, seed: int, name: str) -> None:
    """Every pixel is that of one of the two sources at the same place, and the foreign ones form a rectangle."""
    images = torch.randn(n, 1, 8, 6, generator=seeded(seed))
    mixed = MIXES[name](seeded(seed))(images).images  # type: ignore[operator]
    foreign = (mixed != images) & (mixed == images.flip(0))
    assert torch.all(foreign | (mixed == images))
    for i in range(n):
        ys, xs = torch.nonzero(foreign[i, 0], as_tuple=True)
        if len(ys):
            assert len(ys) == (ys.max() - ys.min() + 1) * (xs.max() - xs.min() + 1)


def test_regionswap_swaps_whole_patches_and_its_sides_are_three_to_five_sevenths() -> None:
    swap = RegionSwap(4, generator=seeded(0))
    images = torch.zeros(2, 1, 56, 56)  # 14 × 14 patches
    regions = [swap.draw(images) for _ in range(400)]
    for sides in zip(*regions, strict=True):  # rows, columns
        assert {side.stop - side.start for side in sides} == {6, 7, 8, 9, 10}
    rows = [rows for rows, _ in regions]
    assert {side.start for side in rows} >= {0, 1, 8} and max(side.stop for side in rows) == 14
    mixed = swap(marked(2, 56, 56), (slice(1, 3), slice(2, 5)))
    assert torch.all(mixed.images[0, 0, 4:12, 8:20] == 1) and mixed.images[0].sum() == 8 * 12
    nearly_all = RegionSwap(8, (0.9, 0.95), seeded(0))(marked(2, 32, 32))  # of 4 × 4 patches, 3 × 3 and not 4 × 4
    assert nearly_all.share[0].tolist() == [7 / 16, 9 / 16]


def test_scales_and_weights_follow_their_papers() -> None:
    drawn = ResizeMix(generator=seeded(0)).draw(20_000).sqrt()
    assert 0.1 <= drawn.min() < 0.11 and 0.79 < drawn.max() <= 0.8
    assert drawn.mean().item() == pytest.approx(0.45, abs=0.01)
    for alpha in (0.2, 1.0, 4.0):
        weights = beta(20_000, alpha, seeded(1))
        assert weights.mean().item() == pytest.approx(0.5, abs=0.02)
        assert weights.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)  # of Beta(α, α)


def test_one_of_settles_on_one_mix_for_a_step_and_draws_all_in_turn() -> None:
    mix = OneOf([CutMix(), Mixup()], seeded(0))
    assert {type(mix.for_one_step()) for _ in range(20)} == {CutMix, Mixup}
    step = mix.for_one_step()
    assert step.for_one_step() is step


def test_the_same_amount_in_both_views_gives_the_overlap_of_sdmp() -> None:
    """(1, c) on mixed image i and its partner, c = min(λ_i, 1 − λ_p) + min(1 − λ_i, λ_p)."""
    mix = Mixup(generator=seeded(3))
    given_ = mix.draw(6)
    a, b = (mix(torch.randn(6, 3, 4, 4), given_).share for _ in range(2))
    lam = 1 - given_
    common = torch.minimum(lam, 1 - lam.flip(0)) + torch.minimum(1 - lam, lam.flip(0))
    torch.testing.assert_close(overlap(a, b), torch.eye(6) + torch.diag(common).flip(1))


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8])
def test_keeps_dtype_and_leaves_its_argument_alone(name: str, dtype: torch.dtype) -> None:
    images = (torch.rand(5, 3, 8, 6) * 255).to(dtype)
    before = images.clone()
    mixed = MIXES[name](seeded(4))(images)  # type: ignore[operator]
    assert mixed.images.dtype == dtype and mixed.images.shape == images.shape
    assert mixed.share.dtype == torch.float32
    assert torch.equal(images, before)
    assert not torch.equal(mixed.images, images)


@pytest.mark.parametrize("name", MIXES)
def test_a_seed_repeats_and_memory_format_does_not_matter(name: str) -> None:
    images = torch.randn(4, 3, 8, 8)
    make = MIXES[name]
    first = make(seeded(5))(images).images  # type: ignore[operator]
    again = make(seeded(5))(images.contiguous(memory_format=torch.channels_last)).images  # type: ignore[operator]
    assert torch.equal(first, again)
    assert not torch.equal(first, make(seeded(6))(images).images)  # type: ignore[operator]


@pytest.mark.parametrize("name", MIXES)
def test_something_of_every_image_stays_so_that_no_target_is_empty(name: str) -> None:
    mix = MIXES[name](seeded(7))
    for _ in range(50):
        a, b = (mix(torch.zeros(6, 1, 4, 4)).share for _ in range(2))  # type: ignore[operator]
        assert torch.diagonal(a).min() > 0
        assert overlap(a, b).sum(dim=1).min() > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixup(0.0), "alpha of Mixup is 0.0"),
        (lambda: CutMix(-1.0), "alpha of CutMix is -1.0"),
        (lambda: ResizeMix((0.5, 0.2)), "scale of ResizeMix"),
        (lambda: RegionSwap(2, (0.0, 0.2)), "sides of RegionSwap"),
        (lambda: RegionSwap(0), "patch_size is 0"),
        (lambda: RegionSwap(8)(torch.zeros(2, 3, 8, 8)), "images of 8 × 8 px are one patch, which has no regions"),
        (lambda: RegionSwap(4)(torch.zeros(2, 3, 10, 8)), "height is 10; it must be a multiple of patch_size 4"),
        (lambda: CutMix()(torch.zeros(3, 8, 8)), r"3 dimensions \(3, 8, 8\)"),
    ],
)
def test_bad_input_says_the_value_and_the_rule(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
