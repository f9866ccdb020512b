"""PatchMix: self-supervised pre-training of Vision Transformers by inter-instance similarity.

Everything here is imported on first use, so that `import patchmix` and `patchmix --help` are quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchmix.interop.loading import load_backbone as load
    from patchmix.mixing import Mixed, PatchMix, overlap
    from patchmix.run import Run, pretrain

__version__ = "0.1.0"
__all__ = ["Mixed", "PatchMix", "Run", "__version__", "load", "overlap", "pretrain"]

_HOME = {
    "Mixed": ("patchmix.mixing", "Mixed"),
    "PatchMix": ("patchmix.mixing", "PatchMix"),
    "overlap": ("patchmix.mixing", "overlap"),
    "load": ("patchmix.interop.loading", "load_backbone"),
    "Run": ("patchmix.run", "Run"),
    "pretrain": ("patchmix.run", "pretrain"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'patchmix' has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
