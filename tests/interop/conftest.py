"""Checkpoints as other projects write them, built from their layouts with small models."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from patchmix.interop.backbone import Architecture, Backbone

State = dict[str, Tensor]


def random_vit(*, dim: int = 384, depth: int = 1, patch: int = 16, pixels: int = 32) -> State:
    """A timm state dict with no two entries alike, so that a mix-up shows."""
    shape = Architecture("vit_small_patch16_224", pixels, patch, 3, dim, depth, 3)
    return {name: 0.1 * torch.randn_like(tensor) for name, tensor in shape.create().state_dict().items()}


def position_table(side: int, dim: int, *, row_first: bool) -> Tensor:
    """(1, 1 + side², dim), number by number: zeros for the class token, then sines and cosines of the coordinates."""
    table = [[0.0] * dim]
    quarter = dim // 4
    for row in range(side):
        for column in range(side):
            first, second = (row, column) if row_first else (column, row)
            angles = [[at / 10000 ** (i / quarter) for i in range(quarter)] for at in (first, second)]
            table.append([wave(a) for half in angles for wave in (math.sin, math.cos) for a in half])
    return torch.tensor(table)[None]


def mlp_head(prefix: str, layers: int) -> State:
    """MoCo v3's heads: linear without bias, batch norm, ReLU; the last batch norm without scale and shift."""
    out: State = {}
    for layer in range(layers):
        out[f"{prefix}.{3 * layer}.weight"] = torch.randn(4, 4)
        if layer < layers - 1:
            out |= {f"{prefix}.{3 * layer + 1}.{name}": torch.randn(4) for name in ("weight", "bias")}
        out |= {f"{prefix}.{3 * layer + 1}.running_{name}": torch.rand(4) for name in ("mean", "var")}
        out[f"{prefix}.{3 * layer + 1}.num_batches_tracked"] = torch.tensor(7)
    return out


def dino_head(*, patches: bool) -> State:
    names = [f"mlp.{i}.{part}" for i in (0, 2, 4) for part in ("weight", "bias")]
    names += [f"last_layer.weight_{part}" for part in "gv"]
    if patches:
        names += [f"last_layer2.weight_{part}" for part in "gv"]
    return {f"head.{name}": torch.randn(3, 3) for name in names}


def under(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


@dataclass
class Foreign:
    """A checkpoint, what it is, and the encoders that must come out of it. `heads` is for dim 384."""

    format: str
    checkpoint: dict[str, Any]
    encoders: dict[str | None, State]  # None: what comes without asking
    heads: int


def _contrastive(format: str, *, wrapped: bool) -> Foreign:
    base, momentum = random_vit(), random_vit()
    if format == "mocov3":
        base["pos_embed"] = momentum["pos_embed"] = position_table(2, 384, row_first=True)
    state = under("base_encoder.", base | mlp_head("head", 3))
    state |= under("momentum_encoder.", momentum | mlp_head("head", 3)) | mlp_head("predictor", 2)
    checkpoint = {
        "epoch": 300,
        "arch": {"mocov3": "vit_small", "patchmix-authors": "vit-small"}[format],
        "state_dict": under("module." if wrapped else "", state),
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "scaler": {"scale": 2.0},
    }
    return Foreign(format, checkpoint, {None: base, "base": base, "momentum": momentum}, 12)


def _self_distilled(format: str) -> Foreign:
    student, teacher = random_vit(), random_vit()
    ibot = format == "ibot"
    extra = {"masked_embed": torch.randn(1, 384)} if ibot else {}
    head = dino_head(patches=ibot)
    checkpoint = {
        "student": under("module.", under("backbone.", student | extra) | head),
        "teacher": under("backbone.", teacher) | head,
        "optimizer": {"param_groups": [{"lr": np.float64(1e-3)}]},
        "epoch": 100,
        "args": argparse.Namespace(arch="vit_small", patch_size=16),
        f"{format}_loss": {"center": torch.zeros(1, 3)},
    }
    return Foreign(format, checkpoint, {None: teacher, "base": student, "momentum": teacher}, 6)


def _mae(*, full: bool) -> Foreign:
    encoder = random_vit()
    encoder["pos_embed"] = position_table(2, 384, row_first=False)
    names = ["embed.weight", "embed.bias", "pos_embed", "blocks.0.attn.qkv.weight", "norm.weight", "pred.bias"]
    decoder = {f"decoder_{name}": torch.randn(5) for name in names} | {"mask_token": torch.randn(1, 1, 5)}
    checkpoint: dict[str, Any] = {"model": encoder | (decoder if full else {})}
    if full:
        checkpoint |= {"epoch": 799, "args": argparse.Namespace(model="mae_vit_base_patch16"), "scaler": {}}
    return Foreign("mae", checkpoint, {None: encoder}, 6)


def _one(format: str, wrap: str) -> Foreign:
    encoder = random_vit()
    classifier = {"head.weight": torch.randn(10, 384), "head.bias": torch.randn(10)}
    if wrap == "mocov3-linear":
        encoder["pos_embed"] = position_table(2, 384, row_first=True)
        state = under("module.", encoder | classifier)
        return Foreign("mocov3", {"state_dict": state, "arch": "vit_small", "best_acc1": 73.2}, {None: encoder}, 12)
    if wrap == "timm-training":
        average = random_vit()
        checkpoint = {"state_dict": encoder | classifier, "state_dict_ema": average | classifier, "arch": "deit_small"}
        return Foreign("timm", checkpoint, {None: encoder, "base": encoder, "momentum": average}, 6)
    if wrap == "ibot-extracted":
        checkpoint = {"state_dict": encoder | {"masked_embed": torch.randn(1, 384)}}
        return Foreign("ibot", checkpoint, {None: encoder}, 6)
    return Foreign(format, encoder | classifier, {None: encoder}, 6)


FOREIGN = {
    "mocov3": lambda: _contrastive("mocov3", wrapped=True),
    "mocov3-linear": lambda: _one("mocov3", "mocov3-linear"),
    "authors": lambda: _contrastive("patchmix-authors", wrapped=False),
    "authors-module": lambda: _contrastive("patchmix-authors", wrapped=True),
    "dino": lambda: _self_distilled("dino"),
    "ibot": lambda: _self_distilled("ibot"),
    "ibot-extracted": lambda: _one("ibot", "ibot-extracted"),
    "mae-full": lambda: _mae(full=True),
    "mae-encoder": lambda: _mae(full=False),
    "timm": lambda: _one("timm", ""),
    "timm-training": lambda: _one("timm", "timm-training"),
}


@pytest.fixture(params=FOREIGN)
def foreign(request: pytest.FixtureRequest) -> Foreign:
    return FOREIGN[request.param]()


@pytest.fixture
def make_foreign() -> Any:
    return lambda name: FOREIGN[name]()


@pytest.fixture
def backbone() -> Backbone:
    """Four heads where the name says three, its own mean and std: what an export may get wrong."""
    shape = Architecture("vit_tiny_patch4_16", 16, 4, 3, 48, 2, 4)
    weights = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in shape.create().state_dict().items()}
    return Backbone(shape, weights, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), {"recipe": "test"}, "small")
