"""How other projects name the parts of their checkpoints, and how to tell whose checkpoint it is.

Names are those of the checkpoint, with the entry that holds them in front: `teacher/backbone.cls_token`. Facts from
the projects' training scripts:

MoCo v3           state_dict/module.{base_encoder,momentum_encoder}.…, head and predictor are MLPs, `arch: vit_small`;
                  the position embedding is a fixed sin-cos table whose first half is the row; ViT-S has 12 heads.
                  Its linear-probing checkpoints are state_dict/module.… with the trained classifier `head`.
PatchMix authors  the names of MoCo v3, `arch: vit-small`, a learned position embedding; ViT-S has 12 heads too.
DINOv2, DINOv3    bare names of released backbones, with LayerScale `ls1.gamma`; `register_tokens` or `storage_tokens`,
                  rotary positions `rope_embed` in DINOv3. timm converts them.
DINO              student/module.backbone.…, teacher/backbone.…, and `head.…` on both; released backbones are bare.
iBOT              as DINO, with `masked_embed` in the student; extracted backbones are state_dict/….
MAE               model/…, `decoder_…` and `mask_token` besides the encoder in full checkpoints; the fixed sin-cos table
                  has the column first. Fine-tuned ones have `fc_norm` in the place of `norm`.
torchvision       names of its own (`conv_proj`, `encoder.layers.encoder_layer_0`), classifier `heads.head`.
timm              bare names, or state_dict/… and state_dict_ema/… from its training script, model/… from DeiT's.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed
from torch import Tensor

Which = Literal["base", "momentum"]

_WRAPPED = r"(?:module\.|_orig_mod\.)*"  # DistributedDataParallel, torch.compile
_USUAL_HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 16}

ENCODER_TENSOR = re.compile(
    r"cls_token|pos_embed|patch_embed\.proj\.(weight|bias)|norm\.(weight|bias)"
    r"|blocks\.\d+\.(norm1|norm2|attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)\.(weight|bias)"
)


# What timm and torchvision call the same tensors, before .weight and .bias; both stack queries, keys and values.
_LAYER = "encoder.layers.encoder_layer_"
TO_TORCHVISION = {
    "patch_embed.proj.": "conv_proj.",
    "norm.": "encoder.ln.",
    "blocks.#.norm1.": f"{_LAYER}#.ln_1.",
    "blocks.#.norm2.": f"{_LAYER}#.ln_2.",
    "blocks.#.attn.qkv.": f"{_LAYER}#.self_attention.in_proj_",
    "blocks.#.attn.proj.": f"{_LAYER}#.self_attention.out_proj.",
    "blocks.#.mlp.fc1.": f"{_LAYER}#.mlp.0.",
    "blocks.#.mlp.fc2.": f"{_LAYER}#.mlp.3.",  # 1 and 2 are GELU and dropout
    "cls_token": "class_token",
    "pos_embed": "encoder.pos_embedding",
}
FROM_TORCHVISION = {theirs: ours for ours, theirs in TO_TORCHVISION.items()} | {
    f"{_LAYER}#.mlp.linear_1.": "blocks.#.mlp.fc1.",  # as in torchvision's published files
    f"{_LAYER}#.mlp.linear_2.": "blocks.#.mlp.fc2.",
}


def rename(name: str, table: Mapping[str, str]) -> str:
    """The name of an encoder tensor by a table with # for the layer; names that the table does not have stay."""
    for old, new in table.items():
        if match := re.match(re.escape(old).replace(r"\#", r"(?P<layer>\d+)"), name):
            return new.replace("#", match.groupdict().get("layer", "")) + name[match.end() :]
    return name


@dataclass(frozen=True)
class Layout:
    """What a project's checkpoints hold.

    places: what precedes a tensor's timm name (a regular expression, without wrappers), and which encoder that is:
        base, momentum, or one, if a file holds a single one.
    extras: regular expressions of the names that are no encoder weights, and what they are.
    heads: of the project's models, by dim. to_timm: see `rename`.
    """

    places: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[int, int] = field(default_factory=lambda: _USUAL_HEADS)
    default: Which = "base"
    to_timm: Mapping[str, str] = field(default_factory=dict)

    def split(self, name: str) -> tuple[str | None, str]:
        """The encoder that the tensor belongs to ("base", "momentum", "one" or None), and its name there."""
        name = re.sub(rf"(^|/){_WRAPPED}", r"\1", name)
        for place, which in self.places.items():
            if match := re.fullmatch(rf"(?:{place})(?P<inner>[^/]*)", name):
                return which, rename(match["inner"], self.to_timm)
        return None, name


_MOCO = {r"(state_dict/)?base_encoder\.": "base", r"(state_dict/)?momentum_encoder\.": "momentum"}
_DINO = {r"student/(backbone\.)?": "base", r"teacher/(backbone\.)?": "momentum", r"(state_dict/)?(backbone\.)?": "one"}
_TIMM = {r"(state_dict|model)/": "base", r"(state_dict|model)_ema/": "momentum", "": "one"}
_MOCO_HEADS = {r"(state_dict/)?predictor\..*": "prediction head", r"head\.\d+\..*": "projection head"}
_DINO_HEAD = {r"head\..*": "projection head"}
_CLASSIFIER = {r"(head|head_dist)\.(weight|bias)": "classifier"}
_DECODER = {r"decoder_.*": "decoder", "mask_token": "mask token"}
LAYOUTS: dict[str, Layout] = {
    "patchmix-authors": Layout(_MOCO, _MOCO_HEADS, heads={192: 3, 384: 12, 768: 12}),
    "mocov3": Layout(
        {**_MOCO, r"(state_dict/)?": "one"},
        {**_MOCO_HEADS, **_CLASSIFIER},
        heads={384: 12, 768: 12, 1024: 16, 1280: 16},
    ),
    "dino": Layout(_DINO, _DINO_HEAD, default="momentum"),
    "dinov2": Layout(),
    "dinov3": Layout(),
    "ibot": Layout(_DINO, {**_DINO_HEAD, "masked_embed": "mask token"}, default="momentum"),
    "mae": Layout({r"(model/)?": "one"}, {**_DECODER, **_CLASSIFIER}),
    "timm": Layout(_TIMM, _CLASSIFIER),
    "torchvision": Layout({r"((state_dict|model)/)?": "one"}, {r"heads\..*": "classifier"}, to_timm=FROM_TORCHVISION),
}

_CONTAINERS = {"state_dict", "model", "student", "teacher", "state_dict_ema", "model_ema"}


def tensors_of(entries: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Every tensor under its full name, and the names of the entries that are not weights (optimizer, epoch, …)."""
    tensors: dict[str, Any] = {}
    others: list[str] = []
    for name, value in entries.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif name in _CONTAINERS and isinstance(value, Mapping):
            tensors |= {f"{name}/{inner}": tensor for inner, tensor in value.items()}
        else:
            others.append(name)
    return tensors, others


def detect(tensors: Mapping[str, Any], entries: Mapping[str, Any]) -> str:
    """The name of the format; a ValueError when the tensors are of no ViT."""
    if any(re.search(r"encoder_layer_\d+\.self_attention\.in_proj_weight", name) for name in tensors):
        return "torchvision"
    if not any("patch_embed.proj" in name for name in tensors):
        seen = ", ".join(list(tensors)[:3]) or "no tensors"
        raise ValueError(f"no patch_embed.proj among {len(tensors)} tensors, so this is no ViT in timm's names: {seen}")
    if "blocks.0.ls1.gamma" in tensors and "mask_token" in tensors:
        return "dinov3" if "rope_embed.periods" in tensors else "dinov2"
    # A fixed table of positions is a signature. It matters: MoCo v3's ViT-S has 12 heads, timm's has 6.
    table = _position_table(tensors)
    if any(re.search(r"(^|[./])(base|momentum)_encoder\.", name) for name in tensors):
        return "mocov3" if table == "row" else "patchmix-authors"
    if any("masked_embed" in name or "last_layer2" in name for name in tensors) or "ibot_loss" in entries:
        return "ibot"
    if any(re.match(rf"(student/|teacher/|(state_dict/)?{_WRAPPED}backbone\.)", name) for name in tensors):
        return "dino"
    if any(re.search(r"(^|[./])decoder_(embed|blocks)\.", name) for name in tensors):
        return "mae"
    return {"row": "mocov3", "column": "mae", None: "timm"}[table]


def _position_table(tensors: Mapping[str, Any]) -> Literal["row", "column"] | None:
    """Whether the position embedding is the fixed 2-D sin-cos table, and which coordinate its first half encodes."""
    name = next((n for n in tensors if re.split(r"[./]", n)[-1] == "pos_embed" and "decoder" not in n), None)
    if name is None or not isinstance(tensors[name], Tensor) or tensors[name].ndim != 3:
        return None
    positions = tensors[name][0].float()
    side, dim = round((len(positions) - 1) ** 0.5), positions.shape[1]
    if side < 2 or side**2 != len(positions) - 1 or dim % 4:
        return None
    table = build_sincos2d_pos_embed([side, side], dim, interleave_sin_cos=True)  # (side², dim): row, then column
    if torch.allclose(positions[1:], table, atol=1e-2):  # half precision stays below
        return "row"
    return "column" if torch.allclose(positions[1:], table.roll(dim // 2, dims=1), atol=1e-2) else None
