from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from patchmix import losses
from patchmix.losses import chance, contrast, floor, pad_targets, smooth
from patchmix.methods.regioncl import region_contrast
from patchmix.methods.simclr import nt_xent
from patchmix.mixing import overlap
from patchmix.mixing.patchmix import share
from tests.oracles import losses as oracle


@settings(max_examples=40)
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


@pytest.mark.parametrize("rows", [1, 3, 4, 11])
def test_blocks_of_rows_give_the_same_loss_and_gradients(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = 11, 40
    h, z = torch.randn(n, 6, requires_grad=True), torch.randn(k, 6, requires_grad=True)
    target = pad_targets(overlap(share(n, 3), share(n, 3)), k, 7)
    labels = torch.arange(n // 2 * 2)

    def results() -> list[torch.Tensor]:
        values = [
            contrast(h, z, target, 0.2),
            nt_xent(h[:10], z, 3, 0.2),
            region_contrast(h[:10], z, h.roll(1, 0)[:10], labels, 0.2),
            floor(target),
        ]
        return [x.detach() for x in values] + list(torch.autograd.grad(sum(values), [h, z]))

    whole = results()
    monkeypatch.setattr(losses, "LOGITS", rows * k)
    for blocked, expected in zip(results(), whole, strict=True):
        torch.testing.assert_close(blocked, expected, rtol=1e-6, atol=1e-6)


def test_the_memory_of_many_keys_is_bounded() -> None:
    """Logits of 512 queries among 32,768 keys, on a device that only counts: at most a few blocks at a time."""
    n, k = 2048, 32768
    with FakeTensorMode(), Largest() as seen:
        h, z, target = torch.randn(n, 8, requires_grad=True), torch.randn(k, 8), torch.empty(n, k)
        seen.elements = 0
        contrast(h, z, target, 0.2).backward()
        floor(target)
    assert seen.elements == losses.LOGITS < n * k / 3


class Largest(TorchDispatchMode):
    """The most elements of a new tensor."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.elements = max(self.elements, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)), 0)
        return out


def test_gradient_reaches_keys_unless_they_are_detached() -> None:
    h, z = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    contrast(h, z.detach(), torch.eye(4), 0.2).backward()
    assert h.grad is not None
    assert z.grad is None
