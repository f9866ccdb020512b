from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchmix.losses import chance, contrast, floor, pad_targets, smooth
from patchmix.mixing import overlap
from patchmix.mixing.patchmix import share
from tests.oracles import losses as oracle


@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 8), m=st.integers(1, 8), tau=st.floats(0.05, 1.0), seed=st.integers(0, 99))
def test_the_three_terms_agree_with_the_double_sums(n: int, m: int, tau: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    h, z = torch.randn(2, n, 5, generator=generator, dtype=torch.float32)
    near = pytest.approx
    assert contrast(h, z, torch.eye(n), tau).item() == near(oracle.origin_to_origin(h, z, tau), rel=1e-4, abs=1e-5)
    assert contrast(h, z, share(n, m), tau).item() == near(oracle.mix_to_origin(h, z, m, tau), rel=1e-4, abs=1e-5)
    m = min(n, m)
    targets = overlap(share(n, m), share(n, m))
    assert contrast(h, z, targets, tau).item() == near(oracle.mix_to_mix(h, z, m, tau), rel=1e-4, abs=1e-5)


def test_chance_is_what_equal_keys_give() -> None:
    target = overlap(share(6, 3), share(6, 3))
    h, z = torch.randn(6, 4), torch.ones(6, 4)
    torch.testing.assert_close(contrast(h, z, target, 0.2), chance(target))
    assert chance(target).item() == pytest.approx(3 * math.log(6))


@settings(deadline=None)
@given(n=st.integers(2, 8), m=st.integers(1, 5), seed=st.integers(0, 99))
def test_nothing_is_below_the_floor_and_the_floor_is_reached(n: int, m: int, seed: int) -> None:
    target = overlap(share(n, min(m, n)), share(n, min(m, n)))
    h, z = torch.randn(2, n, 4, generator=torch.Generator().manual_seed(seed))
    assert contrast(h, z, target, 0.1) >= floor(target) - 1e-5
    proportion = target / target.sum(dim=1, keepdim=True)
    reached = -(target * torch.log(proportion.clamp_min(1e-30))).sum(dim=1).mean()
    torch.testing.assert_close(reached, floor(target))


def test_the_floor_of_a_one_hot_target_is_zero() -> None:
    assert floor(torch.eye(4)).item() == 0.0


def test_smoothing_spreads_over_all_keys() -> None:
    smoothed = smooth(torch.eye(4), 0.1)
    assert smoothed[0, 0].item() == pytest.approx(0.9 + 0.1 / 4)
    assert smoothed[0, 1].item() == pytest.approx(0.1 / 4)


def test_padded_targets_have_the_block_at_the_offset() -> None:
    padded = pad_targets(torch.eye(2), 6, 2)
    assert padded.tolist() == [[0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0]]


def test_logits_stay_fp32_under_autocast() -> None:
    h, z = torch.randn(2, 8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = contrast(h, z, torch.eye(8), 0.2)
    assert low.dtype == torch.float32
    assert torch.equal(low, contrast(h, z, torch.eye(8), 0.2))


def test_gradient_reaches_keys_unless_they_are_detached() -> None:
    h, z = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    contrast(h, z.detach(), torch.eye(4), 0.2).backward()
    assert h.grad is not None
    assert z.grad is None
