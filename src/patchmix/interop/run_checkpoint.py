"""A run's own checkpoint, `checkpoints/last`: encoders of a training that may still be going on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchmix.interop.encoder_file import IMAGENET_MEAN, IMAGENET_STD, Architecture, EncoderFile
from patchmix.interop.layouts import Which
from patchmix.nn.vit import create_encoder

_PREFIX = {"base": "encoder.", "momentum": "momentum_copy.network.0."}
_MODEL_KEYS = ("image_size", "patch_size", "in_chans", "dim", "depth", "heads")


def is_run_checkpoint(entries: Mapping[str, Any]) -> bool:
    return isinstance(entries.get("method"), Mapping) and isinstance(entries.get("config"), Mapping)


def split_run_checkpoint(
    path: Path, entries: Mapping[str, Any], encoder: Which | None
) -> tuple[EncoderFile, list[str], dict[str, list[str]]]:
    """The encoder, the names it took, and the names that were dropped by reason. None means the base encoder."""
    encoder = encoder or "base"
    state: Mapping[str, Tensor] = entries["method"]
    config: Mapping[str, Any] = entries["config"]
    weights: dict[str, Tensor] = {}
    taken: list[str] = []
    dropped: dict[str, list[str]] = {}
    for name, tensor in state.items():
        whose = next((which for which, prefix in _PREFIX.items() if name.startswith(prefix)), None)
        if whose == encoder:
            weights[name.removeprefix(_PREFIX[whose])] = tensor.detach()
            taken.append(name)
        else:
            reason = f"the {whose} encoder" if whose else "heads and state of the method"
            dropped.setdefault(reason, []).append(name)
    if not weights:
        raise ValueError(f"{path} has no {encoder} encoder; this run's method keeps none, so take the other one")
    dropped["not weights"] = [name for name in entries if name != "method"]

    try:
        model: Mapping[str, Any] = config["model"]
        timm_name: str = model["name"]
        views: Mapping[str, Any] = config.get("views", {})
        with torch.device("meta"):
            shell = create_encoder(timm_name, **{key: model[key] for key in _MODEL_KEYS if model.get(key) is not None})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} has no usable config.model ({error}); it was not written by a run") from error
    architecture = Architecture.of(timm_name, shell)
    if problems := architecture.mismatches(weights):
        raise ValueError(f"{path} does not hold the encoder that its config says: {problems[0]}")
    file = EncoderFile(
        architecture,
        weights,
        mean=tuple(views.get("mean", IMAGENET_MEAN)),
        std=tuple(views.get("std", IMAGENET_STD)),
        origin={
            "format": "patchmix",
            "recipe": config.get("recipe"),
            "method": dict(config.get("method") or {}).get("name"),
            "data": dict(config.get("data") or {}).get("path"),
            "step": entries.get("step"),
            "encoder": encoder,
        },
    )
    return file, taken, dropped
