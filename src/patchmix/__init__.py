"""PatchMix: self-supervised pre-training of Vision Transformers by inter-instance similarity.

Everything here is imported on first use, so that `import patchmix` and `patchmix --help` are quick. The main commands
are functions of the same name, with the same settings as keywords.
"""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchmix.interop.loading import load_backbone as load
    from patchmix.mixing import Mixed, PatchMix, overlap
    from patchmix.run import Run

__version__ = "0.2.0.dev0"

_VERBS = ("ablate", "adapt", "detect", "embed", "finetune", "knn", "linear", "pretrain", "segment", "shards")
_MODULES = {
    "Mixed": "patchmix.mixing:Mixed",
    "PatchMix": "patchmix.mixing:PatchMix",
    "overlap": "patchmix.mixing:overlap",
    "load": "patchmix.interop.loading:load_backbone",
    "Run": "patchmix.run:Run",
}
__all__ = ["Mixed", "PatchMix", "Run", "__version__", "load", "overlap", *_VERBS]


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        from patchmix.cli import python_function

        return python_function(name)
    if name not in _MODULES:
        raise AttributeError(f"module 'patchmix' has no attribute {name!r}")
    return resolve_name(_MODULES[name])


def __dir__() -> list[str]:
    return sorted(__all__)
