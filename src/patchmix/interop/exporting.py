"""Backbone → files for timm, torchvision, the Hugging Face Hub and ONNX, and the code that opens them there."""

import contextlib
import importlib.util
import io
import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import timm
import torch
from torch import Tensor

from patchmix.data.views import usual_resize
from patchmix.files import check_absent, replacing, write_text
from patchmix.interop.backbone import TIMM_ARGUMENTS, Architecture, Backbone, save_weights
from patchmix.interop.layouts import ENCODER_TENSOR, TO_TORCHVISION, rename
from patchmix.progress import progress_bar

TOLERANCE = 1e-4  # of ONNX's features against torch's


@dataclass(frozen=True)
class Exported:
    """What was written, and the Python code that opens it."""

    files: list[Path]
    usage: str


def export(backbone: Backbone, out: Path, format: str, *, overwrite: bool = False) -> Exported:
    """Every file is written under a temporary name first; one that exists needs `overwrite`.

    timm: a safetensors state dict that loads strictly into `timm.create_model(…, num_classes=0, …)`.
    torchvision: the same with torchvision's names; strict once `model.heads` is an Identity.
    huggingface: a folder with config.json and model.safetensors, for `timm.create_model("local-dir:…")` or the Hub.
    onnx: `images` (N, C, S, S), normalized with the mean and std in the file's metadata → `features` (N, dim), the
        class token; any N.
    """
    if format not in FORMATS:
        raise ValueError(f"export format {format!r} is unknown; it must be one of {', '.join(FORMATS)}")
    if not overwrite:
        check_absent(*([out / "config.json", out / "model.safetensors"] if format == "huggingface" else [out]))
    return FORMATS[format](backbone, out)


def timm_arguments(architecture: Architecture) -> tuple[str, dict[str, int]]:
    """The name and the arguments with which timm itself builds the encoder; all numbers are given, heads above all."""
    name = architecture.name.partition(".")[0]
    if not timm.is_model(name):  # names such as vit_small_patch2_32 are ours
        name = re.sub(r"_patch\d+_\d+$", "_patch16_224", name)
    arguments = {theirs: getattr(architecture, ours) for theirs, ours in TIMM_ARGUMENTS.items()}
    if architecture.in_chans == 3:
        del arguments["in_chans"]
    return name, arguments


def normalization(backbone: Backbone) -> tuple[str, list[float], list[float]]:
    """The values that images have before it, and mean and std of each channel that the encoder takes.

    An encoder of one channel takes the mean of three normalized ones: for a gray image that is one mean and std.
    """
    in_chans, mean, std = backbone.architecture.in_chans, backbone.mean, backbone.std
    if in_chans == 1:
        one = 1 / fmean(1 / s for s in std)
        return "gray / 255", [one * fmean(m / s for m, s in zip(mean, std, strict=True))], [one]
    return "RGB / 255" if in_chans == 3 else "values where white is 1", list(mean), list(std)


def _timm(backbone: Backbone, out: Path) -> Exported:
    backbone.save(out)
    name, arguments = timm_arguments(backbone.architecture)
    listed = ", ".join(f"{key}={value}" for key, value in arguments.items())
    usage = f"""\
import timm, torch
from safetensors.torch import load_file

model = timm.create_model("{name}", num_classes=0, {listed}){_stem_code(backbone.architecture)}
model.load_state_dict(load_file({str(out)!r}))"""
    return Exported([out], usage)


def _stem_code(architecture: Architecture) -> str:
    """The line that replaces timm's patch projection by a convolutional stem, where there is one."""
    if architecture.stem == "patch":
        return ""
    with torch.device("meta"):
        stem = architecture.create().patch_embed.proj
    layers = ", ".join(f"torch.nn.{layer!r}".replace("BatchNorm(", "BatchNorm2d(") for layer in stem)
    return f"\nmodel.patch_embed.proj = torch.nn.Sequential({layers})"


def _huggingface(backbone: Backbone, out: Path) -> Exported:
    """The layout of timm's own Hub folders, which `local-dir:` and `hf-hub:` read."""
    if out.is_file():
        raise ValueError(f"{out} is a file; a Hugging Face export is a folder, so give another name")
    if backbone.architecture.stem != "patch":
        raise ValueError("a Hugging Face folder cannot describe a convolutional stem; export to timm or onnx")
    name, arguments = timm_arguments(backbone.architecture)
    pixels, (_, mean, std) = backbone.architecture.image_size, normalization(backbone)
    content = {
        "architecture": name,
        "num_classes": 0,
        "num_features": backbone.architecture.dim,
        "model_args": arguments,
        "pretrained_cfg": {
            "tag": "patchmix",
            "custom_load": False,
            "input_size": [backbone.architecture.in_chans, pixels, pixels],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": pixels / usual_resize(pixels),
            "crop_mode": "center",
            "mean": mean,
            "std": std,
            "num_classes": 0,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    weights, config = out / "model.safetensors", out / "config.json"
    backbone.save(weights)
    write_text(config, json.dumps(content, indent=2) + "\n")
    usage = f"import timm\n\nmodel = timm.create_model({f'local-dir:{out}'!r}, pretrained=True)"
    return Exported([config, weights], usage)


def _torchvision(backbone: Backbone, out: Path) -> Exported:
    shape = backbone.architecture
    if shape.in_chans != 3:
        raise ValueError(f"torchvision's ViT takes 3 channels, this encoder {shape.in_chans}; export to timm")
    if others := [name for name in backbone.weights if not ENCODER_TENSOR.fullmatch(name)]:
        raise ValueError(f"torchvision's ViT has no place for {others[0]} ({shape.name}); export to timm")
    lacking = {"cls_token", "pos_embed", "blocks.0.attn.qkv.bias"} - backbone.weights.keys()
    if lacking or backbone.weights["pos_embed"].shape[1] != 1 + shape.patches:
        what = min(lacking, default="a position for its class token")
        raise ValueError(f"torchvision's ViT needs {what}, which {shape.name} does not have; export to timm")
    renamed = {rename(name, TO_TORCHVISION): tensor for name, tensor in backbone.weights.items()}
    save_weights(renamed, out, backbone.metadata())
    usage = f"""\
import torch, torchvision
from safetensors.torch import load_file

model = torchvision.models.VisionTransformer(image_size={shape.image_size}, patch_size={shape.patch_size}, \
num_layers={shape.depth}, num_heads={shape.heads}, hidden_dim={shape.dim}, \
mlp_dim={backbone.weights["blocks.0.mlp.fc1.weight"].shape[0]})
model.heads = torch.nn.Identity()  # an encoder has no classifier
model.load_state_dict(load_file({str(out)!r}))"""
    return Exported([out], usage)


def _onnx(backbone: Backbone, out: Path) -> Exported:
    absent = [name for name in ("onnx", "onnxruntime", "onnxscript") if importlib.util.find_spec(name) is None]
    if absent:
        raise ValueError(f"ONNX export needs {' and '.join(absent)}; pip install 'patchmix-ssl[onnx]'")
    if sum(tensor.numel() * tensor.element_size() for tensor in backbone.weights.values()) >= 2**31:
        raise ValueError("the weights are above 2 GB, the limit of one ONNX file; export to timm or huggingface")
    with replacing(out) as temporary, progress_bar("exporting to ONNX", None):
        temporary.write_bytes(_onnx_graph(backbone))
    pixels, in_chans = backbone.architecture.image_size, backbone.architecture.in_chans
    values, mean, std = normalization(backbone)
    usage = f"""\
import onnxruntime

session = onnxruntime.InferenceSession({str(out)!r})
# images: float32 (N, {in_chans}, {pixels}, {pixels}), normalized: \
({values} - {mean}) / {std}
features = session.run(["features"], {{"images": images}})[0]"""
    return Exported([out], usage)


def _onnx_graph(backbone: Backbone) -> bytes:
    """One graph for any number of images, compared with torch."""
    import onnx

    shape, encoder = backbone.architecture, backbone.encoder()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, shape.in_chans, shape.image_size, shape.image_size, generator=generator)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # of the exporter's internals
        program = torch.onnx.export(
            encoder,
            (images,),
            input_names=["images"],
            output_names=["features"],
            dynamic_shapes=({0: torch.export.Dim("N", min=1)},),
            dynamo=True,
        )
    assert program is not None
    model = program.model_proto
    for part in (model.graph, *model.graph.node, *model.graph.input, *model.graph.output, *model.graph.value_info):
        part.ClearField("metadata_props")  # the exporter's notes: stack traces with this machine's paths
    values, mean, std = normalization(backbone)
    described = {"mean": mean, "std": std, "architecture": vars(shape)}
    entries = {key: json.dumps(value) for key, value in described.items()}
    onnx.helper.set_model_props(model, entries | {"input": f"{values}, minus mean, over std"})
    onnx.checker.check_model(model)
    graph: bytes = model.SerializeToString()
    _check_against_torch(graph, encoder, images)
    return graph


def _check_against_torch(graph: bytes, encoder: torch.nn.Module, images: Tensor) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    for count in (1, 2):  # the number of images must not be frozen into the graph
        with torch.inference_mode():
            expected = encoder(images[:count]).numpy()
        (features,) = session.run(["features"], {"images": images[:count].numpy()})
        worst = float(np.abs(features - expected).max())
        if not worst <= TOLERANCE:
            raise ValueError(f"the ONNX graph differs from torch by {worst:.1e}, above {TOLERANCE:.0e}; not written")


FORMATS = {"timm": _timm, "torchvision": _torchvision, "huggingface": _huggingface, "onnx": _onnx}
