"""Checkpoints of other projects → Backbone. No name is skipped silently: it is taken, or dropped and listed."""

import argparse
import json
import math
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from safetensors import SafetensorError, safe_open
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models import eva, vision_transformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchmix.data import IMAGENET_MEAN, IMAGENET_STD
from patchmix.files import check_absent
from patchmix.interop.backbone import TIMM_ARGUMENTS, Architecture, Backbone, first_of
from patchmix.interop.layouts import ENCODER_TENSOR, LAYOUTS, Which, detect, tensors_of
from patchmix.nn.vit import create_encoder
from patchmix.settings import Import

_UNUSED = r"mask_token|rope_embed\.periods|local_cls_norm\..*|.*\.bias_mask"  # of DINOv2 and DINOv3
_SATELLITE = {"mean": (0.430, 0.411, 0.296), "std": (0.213, 0.156, 0.143)}  # of DINOv3's SAT-493M
_HARMLESS_ARGUMENTS = ("num_classes", "dynamic_img_size", "dynamic_img_pad", "drop_path_rate")
_SIZES = {(192, 12): "tiny", (384, 12): "small", (768, 12): "base", (1024, 24): "large", (1280, 32): "huge"}


@dataclass(frozen=True)
class Imported:
    """A backbone from elsewhere. Each name of its checkpoint is in `taken`, or in `dropped` under the reason.

    `notes` lists what had to be assumed or converted.
    """

    backbone: Backbone
    format: str
    taken: list[str]
    dropped: dict[str, list[str]]
    notes: list[str]

    def summary(self) -> list[str]:
        """Lines to print."""
        shape = self.backbone.architecture
        return [
            f"format   {self.format}",
            f"encoder  {shape.name}: dim {shape.dim}, depth {shape.depth}, heads {shape.heads}, "
            f"patch {shape.patch_size}, {shape.image_size} px",
            f"taken    {len(self.taken)} tensors",
            *(f"dropped  {len(names)}: {reason} ({first_of(names)})" for reason, names in self.dropped.items()),
            *(f"note     {note}" for note in self.notes),
        ]


def import_weights(settings: Import) -> Imported:
    """Writes the checkpoint's encoder to OUT/encoder.safetensors, and prints what was taken and what was dropped."""
    chosen: dict[str, Any] = {name: getattr(settings, name) for name in ("format", "encoder", "heads", "image_size")}
    path = settings.out / "encoder.safetensors"
    if not settings.overwrite:
        check_absent(path)
    imported = import_checkpoint(settings.checkpoint, **chosen)
    imported.backbone.save(path)
    print("\n".join([*imported.summary(), f"wrote    {path}"]))
    return imported


def import_checkpoint(
    path: Path,
    *,
    entries: Mapping[str, Any] | None = None,
    format: str | None = None,
    encoder: Which | None = None,
    heads: int | None = None,
    image_size: int | None = None,
) -> Imported:
    """Reads the encoder out of a checkpoint of another project.

    entries: the file's content, where `read_entries` has read it already.
    format: one of LAYOUTS; None detects it.
    encoder: "base" (the student) or "momentum" (the teacher, the moving average). None takes what the project itself
        evaluates: momentum for dino and ibot, base for the others.
    heads: shapes don't show them; None takes what the project uses for this dim, if that is known.
    image_size: pixels per side. None infers it from the position embedding; another size interpolates it.
    """
    if entries is None:
        entries, metadata = read_entries(path)
        if format is None and is_own(entries, metadata):
            raise ValueError(f"{path} was written by patchmix and needs no import: every command takes it unchanged")
    if format not in (None, *LAYOUTS):
        raise ValueError(f"format {format!r} is unknown; it must be one of {', '.join(LAYOUTS)}")
    tensors, others = tensors_of(entries)
    config = timm_config(path.parent) if format in (None, "timm") and encoder is None else {}
    cfg, which = config.get("pretrained_cfg") or config, None
    notes: list[str] = []
    try:
        format = format or ("timm" if config else detect(tensors, entries))
        if config:
            arguments = dict(config.get("model_args") or {})
            arguments |= {key: given for key, given in (("num_heads", heads), ("img_size", image_size)) if given}
            architecture, weights = timm_encoder(config["architecture"], entries, arguments)
            dropped = {"classifier": [name for name in tensors if name.rpartition("/")[2].startswith("head")]}
        elif format in ("dinov2", "dinov3"):
            if encoder or heads:
                raise ValueError(f"a released {format} backbone has one encoder; leave encoder and heads out")
            architecture, weights = _released(format, tensors, image_size)
            dropped = {"not used after pre-training": [name for name in tensors if re.fullmatch(_UNUSED, name)]}
            cfg = _SATELLITE if "sat493m" in path.name else {}
        else:
            which, names, dropped = _split(format, tensors, encoder)
            weights = _checked({inner: tensors[name] for inner, name in names.items()}, notes)
            architecture = _architecture(format, weights, heads, image_size, notes)
            if format == "timm":
                notes.append("the file does not say how its input is normalized; ImageNet's mean and std are assumed")
        architecture.check(weights, f"this is no plain ViT of dim {architecture.dim}")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    dropped = {reason: names for reason, names in {**dropped, "not weights": others}.items() if names}
    taken = [name for name in tensors if not any(name in names for names in dropped.values())]
    origin = {"format": format, "file": path.name, "encoder": which}
    origin |= {key: entries[key] for key in ("arch", "epoch") if isinstance(entries.get(key), str | int)}
    backbone = Backbone(architecture, weights, **normalization(cfg), origin=origin)
    return Imported(backbone, format, taken, dropped, notes)


def timm_config(folder: Path) -> dict[str, Any]:
    """What timm's folders for the Hugging Face Hub have next to the weights; empty if there is none, or another's."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return dict(config) if timm.is_model(config["architecture"]) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def normalization(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Mean and std of timm's description of weights; ImageNet's where it has none. Gray's is that of all of RGB."""
    found = {"mean": tuple(cfg.get("mean") or IMAGENET_MEAN), "std": tuple(cfg.get("std") or IMAGENET_STD)}
    return {name: values * 3 if len(values) == 1 else values for name, values in found.items()}


def timm_encoder(
    name: str, entries: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[Architecture, dict[str, Tensor]]:
    """The encoder in weights as timm publishes them. arguments: of `timm.create_model`, besides the name."""
    if strange := [key for key in arguments if key not in (*TIMM_ARGUMENTS, *_HARMLESS_ARGUMENTS)]:
        raise ValueError(f"model_args has {first_of(strange)}, which an encoder here does not keep")
    sizes = {ours: arguments[theirs] for theirs, ours in TIMM_ARGUMENTS.items() if theirs in arguments}
    sizes |= {key: value[0] for key, value in sizes.items() if isinstance(value, list)}  # squares
    with torch.device("meta"):
        encoder = create_encoder(name, **sizes)
    architecture, weights = Architecture.of(name, encoder), _converted(entries, encoder)
    architecture.check(weights, f"the weights do not fit {name} as timm builds it")
    return architecture, weights


def _converted(entries: Mapping[str, Any], encoder: VisionTransformer) -> dict[str, Tensor]:
    """In timm's names, from any layout that timm reads for this model; without a classifier."""
    if isinstance(encoder, eva.Eva):
        weights = eva.checkpoint_filter_fn(dict(entries), encoder)
    else:
        weights = vision_transformer.checkpoint_filter_fn(dict(entries), encoder, adapt_layer_scale=True)
    wanted = encoder.state_dict()
    kept = [name for name in weights if name in wanted or not name.startswith("head")]
    return {name: weights[name].float().contiguous() for name in kept}


def _released(
    format: str, tensors: Mapping[str, Tensor], image_size: int | None
) -> tuple[Architecture, dict[str, Tensor]]:
    """A released backbone of DINOv2 or DINOv3 in timm's names, as the timm model that it fits."""
    if not {"patch_embed.proj.weight", "blocks.0.norm1.weight"} <= tensors.keys():
        raise ValueError(f"not of format {format}: it holds {first_of(list(tensors)) or 'nothing'}, but no encoder")
    given = {name: tensor.detach().float() for name, tensor in tensors.items()}
    depth = 1 + max(int(name.split(".")[1]) for name in given if name.startswith("blocks."))
    dim, extra = given["patch_embed.proj.weight"].shape[0], given.get("register_tokens", given.get("storage_tokens"))
    size = next((size for (width, _), size in _SIZES.items() if width == dim), "*")
    names, registers = f"vit_{size}*_{format}", 0 if extra is None else extra.shape[1]
    if format == "dinov3":  # some of its models have biases of queries and values, in others they are zero
        biases = [name for name in given if name.endswith("qkv.bias")]
        if any(bool(given[name].any()) for name in biases):
            names += "_qkvb"
        else:
            given = {name: tensor for name, tensor in given.items() if name not in biases}
    for name in timm.list_models(names):
        with torch.device("meta"):
            encoder = create_encoder(name, image_size=image_size)
        if (encoder.embed_dim, len(encoder.blocks), encoder.num_prefix_tokens - 1) != (dim, depth, registers):
            continue
        weights = _converted(given, encoder)
        if {n: t.shape for n, t in weights.items()} == {n: t.shape for n, t in encoder.state_dict().items()}:
            return Architecture.of(name, encoder), weights
    raise ValueError(f"no {format} model of timm has this width, depth and MLP; import it through timm:NAME")


def is_own(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> bool:
    """Whether patchmix wrote this file: encoder.safetensors, or a run's checkpoint."""
    return "patchmix" in metadata or all(isinstance(entries.get(key), Mapping) for key in ("method", "config"))


def _split(
    format: str, tensors: Mapping[str, Any], encoder: Which | None
) -> tuple[str, dict[str, str], dict[str, list[str]]]:
    """Which encoder is taken, the checkpoint's names of its tensors by timm name, and the other names by reason."""
    layout = LAYOUTS[format]
    encoders: dict[str, dict[str, str]] = {}
    dropped: dict[str, list[str]] = {}
    unknown: list[str] = []
    for name, value in tensors.items():
        which, inner = layout.split(name)
        reasons = [what for pattern, what in layout.extras.items() if re.fullmatch(pattern, inner)]
        if which and isinstance(value, Tensor) and ENCODER_TENSOR.fullmatch(inner):
            if encoders.setdefault(which, {}).setdefault(inner, name) != name:
                raise ValueError(f"{name} and {encoders[which][inner]} are both {inner}; remove one of them")
        elif reasons:
            dropped.setdefault(reasons[0], []).append(name)
        else:
            unknown.append(name)
    if not encoders:
        raise ValueError(f"not of format {format}: it holds {first_of(list(tensors)) or 'nothing'}, but no encoder")
    chosen = encoder or (layout.default if layout.default in encoders or "one" not in encoders else "one")
    if chosen not in encoders and list(encoders) == ["one"]:
        raise ValueError(f"no {chosen} encoder: it holds a single encoder; leave encoder out")
    if chosen not in encoders:
        other = min(encoders)
        raise ValueError(f"no {chosen} encoder: it holds only the {other} encoder; use encoder {other!r}")
    if any(name.endswith("fc_norm.weight") for name in unknown):
        raise ValueError(
            "this encoder was fine-tuned with mean pooling: it has fc_norm instead of norm, so no normalized tokens; "
            "import the pre-training checkpoint instead"
        )
    if any("patch_embed.proj." in name for name in unknown):
        raise ValueError("a convolutional stem (patch_embed.proj.0, …); encoders here embed patches directly")
    if unknown:
        raise ValueError(
            f"{len(unknown)} names are neither of a plain ViT nor known extras of format {format}: "
            f"{first_of(unknown)}; it is another architecture, or another format"
        )
    dropped |= {f"the {which} encoder": list(names.values()) for which, names in encoders.items() if which != chosen}
    return chosen, encoders[chosen], dropped


def _checked(weights: dict[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """float32, finite, with a position for the class token."""
    for name in ("patch_embed.proj.weight", "pos_embed", "cls_token"):
        if name not in weights:
            raise ValueError(f"there is no {name}; an encoder needs patches, their positions and a class token")
    if kinds := sorted({str(t.dtype)[6:] for t in weights.values() if t.dtype != torch.float32}):
        if any(not tensor.is_floating_point() for tensor in weights.values()):
            raise ValueError(f"it holds {', '.join(kinds)} weights; expected floating-point ones (not quantized)")
        notes.append(f"{', '.join(kinds)} weights were converted to float32")
    weights = {name: tensor.detach().float().contiguous() for name, tensor in weights.items()}
    kernel, positions = weights["patch_embed.proj.weight"], weights["pos_embed"]
    if kernel.ndim != 4 or kernel.shape[2] != kernel.shape[3]:
        raise ValueError(f"patch_embed.proj.weight is {tuple(kernel.shape)}; expected (dim, channels, P, P)")
    if positions.ndim != 3 or positions.shape[0] != 1 or positions.shape[2] != kernel.shape[0]:
        raise ValueError(f"pos_embed is {tuple(positions.shape)}; expected (1, tokens, {kernel.shape[0]})")
    tokens = positions.shape[1]
    if math.isqrt(tokens) ** 2 == tokens and tokens > 1:  # patches only: the class token has no position, i.e. zero
        weights["pos_embed"] = torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)
        notes.append("pos_embed had no entry for the class token; zero is added, which computes the same")
    elif tokens == 0 or math.isqrt(tokens - 1) ** 2 != tokens - 1:
        raise ValueError(f"pos_embed has {tokens} entries, which is not a square grid with a class token")
    return weights


def _architecture(
    format: str, weights: dict[str, Tensor], heads: int | None, image_size: int | None, notes: list[str]
) -> Architecture:
    """As the shapes show it. The position embedding in `weights` is interpolated to `image_size`."""
    dim, in_chans, patch, _ = weights["patch_embed.proj.weight"].shape
    depth = 1 + max((int(name.split(".")[1]) for name in weights if name.startswith("blocks.")), default=-1)
    if depth == 0:
        raise ValueError("no transformer blocks (blocks.0, …); it is not a ViT")
    known = LAYOUTS[format].heads
    usual = known.get(dim)
    if heads is None:
        if usual is None:
            raise ValueError(
                f"dim {dim} is none of {format}'s models ({', '.join(map(str, known))}), and shapes do not show the "
                "number of attention heads; give heads (--heads)"
            )
        heads = usual
        notes.append(f"{heads} heads, as {format} uses for dim {dim}; shapes do not show them")
    elif usual not in (None, heads):
        notes.append(f"{heads} heads as given; {format} itself uses {usual} for dim {dim}")
    if heads < 1 or dim % heads:
        raise ValueError(f"heads is {heads}; it must divide the encoder's dim {dim}")
    pixels = patch * math.isqrt(weights["pos_embed"].shape[1] - 1)
    if image_size not in (None, pixels):
        if image_size < 1 or image_size % patch:
            raise ValueError(f"image size {image_size} is not a multiple of the patch size {patch}")
        notes.append(f"pos_embed was interpolated from {pixels} to {image_size} px")
        weights["pos_embed"] = resample_abs_pos_embed(weights["pos_embed"], [image_size // patch] * 2)
        pixels = image_size
    return Architecture(_timm_name(dim, depth, patch, pixels), pixels, patch, in_chans, dim, depth, heads)


def _timm_name(dim: int, depth: int, patch: int, pixels: int) -> str:
    """The usual name of this size, or of the nearest one; the architecture's numbers decide."""
    size = _SIZES.get((dim, depth)) or _SIZES[min(_SIZES, key=lambda known: abs(known[0] - dim))]
    name = f"vit_{size}_patch{patch}_{pixels}"
    fallback = {"large": "vit_large_patch16_224", "huge": "vit_huge_patch14_224"}
    return name if size not in fallback or timm.is_model(name) else fallback[size]


# Plain data that the training scripts of DINO, iBOT and MAE put next to the weights: their arguments, and learning
# rates that are NumPy numbers (stored under the old and the new name of NumPy's core).
_scalar = np.float64(0).__reduce__()[0]
_HARMLESS: list[Any] = [
    argparse.Namespace,
    np.dtype,
    *(type(np.dtype(name)) for name in ("float64", "float32", "int64")),
    (_scalar, "numpy.core.multiarray.scalar"),
    (_scalar, "numpy._core.multiarray.scalar"),
]


def read_entries(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The top level of a .safetensors, .pth, .pt, .bin or .tar checkpoint, and its safetensors metadata.

    The first bytes tell the kind of file, not its name. A file that can't be read without running code: ValueError.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the checkpoint file in it")
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; give the path of a checkpoint file") from None
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error
    if not start:
        raise ValueError(f"{path} is empty (0 bytes); download or copy it again")
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
    if start[8:9] == b"{":
        try:
            with safe_open(path, framework="pt") as weights:
                return {name: weights.get_tensor(name) for name in weights.keys()}, weights.metadata() or {}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} can't be read as safetensors ({_one_line(error)}); is it complete?") from error
    if start[:4] == b"PK\x03\x04" or start[:1] == b"\x80":
        return _read_torch(path), {}
    is_text = start[:256].isascii() and (start[:256].decode("ascii").isprintable() or b"\n" in start)
    seen = "text" if is_text else f"bytes {start[:4].hex(' ')}"
    raise ValueError(f"{path} is not a checkpoint: it begins with {seen}; expected a safetensors or a torch file")


def _read_torch(path: Path) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals(_HARMLESS):
            entries = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if code := re.search(r"GLOBAL (\S+)", str(error)):
            raise ValueError(
                f"{path} needs code to be unpickled ({code[1]}), which could do anything to this machine; where you "
                "trust it, store its tensors alone: torch.save(torch.load(OLD, weights_only=False)['state_dict'], NEW)"
            ) from error
        raise ValueError(f"{path} can't be unpickled; is it complete, and a torch file?") from error
    except Exception as error:  # damaged files raise nearly anything
        raise ValueError(f"{path} can't be read as a torch file ({_one_line(error)}); is it complete?") from error
    if not isinstance(entries, dict):
        raise ValueError(f"{path} holds a {type(entries).__name__}; expected a dictionary of tensors")
    if not entries:
        raise ValueError(f"{path} holds an empty dictionary; expected the tensors of a ViT")
    return {str(name): value for name, value in entries.items()}


def _one_line(error: Exception) -> str:
    """The first sentence: torch's messages continue with stack traces and advice."""
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0].split(". ")[0][:160]
