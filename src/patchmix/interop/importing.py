"""Checkpoints of other projects → EncoderFile. No name is skipped silently: it is taken, or dropped and listed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor

from patchmix.interop.encoder_file import IMAGENET_MEAN, IMAGENET_STD, Architecture, EncoderFile
from patchmix.interop.layouts import ENCODER_TENSOR, LAYOUTS, Layout, Which, detect, tensors_of
from patchmix.interop.reading import read_entries
from patchmix.interop.run_checkpoint import is_run_checkpoint, split_run_checkpoint

FORMATS = (*LAYOUTS, "patchmix")

_SIZES = {(192, 12): "tiny", (384, 12): "small", (768, 12): "base", (1024, 24): "large", (1280, 32): "huge"}


@dataclass(frozen=True)
class Imported:
    """An encoder from elsewhere, and the account of what became of each name in its checkpoint.

    `dropped_because` groups the dropped names by the reason; `notes` says what had to be assumed or converted.
    """

    file: EncoderFile
    format: str
    taken: list[str]
    dropped_because: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def dropped(self) -> list[str]:
        return [name for names in self.dropped_because.values() for name in names]

    def summary(self) -> list[str]:
        """Lines to print: what came in, what stayed out and why, what was assumed."""
        shape = self.file.architecture
        lines = [
            f"format   {self.format}",
            f"encoder  {shape.name}: dim {shape.dim}, depth {shape.depth}, heads {shape.heads}, "
            f"patch {shape.patch_size}, {shape.image_size} px",
            f"taken    {len(self.taken)} tensors",
        ]
        for reason, names in self.dropped_because.items():
            shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            lines.append(f"dropped  {len(names)}: {reason} ({shown})")
        return lines + [f"note     {note}" for note in self.notes]


def import_checkpoint(
    path: Path,
    *,
    format: str | None = None,
    encoder: Which | None = None,
    heads: int | None = None,
    image_size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Imported:
    """Reads the encoder out of a checkpoint of another project, or out of one of our own.

    format: one of `FORMATS` (patchmix-authors, mocov3, dino, ibot, mae, timm, torchvision, patchmix); None detects it.
    encoder: "base" (the student) or "momentum" (the teacher, the moving average). None takes what the project itself
        evaluates: momentum for dino and ibot, base for the others.
    heads: attention heads. Shapes don't show them; None takes what the project uses for this dim, if that is known.
    image_size: pixels per side. None infers it from the position embedding; another size interpolates it.
    mean, std: the normalisation of the input; None takes the file's own if it says, else ImageNet's.
    A mistake, an unreadable file, NaN weights or a name that is neither encoder nor a known extra: ValueError.
    """
    if format is not None and format not in FORMATS:
        raise ValueError(f"format {format!r} is unknown; it must be one of {', '.join(FORMATS)}")
    if encoder not in (None, "base", "momentum"):
        raise ValueError(f"encoder {encoder!r} is unknown; it must be base or momentum")
    path = Path(path)
    entries, metadata = read_entries(path)
    if format in (None, "patchmix"):
        if "patchmix" in metadata:
            return _own_file(path, encoder=encoder, heads=heads, image_size=image_size, mean=mean, std=std)
        if is_run_checkpoint(entries):
            file, taken, dropped = split_run_checkpoint(path, entries, encoder)
            _check_finite(path, file.weights)
            imported = Imported(file, "patchmix", taken, dropped)
            return _adjusted(path, imported, heads=heads, image_size=image_size, mean=mean, std=std)
        if format == "patchmix":
            raise ValueError(f"{path} is no file of ours: neither encoder.safetensors nor a run's checkpoint")

    tensors, others = tensors_of(entries)
    try:
        format = format or detect(tensors, entries)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    layout = LAYOUTS[format]
    which, parts = _choose(path, format, layout, tensors, encoder)
    weights, taken, dropped = _sort_out(path, format, layout, tensors, which, parts)
    if others:
        dropped["not weights"] = others
    notes: list[str] = []
    weights = _checked(path, weights, notes)
    config = _timm_config(path) if format == "timm" else {}
    architecture = _architecture(path, format, layout, weights, heads, config, notes)
    if problems := architecture.mismatches(weights):
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise ValueError(f"{path} is no plain ViT of dim {architecture.dim}: {problems[0]}{more}")
    if format == "timm" and not config and mean is None:
        notes.append("the file does not say how its input is normalised; ImageNet's mean and std are assumed")
    origin = {"format": format, "file": path.name, "encoder": which}
    origin |= {key: entries[key] for key in ("arch", "epoch") if isinstance(entries.get(key), str | int)}
    file = EncoderFile(
        architecture,
        weights,
        mean=tuple(config.get("mean") or IMAGENET_MEAN),
        std=tuple(config.get("std") or IMAGENET_STD),
        origin=origin,
    )
    imported = Imported(file, format, taken, dropped, notes)
    return _adjusted(path, imported, heads=None, image_size=image_size, mean=mean, std=std)


# ------------------------------------------------------------------------------------------- which names, and whose


def _choose(
    path: Path, format: str, layout: Layout, tensors: Mapping[str, Any], encoder: Which | None
) -> tuple[str, dict[str, tuple[str | None, str]]]:
    """The encoder to take, and for each name whose it is and what it is called there."""
    parts: dict[str, tuple[str | None, str]] = {name: layout.split(name) for name in tensors}
    present = {whose for whose, name in parts.values() if whose and ENCODER_TENSOR.fullmatch(name)}
    if not present:
        names = ", ".join(list(tensors)[:3])
        raise ValueError(
            f"{path} is not of format {format}: no encoder is where it should be, but {names or 'nothing'}"
        )
    if encoder is None:
        wanted = layout.default if layout.default in present or "one" not in present else "one"
    else:
        wanted = encoder
    if wanted not in present:
        there = "a single encoder" if present == {"one"} else f"only the {' and '.join(sorted(present))} encoder"
        remedy = "leave encoder out" if present == {"one"} else f"ask for encoder {sorted(present)[0]!r}"
        raise ValueError(f"{path} has no {wanted} encoder: it holds {there}; {remedy}")
    return wanted, parts


def _sort_out(
    path: Path,
    format: str,
    layout: Layout,
    tensors: Mapping[str, Any],
    which: str,
    parts: Mapping[str, tuple[str | None, str]],
) -> tuple[dict[str, Tensor], list[str], dict[str, list[str]]]:
    """The encoder's weights by timm name, the names taken, and the names dropped by reason."""
    weights: dict[str, Tensor] = {}
    taken: list[str] = []
    dropped: dict[str, list[str]] = {}
    unknown: list[str] = []
    for name, value in tensors.items():
        whose, inner = parts[name]
        if whose and isinstance(value, Tensor) and ENCODER_TENSOR.fullmatch(inner):
            if whose == which:
                weights[inner] = value
                taken.append(name)
            else:
                dropped.setdefault(f"the {whose} encoder", []).append(name)
        elif reason := layout.extra(inner) or layout.extra(name):
            dropped.setdefault(reason, []).append(name)
        else:
            unknown.append(name)
    if any(name.endswith("fc_norm.weight") for name in unknown):
        raise ValueError(
            f"{path} was fine-tuned with mean pooling: fc_norm stands for norm, so it has no normalised tokens; "
            "import the pre-training checkpoint instead"
        )
    if any("patch_embed.proj." in name for name in unknown):
        raise ValueError(
            f"{path} has a convolutional stem (patch_embed.proj.0, …); encoders here embed patches directly"
        )
    if unknown:
        shown = ", ".join(unknown[:3]) + (", …" if len(unknown) > 3 else "")
        raise ValueError(
            f"{path}: {len(unknown)} names are neither of a plain ViT nor known extras of format {format}: {shown}; "
            "it is another architecture, or another format"
        )
    return weights, taken, dropped


# ------------------------------------------------------------------------------------------------- values and shapes


def _checked(path: Path, weights: dict[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """float32, finite, with a position for the class token."""
    for name in ("patch_embed.proj.weight", "pos_embed", "cls_token"):
        if name not in weights:
            raise ValueError(f"{path} has no {name}; an encoder needs patches, their positions and a class token")
    if kinds := sorted({str(t.dtype)[6:] for t in weights.values() if t.dtype != torch.float32}):
        if any(not tensor.is_floating_point() for tensor in weights.values()):
            raise ValueError(f"{path} holds {', '.join(kinds)} weights; expected floating-point ones (not quantised)")
        notes.append(f"{', '.join(kinds)} weights were converted to float32")
    weights = {name: tensor.detach().float().contiguous() for name, tensor in weights.items()}
    _check_finite(path, weights)
    kernel, positions = weights["patch_embed.proj.weight"], weights["pos_embed"]
    if kernel.ndim != 4 or kernel.shape[2] != kernel.shape[3]:
        raise ValueError(f"{path}: patch_embed.proj.weight is {tuple(kernel.shape)}; expected (dim, channels, P, P)")
    if positions.ndim != 3 or positions.shape[0] != 1 or positions.shape[2] != kernel.shape[0]:
        raise ValueError(f"{path}: pos_embed is {tuple(positions.shape)}; expected (1, tokens, {kernel.shape[0]})")
    tokens = positions.shape[1]
    if math.isqrt(tokens) ** 2 == tokens and tokens > 1:  # patches only: the class token has no position, i.e. zero
        weights["pos_embed"] = torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)
        notes.append("pos_embed had no entry for the class token; zero is added, which computes the same")
    elif math.isqrt(tokens - 1) ** 2 != tokens - 1:
        raise ValueError(f"{path}: pos_embed has {tokens} entries, which is no square grid with a class token")
    return weights


def _check_finite(path: Path, weights: Mapping[str, Tensor]) -> None:
    broken = [name for name, tensor in weights.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise ValueError(f"{path} has NaN or infinite weights in {broken[0]}{more}; take an earlier checkpoint")


def _architecture(
    path: Path,
    format: str,
    layout: Layout,
    weights: Mapping[str, Tensor],
    heads: int | None,
    config: Mapping[str, Any],
    notes: list[str],
) -> Architecture:
    dim, in_chans, patch, _ = weights["patch_embed.proj.weight"].shape
    depth = 1 + max((int(name.split(".")[1]) for name in weights if name.startswith("blocks.")), default=-1)
    if depth == 0:
        raise ValueError(f"{path} has no transformer blocks (blocks.0, …); it is no ViT")
    usual = config.get("heads") or layout.heads.get(dim)
    if heads is None:
        if usual is None:
            raise ValueError(
                f"{path}: dim {dim} is none of {format}'s models ({', '.join(map(str, layout.heads))}), and shapes do "
                "not show the number of attention heads; give heads (--heads)"
            )
        heads = usual
        if not config.get("heads"):
            notes.append(f"{heads} heads, as {format} uses for dim {dim}; shapes do not show them")
    elif usual not in (None, heads):
        notes.append(f"{heads} heads as given; {format} itself uses {usual} for dim {dim}")
    _check_heads(path, dim, heads)
    pixels = patch * math.isqrt(weights["pos_embed"].shape[1] - 1)
    return Architecture(
        name=_timm_name(dim, depth, patch, pixels),
        image_size=pixels,
        patch_size=patch,
        in_chans=in_chans,
        dim=dim,
        depth=depth,
        heads=heads,
    )


def _check_heads(path: Path, dim: int, heads: int) -> None:
    if heads < 1 or dim % heads:
        raise ValueError(f"{path}: heads is {heads}; it must divide the encoder's dim {dim}")


def _timm_name(dim: int, depth: int, patch: int, pixels: int) -> str:
    """The usual name of this size, or of the nearest one; the architecture's numbers have the last word."""
    size = _SIZES.get((dim, depth)) or _SIZES[min(_SIZES, key=lambda known: abs(known[0] - dim))]
    if size in ("tiny", "small", "base"):
        return f"vit_{size}_patch{patch}_{pixels}"
    name = f"vit_{size}_patch{patch}_{pixels}"
    fallback = {"large": "vit_large_patch16_224", "huge": "vit_huge_patch14_224"}
    return name if timm.is_model(name) else fallback[size]


def _timm_config(path: Path) -> dict[str, Any]:
    """Heads, mean and std from the config.json that timm's Hugging Face folders have beside the weights."""
    config = path.parent / "config.json"
    try:
        said = json.loads(config.read_text())
        name, arguments = said["architecture"], said.get("model_args", {})
        if not timm.is_model(name):
            return {}
        with torch.device("meta"):
            shell: Any = timm.create_model(name, num_classes=0, **arguments)
        cfg = said.get("pretrained_cfg", said)
        return {"heads": shell.blocks[0].attn.num_heads, "mean": cfg.get("mean"), "std": cfg.get("std")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # another tool's config.json


# ------------------------------------------------------------------------------------------------ what the user asks


def _own_file(path: Path, *, encoder: Which | None, **asked: Any) -> Imported:
    file = EncoderFile.load(path)
    kept = file.origin.get("encoder", "base")
    if encoder not in (None, kept):
        raise ValueError(f"{path} holds the {kept} encoder alone; for the {encoder} one, give the original checkpoint")
    _check_finite(path, file.weights)
    return _adjusted(path, Imported(file, "patchmix", list(file.weights)), **asked)


def _adjusted(
    path: Path,
    imported: Imported,
    *,
    heads: int | None,
    image_size: int | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> Imported:
    """`imported` with the image size and normalisation that were asked for."""
    file, notes = imported.file, list(imported.notes)
    shape, weights = file.architecture, dict(file.weights)
    if heads is not None and heads != shape.heads:
        raise ValueError(f"{path} says itself that it has {shape.heads} heads; leave heads={heads} out")
    if image_size is not None and image_size != shape.image_size:
        if image_size < 1 or image_size % shape.patch_size:
            raise ValueError(f"{path}: image size {image_size} is not a multiple of its patch size {shape.patch_size}")
        side, patches = image_size // shape.patch_size, (shape.image_size // shape.patch_size) ** 2
        extra = weights["pos_embed"].shape[1] - patches  # class token and registers have no place in the image
        weights["pos_embed"] = resample_abs_pos_embed(weights["pos_embed"], [side, side], num_prefix_tokens=extra)
        notes.append(f"pos_embed was interpolated from {shape.image_size} to {image_size} px")
        values = vars(shape) | {"image_size": image_size}
        if shape.name == _timm_name(shape.dim, shape.depth, shape.patch_size, shape.image_size):
            values["name"] = _timm_name(shape.dim, shape.depth, shape.patch_size, image_size)
        shape = Architecture(**values)
    for name, given in (("mean", mean), ("std", std)):
        if given is not None and len(given) != 3:
            raise ValueError(f"{name} has {len(given)} values; give three, for red, green and blue")
    file = EncoderFile(
        shape,
        weights,
        mean=file.mean if mean is None else tuple(mean),
        std=file.std if std is None else tuple(std),
        origin=file.origin,
    )
    return Imported(file, imported.format, imported.taken, imported.dropped_because, notes)
