"""The matrix products of a computation, alone: how fast it could be if nothing else took any time.

Every call of attention, or of what torch's FLOP counter counts, is noted with the shapes and strides of its tensors,
and then timed by itself on tensors that are there already. Nothing around the products is executed, and what they read
is in the cache if it fits, so no step that makes these calls can be faster than their sum.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode, flop_registry

ATTENTION = (  # on a CPU, which the counter does not know
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)


def count_flops(method: nn.Module, views: Sequence[Tensor]) -> tuple[int, int]:
    """FLOPs of one pass forward and backward, as torch counts them: matrix products and convolutions.

    Backward is a little less than 2 × forward: images and frozen layers need no gradients.
    """
    with sdpa_kernel(SDPBackend.MATH):  # attention as plain products, which the counter sees on any device
        with FlopCounterMode(display=False) as forward:
            loss = method(views)["loss"]
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    method.zero_grad(set_to_none=True)
    return forward.get_total_flops(), backward.get_total_flops()


class Products(TorchDispatchMode):
    """Notes the calls made inside of the context; `seconds` is what they take by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[Any, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket in flop_registry or func._overloadpacket in ATTENTION:
            leaves, structure = tree_flatten((args, kwargs or {}))
            self.calls[func, structure, tuple(_described(leaf) for leaf in leaves)] += 1
        return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def seconds(self) -> float:
        return sum(number * _seconds(*call) for call, number in self.calls.items())


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    return tuple(leaf) if isinstance(leaf, list) else leaf


def _made(described: Any) -> Any:
    if isinstance(described, tuple) and len(described) == 3 and isinstance(described[2], torch.dtype):
        shape, stride, dtype = described
        room = torch.empty_strided(shape, stride, dtype=dtype)
        return room.normal_() if dtype.is_floating_point else room.zero_()
    return described


def _seconds(func: Callable[..., Any], structure: Any, leaves: tuple[Any, ...]) -> float:
    """The second of two calls: the first finds memory and code."""
    args, kwargs = tree_unflatten([_made(leaf) for leaf in leaves], structure)
    func(*args, **kwargs)
    began = time.perf_counter()
    func(*args, **kwargs)
    return time.perf_counter() - began
