"""Which device a process computes on, in which precision, and whether it can compile."""

import os
import re
import shutil
from collections.abc import Mapping

import torch


def resolve_device(name: str = "auto") -> torch.device:
    """ "auto" is this process's own GPU where there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", name):
        raise ValueError(f"device {name!r} can't be used here; use auto, cpu or cuda")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device is cuda, but torch sees no GPU; use --device cpu or install a CUDA driver")
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise ValueError(
                f"device is {device}, but torch sees {torch.cuda.device_count()} GPUs; start as many processes "
                "(--devices, --nproc-per-node) as there are GPUs, or use --device cpu"
            )
        torch.cuda.set_device(device)
    return device


def autocast_dtype(device: torch.device, precision: str = "auto") -> torch.dtype | None:
    """What autocast computes in; None for fp32. "auto" is bf16 on a device with hardware for it, fp32 elsewhere."""
    if precision == "bf16" or (precision == "auto" and has_bf16(device)):
        return torch.bfloat16
    return None


def has_bf16(device: torch.device) -> bool:
    """Whether it computes in bf16, rather than emulate that."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities: Mapping[str, bool | int | str] = getattr(torch.cpu, "get_capabilities", dict)()  # since torch 2.11
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))


def cpp_compiler() -> str | None:
    """The C++ compiler that torch.compile uses on the CPU, if there is one."""
    return next((path for name in (os.environ.get("CXX", ""), "g++", "clang++") if (path := shutil.which(name))), None)
