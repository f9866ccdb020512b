"""Backbone → files for timm, torchvision, the Hugging Face Hub and ONNX. Each says how it is opened again."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from patchmix.files import replacing
from patchmix.interop.backbone import Architecture, Backbone
from patchmix.interop.layouts import ENCODER_TENSOR
from patchmix.interop.onnx_file import write_onnx
from patchmix.interop.torchvision_names import to_torchvision

FORMATS = ("timm", "torchvision", "huggingface", "onnx")


@dataclass(frozen=True)
class Exported:
    """What was written, and the Python lines that open it."""

    files: list[Path]
    usage: str


def export(backbone: Backbone, out: Path, format: str, *, overwrite: bool = False) -> Exported:
    """Writes the encoder for another program; `Exported.usage` is the exact code that loads it.

    timm: a safetensors state dict that loads strictly into `timm.create_model(…, num_classes=0, …)`.
    torchvision: a safetensors state dict with torchvision's names; strict once `model.heads` is an Identity, since an
        encoder has no classifier.
    huggingface: a folder with config.json and model.safetensors, for `timm.create_model("local-dir:…")` or the Hub.
    onnx: `images` (N, 3, S, S), normalised with the mean and std in the file's metadata → `features` (N, dim), the
        class token; any N. Checked against torch to 1e-4 before it gets its name.
    Every file is written under a temporary name first. One that exists with other content is kept, with a ValueError,
    unless `overwrite`.
    """
    out = Path(out)
    file = backbone
    if format == "timm":
        file.save(out, overwrite=overwrite)
        return Exported([out], _timm_usage(file.architecture, out))
    if format == "torchvision":
        _save_state(torchvision_state(file), out, overwrite=overwrite)
        return Exported([out], _torchvision_usage(file, out))
    if format == "huggingface":
        return _huggingface(file, out, overwrite=overwrite)
    if format == "onnx":
        with replacing(out, overwrite=overwrite) as temporary:
            write_onnx(file, temporary)
        return Exported([out], _onnx_usage(file, out))
    raise ValueError(f"export format {format!r} is unknown; it must be one of {', '.join(FORMATS)}")


# --------------------------------------------------------------------------------------------- timm and Hugging Face


def timm_arguments(architecture: Architecture) -> tuple[str, dict[str, int]]:
    """The name and the arguments with which timm itself builds the encoder; all numbers are given, heads above all."""
    name = architecture.name.partition(".")[0]
    if not timm.is_model(name):  # names such as vit_small_patch2_32 are ours
        name = re.sub(r"_patch\d+_\d+$", "_patch16_224", name)
    arguments = {
        "img_size": architecture.image_size,
        "patch_size": architecture.patch_size,
        "embed_dim": architecture.dim,
        "depth": architecture.depth,
        "num_heads": architecture.heads,
    }
    if architecture.in_chans != 3:
        arguments["in_chans"] = architecture.in_chans
    return name, arguments


def _timm_usage(architecture: Architecture, out: Path) -> str:
    name, arguments = timm_arguments(architecture)
    listed = ", ".join(f"{key}={value}" for key, value in arguments.items())
    return (
        "import timm\n"
        "from safetensors.torch import load_file\n\n"
        f'model = timm.create_model("{name}", num_classes=0, {listed})\n'
        f"model.load_state_dict(load_file({str(out)!r}))"
    )


def _huggingface(file: Backbone, out: Path, *, overwrite: bool) -> Exported:
    """The layout of timm's own Hub folders, which `local-dir:` and `hf-hub:` read."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; a Hugging Face export is a folder, so give another name")
    name, arguments = timm_arguments(file.architecture)
    pixels = file.architecture.image_size
    config = {
        "architecture": name,
        "num_classes": 0,
        "num_features": file.architecture.dim,
        "model_args": arguments,
        "pretrained_cfg": {
            "tag": "patchmix",
            "custom_load": False,
            "input_size": [file.architecture.in_chans, pixels, pixels],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": list(file.mean),
            "std": list(file.std),
            "num_classes": 0,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    weights, settings = out / "model.safetensors", out / "config.json"
    text = json.dumps(config, indent=2) + "\n"
    if settings.exists() and not overwrite and settings.read_text() != text:  # before anything is written
        raise ValueError(
            f"{settings} exists and differs; give another folder, or allow it with overwrite (--overwrite)"
        )
    file.save(weights, overwrite=overwrite)
    with replacing(settings, overwrite=overwrite) as temporary:
        temporary.write_text(text)
    usage = f"import timm\n\nmodel = timm.create_model({f'local-dir:{out}'!r}, pretrained=True)"
    return Exported([settings, weights], usage)


# ------------------------------------------------------------------------------------------------------- torchvision


def torchvision_state(file: Backbone) -> dict[str, Tensor]:
    """The weights under the names of `torchvision.models.VisionTransformer`."""
    if file.architecture.in_chans != 3:
        raise ValueError(
            f"torchvision's ViT takes 3 channels, this encoder {file.architecture.in_chans}; export to timm"
        )
    others = [name for name in file.weights if not ENCODER_TENSOR.fullmatch(name)]
    if others:
        raise ValueError(f"torchvision's ViT has no place for {others[0]} ({file.architecture.name}); export to timm")
    return {to_torchvision(name): tensor.detach().clone() for name, tensor in file.weights.items()}


def _torchvision_usage(file: Backbone, out: Path) -> str:
    shape = file.architecture
    return (
        "import torch, torchvision\n"
        "from safetensors.torch import load_file\n\n"
        f"model = torchvision.models.VisionTransformer(image_size={shape.image_size}, patch_size={shape.patch_size}, "
        f"num_layers={shape.depth}, num_heads={shape.heads}, hidden_dim={shape.dim}, "
        f"mlp_dim={file.weights['blocks.0.mlp.fc1.weight'].shape[0]})\n"
        "model.heads = torch.nn.Identity()  # an encoder has no classifier\n"
        f"model.load_state_dict(load_file({str(out)!r}))"
    )


def _save_state(state: dict[str, Tensor], out: Path, *, overwrite: bool) -> None:
    def same(a: Path, b: Path) -> bool:
        try:
            left, right = load_file(a), load_file(b)
        except (SafetensorError, OSError):  # whatever stands there, it is not this state dict
            return False
        return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)

    with replacing(out, overwrite=overwrite, same=same) as temporary:
        save_file({name: t.cpu().contiguous() for name, t in state.items()}, temporary, metadata={"format": "pt"})


def _onnx_usage(file: Backbone, out: Path) -> str:
    values: dict[str, Any] = {"mean": list(file.mean), "std": list(file.std)}
    return (
        "import onnxruntime\n\n"
        f"session = onnxruntime.InferenceSession({str(out)!r})\n"
        f"# images: float32 (N, {file.architecture.in_chans}, {file.architecture.image_size}, "
        f"{file.architecture.image_size}), normalised: (rgb / 255 - {values['mean']}) / {values['std']}\n"
        'features = session.run(["features"], {"images": images})[0]'
    )
