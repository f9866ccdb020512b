from __future__ import annotations

import pytest

from patchmix.build import method_options
from patchmix.config import Config, coerce, differences, from_yaml, override, to_yaml
from patchmix.recipes import official, paper
from patchmix.run import configure, parse_minutes


@pytest.mark.parametrize("config", [Config(), paper("vit_tiny_patch2_32"), official("vit_small_patch16_224")])
def test_yaml_round_trip(config: Config) -> None:
    again = from_yaml(to_yaml(config))
    assert to_yaml(again) == to_yaml(config)
    assert differences(config, again) == []
    assert again.views.area == config.views.area  # tuples come back as tuples


def test_settings_reach_their_place_with_their_type() -> None:
    config = override(
        Config(), ["optim.base_lr=1e-3", "train.epochs=5", "method.num_mix=[2, 3]", "views.area=[0.2, 1]"]
    )
    assert config.optim.base_lr == 1e-3
    assert config.train.epochs == 5.0
    assert config.views.area == (0.2, 1.0)
    assert config.method.options["num_mix"] == [2, 3]
    assert method_options("patchmix", config.method.options).num_mix == (2, 3)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optim.base_lrr=1", "unknown key in optim: 'base_lrr'; did you mean 'base_lr'"),
        ("optm.base_lr=1", "unknown section 'optm'; did you mean 'optim'"),
        ("optim.base_lr=fast", "optim.base_lr is 'fast'; it must be a number"),
        ("train.batch_size=2.5", "train.batch_size is 2.5; it must be a whole number"),
        ("train.precision=fp61", "did you mean fp16|must be one of auto, fp32, bf16"),
        ("views.area=[0.1]", "views.area is .*; it must be a list: 2 of a number"),
        ("model.freeze_patch_embed=1", "true or false"),
        ("optim.base_lr", "has no '='"),
        ("optim=3", "must be a section"),
    ],
)
def test_bad_settings_say_what_is_wrong(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        override(Config(), [setting])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nummix": 3}, "unknown option of method patchmix: 'nummix'; did you mean 'num_mix'"),
        ({"mixed_query": 3}, "method.mixed_query is 3; it must be 1 or 2"),
        ({"num_mix": "many"}, "method.num_mix is 'many'; it must be a whole number or a list"),
    ],
)
def test_bad_method_options_say_what_is_wrong(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        method_options("patchmix", options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.batch_size=0"], "train.batch_size is 0"),
        (["optim.warmup_epochs=900"], "below train.epochs"),
        (["model.in_chans=4"], "model.in_chans is 4"),
        (["runtime.workers=-1"], "runtime.workers is -1"),
    ],
)
def test_impossible_values_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure("shapes", settings=settings)


def test_differences_leave_out_what_changes_no_result() -> None:
    a = configure("shapes", recipe="demo")
    b = override(a, ["runtime.workers=7", "optim.base_lr=0.5", "data.path=/elsewhere"])
    assert differences(a, b) == [f"optim.base_lr: {a.optim.base_lr} → 0.5"]


@pytest.mark.parametrize(
    ("text", "minutes"), [("45min", 45), ("2h", 120), ("90s", 1.5), ("1h30min", 90), ("1.5h", 90), (3.0, 3), ("7m", 7)]
)
def test_budgets(text: str, minutes: float) -> None:
    assert parse_minutes(text) == pytest.approx(minutes)


@pytest.mark.parametrize("text", ["soon", "", "5", "h"])
def test_bad_budgets(text: str) -> None:
    with pytest.raises(ValueError, match="write it as 45min"):
        parse_minutes(text)


def test_whole_floats_are_whole_numbers_and_booleans_are_not_numbers() -> None:
    assert coerce(3.0, int, "k") == 3
    with pytest.raises(ValueError):
        coerce(True, int, "k")
