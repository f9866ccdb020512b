"""The benchmark's limit: what it takes for the matrix products of a step."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.nn.functional as F

from benchmarks.products import Products


def test_every_product_is_noted_and_nothing_else() -> None:
    layer = torch.nn.Linear(16, 48)
    x = torch.randn(2, 8, 16, requires_grad=True)
    with Products() as products:
        for _ in range(3):
            q, k, v = layer(x).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind()
            F.gelu(F.scaled_dot_product_attention(q, k, v)).sum().backward()
    names = {call[0].__name__.partition(".")[0]: 0 for call in products.calls}
    for (func, *_), number in products.calls.items():
        names[func.__name__.partition(".")[0]] += number
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert names == {"addmm": 3, "mm": 6, attention: 3, f"{attention}_backward": 3}


def test_they_are_timed_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(64, 32), torch.randn(32, 16).T.contiguous().T
    with Products() as products:
        a @ b, a @ b, b @ a[:16]
    (func, _, leaves), _ = products.calls
    assert func is torch.ops.aten.mm.default
    assert leaves[1] == ((32, 16), (1, 32), torch.float32)  # a transposed matrix stays one
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    with Products() as timed:
        assert products.seconds() == 3  # each kind of product is timed once, and counts as often as it was called
    assert timed.calls == dict.fromkeys(products.calls, 2)  # once to warm up
