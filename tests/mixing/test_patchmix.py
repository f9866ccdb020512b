from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchmix.losses import floor
from patchmix.mixing import Mixed, PatchMix, overlap
from patchmix.mixing.patchmix import share
from tests.oracles import mixing as oracle
from tests.oracles.mixing import mix_index, omega_mtm, y_mtm, y_mto


def permutation(seed: int, patches: int) -> list[int]:
    """What PatchMix draws first from a generator with this seed."""
    return torch.randperm(patches, generator=torch.Generator().manual_seed(seed)).tolist()


def dense(labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    n = len(labels)
    return torch.zeros(n, n).scatter_add_(1, labels, weights)


@settings(max_examples=60)
@given(
    n=st.integers(1, 7),
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    p=st.integers(1, 3),
    m=st.integers(1, 16),
    seed=st.integers(0, 99),
)
def test_agrees_with_the_loops_of_algorithm_1(n: int, rows: int, columns: int, p: int, m: int, seed: int) -> None:
    m = min(m, rows * columns)
    images = torch.randn(n, 3, rows * p, columns * p)
    mixed = PatchMix(p, m, torch.Generator().manual_seed(seed))(images)
    expected = oracle.mix(images, p, m, permutation(seed, rows * columns))
    assert torch.equal(mixed.images, expected)


@given(n=st.integers(1, 12), m=st.integers(1, 12))
def test_share_is_the_dense_form_of_y_mto(n: int, m: int) -> None:
    labels = y_mto(n, m)
    torch.testing.assert_close(share(n, m), dense(labels, torch.full(labels.shape, 1 / m)))


@given(n=st.integers(1, 12), m=st.integers(1, 12))
def test_flattened_index_moves_groups_as_u_does(n: int, m: int) -> None:
    flat = mix_index(n, m)
    assert [(int(q) // m, int(q) % m) for q in flat] == oracle.groups_by_flat_index(n, m)


@given(n=st.integers(1, 15), m=st.integers(1, 15))
def test_overlap_is_omega_also_where_it_wraps_around(n: int, m: int) -> None:
    m = min(n, m)
    printed = dense(y_mtm(n, m), omega_mtm(n, m))
    torch.testing.assert_close(overlap(share(n, m), share(n, m)), printed)
    torch.testing.assert_close(printed.sum(dim=1), torch.full((n,), float(m)))


@pytest.mark.parametrize("m", [3, 5, 7, 9, 10, 12])
def test_rounding_makes_no_overlap_negative(m: int) -> None:
    """Its logarithm, in the floor of the loss, was not a number and ended the run."""
    target = overlap(share(64, m), share(64, m))
    assert target.min() >= 0
    assert floor(target).isfinite()


def test_the_appendix_example() -> None:
    """N = 9, M = 3: sample 1 holds images (1, 2, 3) and overlaps with five mixed images of the other view."""
    assert y_mto(9, 3)[1].tolist() == [1, 2, 3]
    assert y_mtm(9, 3)[1].tolist() == [8, 0, 1, 2, 3]
    assert y_mtm(9, 3)[0].tolist() == [7, 8, 0, 1, 2]  # the row that the text prints
    torch.testing.assert_close(omega_mtm(9, 3)[1], torch.tensor([1 / 3, 2 / 3, 1, 2 / 3, 1 / 3]))


def test_the_appendix_figure_with_more_images_to_mix_than_there_are() -> None:
    """N = 3, M = 4: image 0 gives groups 0 and 3 of mixed image 0."""
    images = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 1, 2, 4).contiguous()
    mixed = PatchMix(1, 4)(images)
    assert sorted(mixed.images[0].flatten().tolist()) == [0, 0, 0, 0, 1, 1, 2, 2]
    assert share(3, 4)[0].tolist() == [0.5, 0.25, 0.25]


@settings(max_examples=30)
@given(n=st.integers(1, 9), m=st.integers(1, 9), seed=st.integers(0, 9))
def test_share_counts_pixels_where_no_patch_is_left_over(n: int, m: int, seed: int) -> None:
    images = torch.arange(float(n)).view(n, 1, 1, 1).expand(n, 1, 2 * m, 4).contiguous()
    mixed = PatchMix(2, m, torch.Generator().manual_seed(seed))(images)
    counted = torch.stack([(mixed.images == j).float().mean(dim=(1, 2, 3)) for j in range(n)], dim=1)
    torch.testing.assert_close(mixed.share, counted)


def test_left_over_patches_stay_with_their_own_image() -> None:
    images = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 1, 1, 11).contiguous()
    mixed = PatchMix(1, 4)(images)  # S = 2, three left over
    assert [(row == i).sum().item() for i, row in enumerate(mixed.images)] == [5] * 5
    torch.testing.assert_close(mixed.share, share(5, 4))


def test_one_image_is_the_identity() -> None:
    images = torch.randn(4, 3, 8, 8)
    mixed = PatchMix(2, 1)(images)
    assert torch.equal(mixed.images, images)
    assert torch.equal(mixed.share, torch.eye(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8])
def test_keeps_dtype_and_leaves_its_argument_alone(dtype: torch.dtype) -> None:
    images = (torch.rand(4, 3, 8, 6) * 255).to(dtype)
    before = images.clone()
    mixed = PatchMix(2, 3)(images)
    assert isinstance(mixed, Mixed)
    assert mixed.images.dtype == dtype
    assert mixed.images.shape == images.shape
    assert torch.equal(images, before)
    assert mixed.images.data_ptr() != images.data_ptr()


def test_memory_format_does_not_matter() -> None:
    images = torch.randn(4, 3, 8, 8)
    mix = lambda x: PatchMix(2, 3, torch.Generator().manual_seed(1))(x).images  # noqa: E731
    assert torch.equal(mix(images), mix(images.contiguous(memory_format=torch.channels_last)))


def test_gradients_flow_back_to_the_originals() -> None:
    images = torch.randn(3, 1, 4, 4, requires_grad=True)
    PatchMix(2, 2)(images).images.sum().backward()
    assert images.grad is not None
    assert torch.equal(images.grad, torch.ones_like(images))


def test_every_call_draws_anew_and_a_seed_repeats_it() -> None:
    images = torch.randn(6, 3, 16, 16)
    mix = PatchMix(2, 3, torch.Generator().manual_seed(5))
    first, second = mix(images).images, mix(images).images
    assert not torch.equal(first, second)
    assert torch.equal(first, PatchMix(2, 3, torch.Generator().manual_seed(5))(images).images)


def test_several_numbers_of_images_are_all_drawn_and_the_share_follows() -> None:
    mix = PatchMix(2, (1, 2, 4), torch.Generator().manual_seed(0))
    images = torch.randn(6, 3, 8, 8)
    seen = {round(1 / float(mix(images).share.max())) for _ in range(60)}
    assert seen == {1, 2, 4}
    assert torch.equal(mix(images, num_mix=4).share, share(6, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: PatchMix(4)(torch.zeros(2, 3, 10, 8)),
            "height is 10; it must be a multiple of patch_size 4",
        ),
        (lambda: PatchMix(4)(torch.zeros(2, 3, 8, 6)), "width is 6"),
        (lambda: PatchMix(2)(torch.zeros(3, 8, 8)), r"3 dimensions \(3, 8, 8\)"),
        (lambda: PatchMix(4, 5)(torch.zeros(2, 3, 8, 8)), "num_mix is 5; with 4 patches"),
        (lambda: PatchMix(4, 0), "num_mix is 0; it must be at least 1"),
        (lambda: PatchMix(4, (2, -1)), "num_mix is -1"),
        (lambda: PatchMix(4, ()), "num_mix is empty"),
        (lambda: PatchMix(0), "patch_size is 0"),
    ],
)
def test_bad_input_says_the_value_and_the_rule(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
