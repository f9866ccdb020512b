from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from patchmix.config import (
    Config,
    differences,
    from_dict,
    from_yaml,
    parse_minutes,
    read_config,
    to_yaml,
    validate,
)
from patchmix.methods.options import DINOOptions, MoCoV3Options
from patchmix.recipes import demo, official, paper, start
from patchmix.settings import Export


@pytest.mark.parametrize(
    "config",
    [Config(), paper("vit_tiny_patch2_32"), official("vit_small_patch16_224"), Config().replace(method="dino")],
)
def test_yaml_round_trip(config: Config) -> None:
    again = from_yaml(to_yaml(config))
    assert again == config
    assert differences(config, again) == []


def test_settings_reach_their_place_with_their_type() -> None:
    config = Config().replace(
        base_lr="1e-3", epochs=5, warmup_epochs=1, num_mix=[2, 3], area=[0.2, 1], model="vit_tiny"
    )
    assert config.optim.base_lr == 1e-3
    assert config.train.epochs == 5.0
    assert config.views.area == (0.2, 1.0)
    assert config.method.options.num_mix == (2, 3)
    assert config.model.name == "vit_tiny"


def test_another_method_starts_from_its_own_defaults() -> None:
    config = Config().replace(num_mix=2).replace(method="mocov3", head_out=64)
    assert config.method.options == MoCoV3Options(head_out=64)
    assert Config().replace(num_mix=2).replace(method="patchmix").method.options.num_mix == 2


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"base_lrr": 1}, "unknown setting 'base_lrr'; did you mean 'base_lr'"),
        ({"base_lr": "fast"}, "optim.base_lr is 'fast'; it must be a valid number"),
        ({"base_lr": 0}, "optim.base_lr is 0; it must be greater than 0"),
        ({"batch_size": 2.5}, "train.batch_size is 2.5; it must be a valid integer"),
        ({"batch_size": 0}, "train.batch_size is 0"),
        ({"precision": "fp16"}, "precision is fp16, whose small gradients vanish without loss scaling"),
        ({"precision": "fp61"}, "train.precision is 'fp61'; it must be 'auto', 'fp32' or 'bf16'; did you mean 'fp32'"),
        ({"mix": 3}, "method.mix is 3; it must be 'patchmix', .* or 'regionswap'$"),
        ({"area": "x"}, "views.area is 'x'; it must be a valid tuple"),
        ({"author_positions": 7}, "model.author_positions is 7; it must be a valid boolean"),
        ({"warmup_epochs": 900}, r"optim.warmup_epochs is 900; it must be below train.epochs \(300\)"),
        ({"in_chans": 0}, "model.in_chans is 0; it must be greater than or equal to 1"),
        ({"workers": -1}, "runtime.workers is -1"),
        ({"num_mix": []}, "method.num_mix is .*; it must be"),
        ({"num_mix": "many"}, "method.num_mix is 'many'; it must be a valid integer.* or a valid tuple"),
        ({"weights": [1, -1, 0]}, "method.weights is -1; it must be greater than or equal to 0"),
        ({"mixed_query": 3}, "method.mixed_query is 3; it must be 1 or 2"),
        ({"method": "moco3"}, "unknown method 'moco3'; did you mean 'mocov3'"),
        ({"method": "mocov3", "num_mix": 2}, "unknown setting 'num_mix'; it belongs to method patchmix"),
    ],
)
def test_bad_settings_say_what_is_wrong(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Config().replace(**setting)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim: {base_lrr: 1}", "unknown key in optim: 'base_lrr'; did you mean 'base_lr'"),
        ("optm: {base_lr: 1}", "unknown section 'optm'; did you mean 'optim'"),
        ("optim: 3", "optim is 3; it must be a section"),
        ("method: {name: patchmix, options: {nummix: 3}}", "unknown key in method.options: 'nummix'; did you mean"),
        ("", "the configuration is empty"),
        ("optim: [", "not valid YAML"),
    ],
)
def test_bad_yaml_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_yaml(text)


def test_a_configuration_of_version_0_1() -> None:
    """Only the options that were set were stored, the budget was a number, and one option has another spelling."""
    old = yaml.safe_load(to_yaml(Config()))
    old["train"]["budget_minutes"] = 30.0
    del old["train"]["budget"]
    old["method"] = {"name": "dino", "options": {"centre_momentum": 0.8}}
    config = from_dict(old)
    assert config.train.budget == "30min" and config.budget_minutes == 30
    assert config.method.options == DINOOptions(center_momentum=0.8)
    old["train"]["budget_minutes"] = None
    assert from_dict(old).train.budget is None


def test_differences_leave_out_what_changes_no_result() -> None:
    a = demo()
    b = a.replace(workers=7, base_lr=0.5, data="/elsewhere")
    assert differences(a, b) == [f"optim.base_lr: {a.optim.base_lr} → 0.5"]


def test_a_start_from_a_file_keeps_the_proportion_of_warm_up(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(demo().replace(epochs=100, warmup_epochs=20, dim=48)))
    config = start(config=tmp_path, data="photos", epochs=10)
    assert (config.train.epochs, config.optim.warmup_epochs, config.model.dim) == (10, 2, 48)
    assert config.data.path == "photos"
    assert start(config=tmp_path / "config.yaml", epochs=200).optim.warmup_epochs == 20
    with pytest.raises(ValueError, match="there is no configuration"):
        read_config(tmp_path / "other.yaml")


@pytest.mark.parametrize(
    ("text", "minutes"), [("45min", 45), ("2h", 120), ("90s", 1.5), ("1h30min", 90), ("1.5h", 90), ("7m", 7)]
)
def test_budgets(text: str, minutes: float) -> None:
    assert parse_minutes(text) == pytest.approx(minutes)


@pytest.mark.parametrize("text", ["soon", "", "5", "h", "0min"])
def test_bad_budgets(text: str) -> None:
    with pytest.raises(ValueError, match="write it as 45min"):
        Config().replace(budget=text)


def test_settings_that_were_dropped_load_with_their_only_value() -> None:
    assert (
        from_dict({"views": {"local_blur": 0.5, "flip": 0.1}, "runtime": {"monitor_momentum": False}}).views.flip == 0.1
    )
    with pytest.raises(ValueError, match=r"model\.freeze_pos_embed was removed; it can only be False\. Leave it out"):
        from_dict({"model": {"freeze_pos_embed": True}})


def test_the_home_folder_is_meant_by_a_tilde() -> None:
    assert validate(Export, {"weights": "run", "out": "~/a"}).out == Path.home() / "a"


def test_warm_up_with_a_budget_is_a_share_of_the_epochs_of_the_recipe() -> None:
    with pytest.raises(ValueError, match=r"below train\.epochs \(20\): with a budget, it is a share of them"):
        start("fast").replace(budget="10h", warmup_epochs=30.0)
