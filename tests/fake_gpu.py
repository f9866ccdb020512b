"""A GPU without a device: tensors on cuda:0 have shapes and types but no values, those on the CPU are real.

What a real GPU would punish raises here, with the operator's name: tensors left on the CPU, anything that makes the
host wait for the device, and float64.
"""

from __future__ import annotations

import importlib
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
# Their results are read by the host, or have a size that only the device knows.
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "bincount", "equal", "is_nonzero")
# What autocast does on a GPU. torch's own asks C++ for the device, so these calls are cast here.
_LOW = ("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "conv2d", "einsum", "tensordot")
_LOW += ("scaled_dot_product_attention",)
_HIGH = ("softmax", "log_softmax", "layer_norm", "group_norm", "cross_entropy", "cosine_similarity", "cdist", "exp")
_HIGH += ("log", "norm", "normalize", "pow", "rsqrt", "sum", "prod", "cumsum")
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


class Punished(AssertionError):
    """What a GPU would fail at, or wait for."""


def _asks_for_device(func: Any) -> bool:
    """C++ does: it gets the CPU for an answer, otherwise it would look for the GPU's driver and stream."""
    return func is torch.ops.prim.device.default


class _Shapes(FakeTensorMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return CPU if _asks_for_device(func) else super().__torch_dispatch__(func, types, args, kwargs)


class FakeGPU(TorchDispatchMode):
    """While it is active, tensors can be on `GPU`. With `may_wait` the host may wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = _Shapes(allow_non_fake_inputs=True)
        self.may_wait = False
        self.reads = 0  # results that the host may still read
        self.products: Counter[torch.dtype] = Counter()  # matrix products by type

    def __enter__(self) -> FakeGPU:
        self._stack = ExitStack()
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        answers = {"is_available": True, "is_bf16_supported": True, "_lazy_init": None, "manual_seed_all": None}
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
        patch.setattr(fake_tensor, "init_gpu_context", lambda device: None)  # torch 2.10 would allocate on the device
        for module in ("torch.nn.utils.clip_grad", "torch.optim.optimizer"):
            patch.setattr(importlib.import_module(module), "_group_tensors_by_device_and_dtype", _group_tensors)
        patch.setattr(
            torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda self: None, raising=False
        )
        patch.setattr(torch.optim.Optimizer, "_cuda_graph_capture_health_check", lambda self: None, raising=False)
        self._stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # batch norm asks for its version
        self._stack.enter_context(_Calls(self))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def move(self, module: nn.Module) -> Any:
        """The module with its parameters and buffers on the GPU."""
        return module._apply(lambda tensor: self.empty(*tensor.shape, dtype=tensor.dtype))

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        with self._fake:
            return torch.empty(shape, dtype=dtype, device=GPU)

    def punish(self, text: str) -> None:
        if self.reads:
            self.reads -= 1
        elif not self.may_wait:
            raise Punished(text)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _asks_for_device(func):
            return CPU
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_cpu = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
        device = kwargs.get("device")
        if len(on_cpu) == len(tensors) and (device is None or device.type != "cuda"):
            return func(*args, **kwargs)
        operator = str(func).split(".")[1]
        if device == CPU:
            kwargs = {**kwargs, "device": GPU}  # C++ believes that its tensors are on the CPU
        if operator == "index_put" and on_cpu and torch._C._current_autograd_node():
            args, on_cpu = (self.empty(*args[0].shape, dtype=args[0].dtype), *args[1:]), []  # its zeros, likewise
        if operator in ("_to_copy", "copy_", "to"):
            if on_cpu and not kwargs.get("non_blocking", len(args) > 2 and args[2]):
                self.punish(f"{func}: the host waits for a copy; use non_blocking=True")
        elif any(tensor.ndim for tensor in on_cpu):
            raise Punished(f"{func}: a tensor was left on the CPU, with shape {[list(t.shape) for t in on_cpu]}")
        if operator in _WAITING:
            self.punish(f"{func}: the host waits for the device")
        if operator in _INDEXING and any(leaf.dtype == torch.bool for leaf in tree_leaves(args[1]) if leaf is not None):
            self.punish(f"{func}: the host waits to learn how many values of a mask are true")
        args, kwargs = tree_map_only(Tensor, self._as_fake, (args, kwargs))
        with self._fake:
            out = func(*args, **kwargs)
        if operator in ("mm", "bmm", "addmm", "baddbmm"):
            self.products[out.dtype] += 1
        if any(leaf.dtype == torch.float64 and leaf.is_cuda for leaf in tree_leaves(out) if isinstance(leaf, Tensor)):
            raise Punished(f"{func}: float64 on the GPU")
        return out

    def _as_fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor, static_shapes=True)


def _group_tensors(*args: Any, **kwargs: Any) -> Any:
    """As torch's, which asks C++ for the device."""
    grouped = _foreach_utils._group_tensors_by_device_and_dtype(*args, **kwargs)
    return {(lists[0][0].device, dtype): (lists, rest) for (_, dtype), (lists, rest) in grouped.items()}


class _Calls(TorchFunctionMode):
    """What is not seen below, where C++ takes the GPU for the CPU: copies between them."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "backward":
            ones, engine = torch.ones_like(args[0]), torch.autograd.Variable._execution_engine
            with self:  # what is recomputed is seen here, too
                return engine.run_backward((args[0],), (ones,), False, False, (), accumulate_grad=True)
        if name in ("tensor", "as_tensor") and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            self.gpu.punish(f"torch.{name}: the host waits for a copy; use torch.full or new_full")
            return func(*args, **{**kwargs, "device": "cpu"}).to(GPU)
        if name in ("cpu", "to", "numpy", "tolist") and args and isinstance(args[0], FakeTensor):
            target = next((a for a in [*args[1:], *kwargs.values()] if isinstance(a, (str, torch.device))), None)
            if name != "to" or (target is not None and torch.device(target).type == "cpu"):
                if not kwargs.get("non_blocking"):
                    self.gpu.punish(f"Tensor.{name}: the host waits for a copy")
                return torch.zeros(args[0].shape, dtype=args[0].dtype)
        if name in _LOW + _HIGH and torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda") if name in _LOW else torch.float32

            def cast(x: Tensor) -> Tensor:
                return x.to(dtype) if isinstance(x, FakeTensor) and x.is_floating_point() else x

            args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
        return func(*args, **kwargs)
