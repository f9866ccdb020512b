"""What timm and torchvision call the same tensors of a ViT. Both stack queries, keys and values in one matrix."""

from __future__ import annotations

import re

_LAYER = "encoder.layers.encoder_layer_"
_SAME = {  # timm: torchvision, before .weight and .bias
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
_BACK = {theirs: ours for ours, theirs in _SAME.items()} | {
    f"{_LAYER}#.mlp.linear_1.": "blocks.#.mlp.fc1.",  # as in torchvision's published files
    f"{_LAYER}#.mlp.linear_2.": "blocks.#.mlp.fc2.",
}


def to_torchvision(name: str) -> str:
    """timm's name of an encoder tensor → torchvision's; a name that is no encoder tensor comes back as it is."""
    return _renamed(name, _SAME)


def from_torchvision(name: str) -> str:
    """The inverse of `to_torchvision`."""
    return _renamed(name, _BACK)


def _renamed(name: str, table: dict[str, str]) -> str:
    for old, new in table.items():
        if found := re.match(re.escape(old).replace(r"\#", r"(?P<layer>\d+)"), name):
            return new.replace("#", found.groupdict().get("layer", "")) + name[found.end() :]
    return name
