"""PatchMix: self-supervised pre-training of Vision Transformers by inter-instance similarity.

Everything here is imported on first use, so that `import patchmix` and `patchmix --help` are quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchmix.mixing import Mixed, PatchMix, overlap
    from patchmix.run import Run, pretrain

__version__ = "0.1.0"
__all__ = ["Mixed", "PatchMix", "Run", "__version__", "overlap", "pretrain"]

_HOME = {
    "Mixed": "patchmix.mixing",
    "PatchMix": "patchmix.mixing",
    "overlap": "patchmix.mixing",
    "Run": "patchmix.run",
    "pretrain": "patchmix.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'patchmix' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
