from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.products import count_flops
from patchmix.build import METHODS as REGISTERED
from patchmix.build import build_weightless
from patchmix.config import MethodConfig, ModelConfig
from patchmix.interop.backbone import Architecture
from patchmix.methods.options import METHOD_OPTIONS
from patchmix.nn.vit import create_encoder
from patchmix.recipes import paper
from patchmix.settings import Flops
from patchmix.study.flops import (
    MODELS,
    PAPER_GFLOPS,
    Iteration,
    config_flops,
    encoder_flops,
    flops,
    iteration,
    method_flops,
    shape_of,
)

QUIET = Console(quiet=True)


def shape(image: int, patch: int, dim: int, depth: int, stem: str = "patch") -> Architecture:
    return Architecture(f"vit_tiny_patch{patch}_{image}", image, patch, 3, dim, depth, heads=1, stem=stem)


def test_every_registered_method_has_a_cost() -> None:
    assert set(METHOD_OPTIONS) == set(REGISTERED)
    for method in REGISTERED:
        assert iteration(method, shape(32, 2, 192, 12)).online_head > 0


@pytest.mark.parametrize("method", ["patchmix", "sdmp", "mocov3"])
@pytest.mark.parametrize("column", range(3))
def test_the_papers_column_within_half_a_percent(method: str, column: int) -> None:
    assert method_flops(method, shape_of(ModelConfig(MODELS[column]))) / 1e9 == pytest.approx(
        PAPER_GFLOPS[method][column], rel=5e-3
    )


def test_dino_with_eight_crops_of_16_px_within_a_percent() -> None:
    for row in flops(Flops("dino"), QUIET):
        assert row.linear == pytest.approx(row.paper, rel=8e-3)
        assert (
            abs(flops(Flops("dino", row.model, local_crops=10, local_size=16), QUIET)[0].linear / row.linear - 1) > 0.05
        )


def test_ibots_rows_of_the_paper_have_no_setting_in_common() -> None:
    """T and S are one number of encoder passes, B is another: the claim beside PAPER_CROPS."""
    passes = [
        gflops * 1e9 / (2 * encoder_flops(shape_of(ModelConfig(model))))
        for model, gflops in zip(MODELS, PAPER_GFLOPS["ibot"], strict=True)
    ]
    assert passes == pytest.approx([26.16, 26.17, 23.07], abs=0.01)
    assert all(row.linear == pytest.approx(row.paper, rel=0.09) for row in flops(Flops("ibot"), QUIET))


def patchmix_flops(sizes: Architecture, *, batch: int, attention: bool) -> int:
    """Two online passes forward and backward, three momentum passes forward."""
    hidden, out = 4096, 256
    key = encoder_flops(sizes, attention=attention) + 2 * (sizes.dim * hidden + hidden * hidden + hidden * out)
    query = key + 2 * (out * hidden + hidden * out)
    return batch * (2 * 3 * query + 3 * key)


def test_the_general_form_contains_patchmix() -> None:
    for model in MODELS:
        for attention in (False, True):
            sizes = shape_of(ModelConfig(model))
            expected = patchmix_flops(sizes, batch=3, attention=attention)
            assert method_flops("patchmix", sizes, batch=3, attention=attention) == expected


@pytest.mark.parametrize(
    ("model", "millions"),
    [
        ("vit_small_patch16_224", 21.6),
        ("vit_base_patch16_224", 85.7),
        ("vit_tiny_patch2_32", 5.4),
        ("vit_small_patch2_32", 21.3),
        ("vit_base_patch2_32", 85.1),
    ],
)
def test_parameters_are_those_of_table_backbone(model: str, millions: float) -> None:
    assert flops(Flops("simclr", model), QUIET)[0].parameters / 1e6 == pytest.approx(millions, rel=5e-3)


def test_sizes_follow_the_image() -> None:
    model = ModelConfig("vit_small_patch16_224")
    assert shape_of(dataclasses.replace(model, image_size=96)) == Architecture(model.name, 96, 16, 3, 384, 12, 6)
    assert shape_of(dataclasses.replace(model, patch_size=8)).patches == 28 * 28
    assert shape_of(dataclasses.replace(model, dim=48, depth=2, stem="conv")).stem == "conv"


@pytest.mark.parametrize(("stem", "first"), [("patch", 2 * 16 * 3 * 16 * 32), ("conv", 2 * 64 * 3 * 9 * 16)])
def test_the_encoder_as_torch_counts_it(stem: str, first: int) -> None:
    """first: the layer that sees the image, whose gradient nobody needs."""
    encoder = create_encoder("vit_tiny_patch4_16", dim=32, depth=2, heads=2, stem=stem)
    sizes = shape(16, 4, 32, 2, stem=stem)

    class Forward(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, views: list[torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"loss": self.encoder(views[0]).sum()}

    forward, backward = count_flops(Forward(), [torch.randn(3, 3, 16, 16)])
    assert forward == 3 * encoder_flops(sizes, attention=True)
    assert backward == 3 * (2 * encoder_flops(sizes, attention=True) - first)


def small(method: str) -> tuple[Any, dict[str, Any]]:
    options: dict[str, Any] = {"head_hidden": 32, "head_out": 16} if method in HEADS_OF_SIZES else {}
    torch.manual_seed(0)
    encoder = create_encoder("vit_tiny_patch2_32", dim=48, depth=2, heads=2, any_image_size=True)
    if method in ("mocov3", "sdmp"):
        options["frozen_patch_embed"] = False
    if method == "ibot":
        options |= {"mask_probability": 1.0, "mask_ratio": (0.15, 0.15)}
    heads = {key: value for key, value in options.items() if key.startswith("head")}
    return REGISTERED[method](encoder, METHOD_OPTIONS[method](**options)).train(), heads


HEADS_OF_SIZES = ("patchmix", "mocov3", "sdmp", "regioncl")


@pytest.mark.parametrize("method", METHOD_OPTIONS)
def test_the_closed_form_is_what_runs(method: str) -> None:
    """Encoder and heads with their default widths, attention included, local crops too."""
    built, heads = small(method)
    views = [torch.randn(2, 3, 32, 32) for _ in range(2)] + [torch.randn(2, 3, 16, 16) for _ in range(2)]
    counted = sum(count_flops(built, views))
    as_it_runs: dict[str, Any] = {
        "batch": 2,
        "attention": True,
        "class_token": True,
        "local_crops": 2,
        "local_size": 16,
    }
    expected = method_flops(method, shape(32, 2, 48, 2), options=heads, **as_it_runs)
    # Left out of the closed form: similarities between embeddings, weight gradients of constants, image gradients.
    assert counted == pytest.approx(expected, rel=0.01), counted / expected
    assert all(p.grad is None for p in built.parameters())


OTHER_HEADS: dict[str, dict[str, Any]] = {
    "simclr": {"head_layers": 3, "head_hidden": 64, "head_out": 32},
    "byol": {"head_hidden": 64, "head_out": 32},
    "swav": {"prototypes": 200, "head_hidden": 64, "head_out": 32},
    "dino": {"head_hidden": 64, "head_bottleneck": 32, "head_out": 500},
    "ibot": {
        "head_hidden": 64,
        "head_bottleneck": 32,
        "head_out": 500,
        "mask_probability": 1.0,
        "mask_ratio": [0.3, 0.3],
    },
    **{name: {"head_hidden": 96, "head_out": 24} for name in HEADS_OF_SIZES},
    "patchmix": {"head_hidden": 96, "head_out": 24, "num_mix": 2, "region_weight": 1.0},
}


@pytest.mark.parametrize("method", METHOD_OPTIONS)
def test_the_closed_form_follows_the_methods_options(method: str) -> None:
    options = OTHER_HEADS[method]
    torch.manual_seed(0)
    frozen = {"frozen_patch_embed": False} if method in ("mocov3", "sdmp") else {}
    encoder = create_encoder("vit_tiny_patch4_32", dim=48, depth=2, heads=2)
    built = REGISTERED[method](encoder, METHOD_OPTIONS[method](**options, **frozen)).train()
    counted = sum(count_flops(built, [torch.randn(2, 3, 32, 32) for _ in range(2)]))
    as_it_runs: dict[str, Any] = {"batch": 2, "attention": True, "class_token": True}
    assert method_flops(method, shape(32, 4, 48, 2), options=options, **as_it_runs) == pytest.approx(counted, rel=0.02)
    assert method_flops(method, shape(32, 4, 48, 2), **as_it_runs) != pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize(
    "options",
    [
        {"directions": "shared", "plain_share": 0.25, "region_weight": 1.0, "weights": (0.5, 0.5, 0.0), "num_mix": 2},
        {"directions": "symmetric", "mixed_share": 0.5},
        {"weights": (0.0, 1.0, 0.0)},
        {"weights": (1.0, 0.0, 0.0), "directions": "shared"},
        {"momentum_encoder": False},
    ],
)
@pytest.mark.parametrize(("dropout", "crops"), [(0.0, 0), (0.5, 0), (0.0, 2)])
def test_the_closed_form_knows_directions_shares_dropout_and_crops(
    options: dict[str, Any], dropout: float, crops: int
) -> None:
    options = options | {"head_hidden": 96, "head_out": 24}
    encoder = create_encoder("vit_tiny_patch4_32", dim=48, depth=2, heads=2, any_image_size=True)
    built = REGISTERED["patchmix"](encoder, METHOD_OPTIONS["patchmix"](**options)).train()
    built.drop_tokens(dropout)
    counted = sum(count_flops(built, [torch.randn(8, 3, size, size) for size in (32, 32, *[16] * crops)]))
    as_it_runs: dict[str, Any] = {"batch": 8, "attention": True, "class_token": True, "token_dropout": dropout}
    as_it_runs |= {"local_crops": crops, "local_size": 16}
    expected = method_flops("patchmix", shape(32, 4, 48, 2), options=options, **as_it_runs)
    assert expected == pytest.approx(counted, rel=0.03)


def test_a_runs_cost_is_that_of_its_stages() -> None:
    config = paper("vit_tiny_patch4_32")
    small = config_flops(config.replace(image_size=16))
    half = config_flops(config.replace(image_sizes=(16, 32)))
    full = config_flops(config)
    assert small is not None and full is not None and half == pytest.approx((small + full) / 2)
    budget = config_flops(config.replace(image_sizes=(16, 32), budget="1h"))  # more images where they are small
    assert budget == pytest.approx(2 / (1 / small + 1 / full))
    at_first, at_last = (config_flops(config.replace(image_sizes=(16, 32)), at=progress) for progress in (0.0, 1.0))
    assert (at_first, at_last) == (small, full)
    dropped, always = (config_flops(config.replace(token_dropout=share)) for share in ((0.5, 0.0), (0.25, 0.25)))
    assert dropped is not None and dropped < full and dropped == pytest.approx(always, rel=0.01)


def test_the_table_prints_the_paper_beside_ours() -> None:
    out = io.StringIO()
    flops(Flops(), Console(file=out, width=160))
    text = out.getvalue()
    for row in ("50.0", "787.3", "1237.2", "2014.1", "8×16"):
        assert row in text
    assert len(flops(Flops(), QUIET)) == 27


@pytest.mark.parametrize("method", ["patchmix", "dino", "swav", "sdmp"])
def test_what_torch_counts_without_computing(method: str) -> None:
    built, views = build_weightless(
        ModelConfig("vit_tiny_patch16_64"),
        MethodConfig(method, METHOD_OPTIONS[method]()),
        batch=2,
        local_crops=2,
        local_size=32,
    )
    expected = method_flops(
        method, shape(64, 16, 192, 12), attention=True, class_token=True, local_crops=2, local_size=32
    )
    assert sum(count_flops(built, views)) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("name", ["vit_small_plus_patch16_dinov3", "vit_small_patch14_reg4_dinov2"])
def test_registers_and_gated_mlps_are_counted(name: str) -> None:
    model = ModelConfig(name, image_size=64 if "16" in name else 56, depth=2)
    built, views = build_weightless(model, MethodConfig("simclr", METHOD_OPTIONS["simclr"]()), batch=2)
    expected = method_flops("simclr", shape_of(model), attention=True, class_token=True)
    assert sum(count_flops(built, views)) == pytest.approx(expected, rel=0.03)


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(ValueError, match="method is 'mocov4'; FLOPs are known for patchmix"):
        iteration("mocov4", shape(32, 2, 192, 12))
    assert isinstance(iteration("dino", shape(32, 2, 192, 12)), Iteration)
