"""Every row of the table of differences between the paper and its authors' code, for both recipes."""

from __future__ import annotations

import pytest

from patchmix.build import build_method
from patchmix.config import Config, flat
from patchmix.methods.patchmix import PatchMixMethod
from patchmix.recipes import GFLOPS, PAPER_ROWS, RECIPES, demo, fast, official, paper, recipe_rows, start
from patchmix.study.flops import config_flops

S16, B16 = "vit_small_patch16_224", "vit_base_patch16_224"
T2, S2, B2 = "vit_tiny_patch2_32", "vit_small_patch2_32", "vit_base_patch2_32"
ALL = (S16, B16, T2, S2, B2)


def option(config: Config, name: str) -> object:
    return getattr(config.method.options, name)


@pytest.mark.parametrize("model", ALL)
@pytest.mark.parametrize(
    ("row", "name", "of_paper", "of_official"),
    [
        (1, "num_mix", 3, 2),
        (2, "weights", (1.0, 1.0, 1.0), (1.0, 0.5, 0.5)),
        (3, "normalize_mix_to_mix", False, True),
        (4, "label_smoothing", 0.0, 0.1),
        (8, "mixed_query", 1, 2),
        (11, "momentum_update", "after_step", "before_keys"),
        (0, "temperature", 0.2, 0.2),
        (0, "momentum", 0.996, 0.996),
        (0, "head_hidden", 4096, 4096),
        (0, "head_out", 256, 256),
    ],
)
def test_rows_of_the_method(model: str, row: int, name: str, of_paper: object, of_official: object) -> None:
    assert option(paper(model), name) == of_paper
    assert option(official(model), name) == of_official


def test_row_5_heads_of_vit_small() -> None:
    assert [paper(m).model.heads for m in ALL] == [None] * 5  # as the name says: 6 for ViT-S
    assert [official(m).model.heads for m in ALL] == [12, None, None, 12, None]


def test_row_6_multi_crop() -> None:
    for model in ALL:
        assert paper(model).views.local_crops == 0
    views = official(S16).views
    assert (views.local_crops, views.local_size) == (8, 96)
    assert (views.area, views.local_area) == ((0.35, 1.0), (0.05, 0.35))
    assert official(S2).views.local_crops == 0


def test_row_7_momentum_encoder() -> None:
    assert all(option(paper(m), "momentum_encoder") for m in ALL)
    assert [option(official(m), "momentum_encoder") for m in ALL] == [True, True, False, True, True]


def test_row_10_momentum_by_step_or_by_epoch() -> None:
    assert option(paper(S16), "momentum_stages") == 0
    assert option(official(S16), "momentum_stages") == 300
    assert option(official(S16, epochs=40), "momentum_stages") == 40


@pytest.mark.parametrize("recipe", [paper, official])
@pytest.mark.parametrize(
    ("model", "lr", "batch", "epochs", "warmup"),
    [
        (S16, 2e-3, 1024, 300, 10),
        (B16, 3e-3, 1024, 300, 10),
        (S2, 1e-3, 512, 800, 100),
        (B2, 1.5e-3, 512, 800, 100),
        (T2, 4e-3, 512, 800, 100),
    ],
)
def test_rows_12_and_13_learning_rate(recipe, model: str, lr: float, batch: int, epochs: int, warmup: int) -> None:
    config = recipe(model)
    assert config.lr == pytest.approx(lr)
    assert (config.train.batch_size, config.train.epochs, config.optim.warmup_epochs) == (batch, epochs, warmup)
    assert config.optim.min_lr == (0.0 if recipe is paper else 1e-6)


def test_row_13_a_shorter_run_keeps_the_proportion_and_a_longer_one_the_length() -> None:
    assert paper(T2, epochs=80).optim.warmup_epochs == 10
    assert paper(T2, epochs=1600).optim.warmup_epochs == 100
    paper(T2, epochs=2).replace()


@pytest.mark.parametrize("recipe", [paper, official])
def test_row_14_weight_decay(recipe) -> None:
    for model in ALL:
        scale = 0.5 if model == T2 else 1.0
        config = recipe(model)
        assert config.optim.weight_decay == pytest.approx(0.04 * scale)
        assert config.optim.weight_decay_end == pytest.approx(0.4 * scale)


@pytest.mark.parametrize("recipe", [paper, official])
def test_rows_15_to_18(recipe) -> None:
    for model in ALL:
        config = recipe(model)
        assert config.model.drop_path == 0.1
        assert config.model.initialization == "mocov3"
        assert config.views.mean == (0.485, 0.456, 0.406)
        assert config.views.std == (0.229, 0.224, 0.225)


def test_the_augmentation_table() -> None:
    for model, area in ((S16, (0.05, 1.0)), (B16, (0.05, 1.0)), (T2, (0.1, 1.0)), (S2, (0.1, 1.0)), (B2, (0.1, 1.0))):
        views = paper(model).views
        assert views.area == area
        assert views.ratio == (3 / 4, 4 / 3)
        assert (views.flip, views.jitter, views.gray) == (0.5, 0.8, 0.2)
        assert (views.brightness, views.contrast, views.saturation, views.hue) == (0.4, 0.4, 0.2, 0.1)
        assert (views.blur, views.sigma, views.solarize) == ((1.0, 0.1), (0.1, 2.0), (0.0, 0.2))


@pytest.mark.parametrize("row", PAPER_ROWS, ids=lambda r: f"{r.data}-{r.model}-{r.epochs}")
@pytest.mark.parametrize("name", ["paper", "official"])
def test_every_row_of_the_paper_has_a_valid_recipe(row, name: str) -> None:
    config = RECIPES[name](row.model, epochs=float(row.epochs))
    assert config.replace() == config


@pytest.mark.parametrize("model", ["vit_tiny_patch8_32", "vit_tiny_patch4_32", "vit_small_patch8_64"])
def test_fast_is_for_any_small_model_and_the_demo_is_fast(model: str) -> None:
    config = fast(model, epochs=5)
    assert config.replace() == config and config.warmup == pytest.approx(0.1)
    assert (config.model.dim is None) == (model != "vit_tiny_patch8_32")  # other models have the sizes of their name
    build_method(config)
    other = {
        "recipe",
        "data",
        "area",
        "jitter",
        "gray",
        "stem",
        "optim",
        "base_lr",
        "batch_size",
    }  # what the demo changes
    other |= {"workers", "monitor_every", "monitor_bank", "monitor_queries"}
    ours, demos = flat(config), flat(demo(model, epochs=5))
    assert {name for name in demos if ours[name] != demos[name]} <= other


@pytest.mark.parametrize("name", ["paper", "official"])
def test_switches_for_short_training_are_off_in_the_papers_recipes(name: str) -> None:
    config = RECIPES[name](T2)
    off = {"region_weight": 0.0, "directions": "paper", "plain_share": 1.0, "mixed_share": 1.0, "mixed_ramp": 0.0}
    off |= {"num_mix_stages": False, "mix_blocks": (1,), "token_dropout": (0.0, 0.0), "image_sizes": ()}
    off |= {"optim": "adamw", "positions": None, "stem": "patch", "initialization": "mocov3"}
    assert {key: flat(config)[key][1] for key in off} == off


def test_official_trains_without_momentum_and_with_local_crops() -> None:
    """Rows 6 and 7 are carried out, not only written down."""
    small = {"dim": 24, "depth": 1, "heads": 2, "head_hidden": 16, "head_out": 8}
    method = build_method(official(T2).replace(**small))
    assert isinstance(method, PatchMixMethod)
    assert method.momentum_copy is None
    with_crops = build_method(official(S16).replace(**small, image_size=64))
    assert isinstance(with_crops, PatchMixMethod)
    import torch

    out = with_crops([torch.randn(4, 3, 64, 64)] * 2 + [torch.randn(4, 3, 32, 32)] * 2)
    assert {"local", "mixlocal", "oto", "mto", "mtm"} <= set(out)
    expected = out["oto"] + 0.5 * out["mto"] + 0.5 * out["mtm"] + out["local"] + out["mixlocal"]
    torch.testing.assert_close(out["loss"], expected)


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown recipe 'papre'; did you mean 'paper'"):
        start("papre")


def test_stored_costs_are_those_of_the_formula() -> None:
    for name in GFLOPS:
        for row in recipe_rows(name):
            flops = config_flops(RECIPES[name](row["model"]))
            assert flops is not None and abs(row["gflops_per_image"] - flops / 1e9) < 1e-4, (name, row["model"], flops)
