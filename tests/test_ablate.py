"""`patchmix ablate` from its settings to its table: small real trainings on a folder of colored noise."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from rich.console import Console
from torch import Tensor

import patchmix
from patchmix import build, distributed
from patchmix.ablation import ablate, row_configs
from patchmix.cli import from_keywords, main, parse
from patchmix.config import Config
from patchmix.evaluate.results import read_results
from patchmix.methods.options import METHOD_OPTIONS, DINOOptions, PatchMixOptions, SimCLROptions
from patchmix.methods.simclr import SimCLR
from patchmix.report.ablation_table import AblationTable, rows_of
from patchmix.settings import Ablate
from patchmix.train.watch import Interrupted, NonFiniteLoss

SETTINGS: dict[str, Any] = {
    "recipe": "demo",
    "epochs": 2,
    "batch_size": 16,
    "workers": 0,
    "device": "cpu",
    "dim": 24,
    "depth": 1,
    "heads": 2,
    "monitor_every": 0,
    "log_every": 1,
    "head_hidden": 16,
    "head_out": 8,
    "checkpoint_epochs": 0.5,
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for split, count in (("train", 32), ("val", 12)):
        for i in range(count):
            path = root / split / "abc"[i % 3] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            color = np.eye(3)[i % 3] * 160
            cv2.imwrite(str(path), (random.integers(0, 90, (32, 32, 3)) + color).clip(0, 255).astype(np.uint8))
    return root


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHMIX_CACHE", str(tmp_path / "cache"))


def run(ablation: str, data: Path, out: Path, rows: Sequence[str], **changed: Any) -> AblationTable:
    settings = from_keywords(Ablate, ablation, data, out, rows=rows, **{**SETTINGS, **changed})
    return ablate(settings, console=Console(quiet=True))


def configs(ablation: str, **settings: Any) -> dict[str, Config]:
    given = {"model": "vit_small_patch2_32", **settings}
    return row_configs(from_keywords(Ablate, ablation, "shapes", "out", **given), rows_of(ablation, METHOD_OPTIONS))


# --------------------------------------------------------------------------------------------------- configuration


def test_rows_differ_in_what_is_studied_only() -> None:
    mixes = {name: config.method.options for name, config in configs("mix").items()}
    assert mixes["patchmix"] == PatchMixOptions(mix="patchmix", num_mix=3)
    assert mixes["cutmix+mixup"] == PatchMixOptions(mix="cutmix+mixup", num_mix=3)
    assert mixes["baseline"] == PatchMixOptions(mix="patchmix", num_mix=1)
    assert [c.method.options.num_mix for c in configs("num-mix").values()] == [1, 2, 3, 4]


def test_terms_keep_the_recipes_weights() -> None:
    printed = {name: list(c.method.options.weights) for name, c in configs("terms").items()}
    assert printed == {
        "oto": [1, 0, 0],
        "mto": [0, 1, 0],
        "mtm": [0, 0, 1],
        "oto+mto": [1, 1, 0],
        "oto+mto+mtm": [1, 1, 1],
    }
    official = configs("terms", recipe="official")
    assert list(official["oto+mto"].method.options.weights) == [1, 0.5, 0]
    given = configs("terms", weights=(3, 2, 1))
    assert list(given["oto+mto+mtm"].method.options.weights) == [3, 2, 1]
    fast = configs("terms", recipe="fast", weights=(1, 1, 1))
    assert {c.method.options.region_weight for c in fast.values()} == {0.0}
    with pytest.raises(ValueError, match="row mtm has a term of weight 0; give all three, such as --weights 1 1 1"):
        configs("terms", recipe="fast")
    assert [*configs("terms", recipe="fast", rows=("oto", "mto"))] == ["oto", "mto"]  # which have weights
    with pytest.raises(ValueError, match="method simclr has no terms"):
        configs("terms", method="simclr")


def test_lengths_are_shares_of_epochs_or_of_the_budget(tmp_path: Path) -> None:
    by_epochs = configs("epochs", epochs=1600)
    assert {n: (c.train.epochs, c.optim.warmup_epochs) for n, c in by_epochs.items()} == {
        "eighth": (200, 25),
        "quarter": (400, 50),
        "half": (800, 100),  # the recipe's own warm-up of each length
        "full": (1600, 100),
    }
    by_time = configs("epochs", budget="40min")
    assert [c.budget_minutes for c in by_time.values()] == [5, 10, 20, 40]
    assert {c.train.epochs for c in by_time.values()} == {800}
    from patchmix.config import to_yaml

    (tmp_path / "config.yaml").write_text(to_yaml(by_epochs["full"]))
    again = configs("epochs", config=tmp_path)
    assert [(c.train.epochs, c.optim.warmup_epochs) for c in again.values()][1:] == [(400, 25), (800, 50), (1600, 100)]


def test_an_option_reaches_every_row_even_if_it_is_the_recipes_own_value() -> None:
    options = ["--recipe", "demo", "--momentum", "0.99", "--no-mix-across", "--temperature=0.2"]
    for settings in (
        parse(Ablate, ["method", "shapes", "--out", "a", *options], "patchmix ablate"),
        from_keywords(Ablate, "method", "shapes", "a", recipe="demo", momentum=0.99, temperature=0.2),
    ):
        found = row_configs(settings, rows_of("method", METHOD_OPTIONS))
        assert found["dino"].method.options == DINOOptions(momentum=0.99)
        assert found["simclr"].method.options == SimCLROptions(temperature=0.2)
    lengths = configs("epochs", epochs=20, warmup_epochs=2.0, recipe="demo", model="vit_tiny_patch8_32")
    assert {config.optim.warmup_epochs for config in lengths.values()} == {2.0}
    with pytest.raises(ValueError, match="method is what ablation 'method' varies; choose with --rows"):
        configs("method", method="dino")


def test_methods_have_their_own_options() -> None:
    found = configs("method", num_mix=2, head_out=32, momentum=0.9, row_settings=["dino:clip_grad=3"])
    assert list(found) == list(build.METHODS)
    assert found["patchmix"].method.options == PatchMixOptions(num_mix=2, head_out=32, momentum=0.9)
    assert found["dino"].method.options == DINOOptions(head_out=32, momentum=0.9)
    assert found["simclr"].method.options == SimCLROptions(head_out=32)
    assert {name: c.optim.clip_grad for name, c in found.items() if c.optim.clip_grad} == {"dino": 3}
    with pytest.raises(ValueError, match="unknown setting 'num_mixes'; did you mean 'num_mix'"):
        configs("method", num_mixes=2)
    with pytest.raises(ValueError, match="unknown setting 'num_mix'"):
        configs("method", row_settings=["dino:num_mix=2"])
    with pytest.raises(ValueError, match=r"method\.momentum is 'high'"):
        configs("method", momentum="high")
    with pytest.raises(ValueError, match="unknown row 'dinno'; did you mean 'dino'"):
        configs("method", row_settings=["dinno:clip_grad=2"])
    with pytest.raises(ValueError, match="is not ROW:KEY=VALUE"):
        configs("method", row_settings=["clip_grad=2"])
    with pytest.raises(ValueError, match=r"'\[3' is no YAML value"):
        configs("method", row_settings=["dino:clip_grad=[3"])
    with pytest.raises(ValueError, match="what the ablation varies"):
        configs("method", row_settings=["dino:seed=2"])
    with pytest.raises(ValueError, match="num_mix is what the ablation varies"):
        configs("mix", row_settings=["baseline:num_mix=2"])


# -------------------------------------------------------------------------------------------------------- real runs


def stamps(out: Path) -> dict[str, tuple[int, int]]:
    """When each encoder was written, and how many results each run has."""
    return {
        path.parent.name: (path.stat().st_mtime_ns, len(read_results(path.parent)))
        for path in sorted(out.glob("*/encoder.safetensors"))
    }


def test_two_rows_with_two_seeds_and_the_same_call_again(images: Path, tmp_path: Path) -> None:
    table = run("num-mix", images, tmp_path / "a", ["m2", "m3"], seeds=[0, 1])
    assert [(r.row, r.seed) for r in table.runs] == [("m2", 0), ("m3", 0), ("m2", 1), ("m3", 1)]
    before = stamps(tmp_path / "a")
    assert {name: results for name, (_, results) in before.items()} == dict.fromkeys(
        ["m2-seed0", "m2-seed1", "m3-seed0", "m3-seed1"], 2
    )
    for each in table.runs:
        assert each.images_seen == 64 and each.seconds and each.flops_per_image and each.health["rank"] > 1
        assert set(each.results) == {"knn", "linear-fast"}
        assert each.results["knn"].images == 12
    again = run("num-mix", images, tmp_path / "a", ["m2", "m3"], seeds=[0, 1])
    assert stamps(tmp_path / "a") == before
    assert again == table
    # Another protocol's result, and one of other weights, are not taken for ours.
    (tmp_path / "a" / "m2-seed0" / "results.jsonl").write_text(
        (tmp_path / "a" / "m3-seed0" / "results.jsonl").read_text()
    )
    third = run("num-mix", images, tmp_path / "a", ["m2", "m3"], seeds=[0, 1])
    assert stamps(tmp_path / "a")["m2-seed0"][1] == 4
    assert [r.results["knn"].weights for r in third.runs] == [r.results["knn"].weights for r in table.runs]


def test_runs_of_plain_pretrain_are_adopted_and_others_refused(images: Path, tmp_path: Path) -> None:
    """A plain run says nothing of the mix, which is PatchMix then, as the row spells out."""
    out = tmp_path / "a"
    patchmix.pretrain(images, out / "patchmix-seed0", region_weight=0.0, **SETTINGS)
    patchmix.pretrain(images, out / "mixup-seed0", mix="mixup", region_weight=0.0, **SETTINGS)
    (out / "mixup-seed0" / "encoder.safetensors").unlink()  # as if it had been stopped at its last checkpoint
    before = stamps(out)
    table = run("mix", images, out, ["patchmix", "mixup"])
    assert stamps(out)["patchmix-seed0"][0] == before["patchmix-seed0"][0]
    assert stamps(out)["patchmix-seed0"][1] == 2
    assert [r.images_seen for r in table.runs] == [64, 64]

    with pytest.raises(ValueError, match=r"patchmix-seed0 holds .* \(optim.base_lr: 0.004 → 0.001\); choose another"):
        run("mix", images, out, ["cutmix", "patchmix"], base_lr=1e-3)
    assert not (out / "cutmix-seed0").exists()  # found before anything was trained
    with pytest.raises(ValueError, match="other images"):
        run("mix", images / "val", out, ["patchmix"])


def test_interrupted_and_continued(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run("method", images, tmp_path / "whole", ["simclr"], seeds=[0, 1])
    stop_at = [2]

    class Stopped(SimCLR):
        def after_step(self, progress: float) -> None:
            stop_at[0] -= 1
            if stop_at[0] == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    out = tmp_path / "stopped"
    monkeypatch.setitem(build.METHODS, "simclr", Stopped)
    with pytest.raises(Interrupted):
        run("method", images, out, ["simclr"], seeds=[0, 1])
    assert (out / "simclr-seed0" / "checkpoints" / "last").exists()
    assert not (out / "simclr-seed0" / "encoder.safetensors").exists()
    table = run("method", images, out, ["simclr"], seeds=[0, 1])
    weights = [[r.results["knn"].weights for r in t.runs] for t in (whole, table)]
    assert weights[0] == weights[1]  # digests of the encoders


class Broken(SimCLR):
    def forward(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        return {"loss": super().forward(views)["loss"] * float("nan")}


def test_the_longest_wait_for_another_process_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def joined(device: object, minutes: float = 10.0) -> None:
        raise ValueError(f"waits {minutes:g} min")

    monkeypatch.setattr(distributed, "process_group", joined)
    with pytest.raises(ValueError, match="waits 45 min"):
        run("mix", tmp_path, tmp_path / "a", [], timeout_minutes=45)


def test_a_failed_row_does_not_stop_the_others(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(build.METHODS, "broken", Broken)
    monkeypatch.setitem(METHOD_OPTIONS, "broken", SimCLROptions)
    out = tmp_path / "a"
    with pytest.raises(NonFiniteLoss, match=r"1 of 2 runs failed: broken-seed0; the first: step 0: loss is nan"):
        run("method", images, out, ["broken", "simclr"])
    page = (out / "ablation.md").read_text()
    assert "broken, seed 0, failed: step 0: loss is nan" in page
    assert "| simclr | 1 of 1 |" in page and "| broken | 0 of 1, 1 failed |" in page

    options = [part for key, value in SETTINGS.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    words = ["ablate", "method", str(images), "--out", str(out), "--rows", "simclr", "broken"]
    with pytest.raises(SystemExit) as stop:
        main([*words, *options])
    assert stop.value.code == 3
    shown = capsys.readouterr()
    assert "row 1 of 2: simclr, seed 0" in shown.out and "simclr-seed0 is trained" in shown.out.replace("\n", "")
    assert "1 of 2 runs failed" in shown.err


def test_without_labels(images: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in (images / "train").rglob("*.png"):
        (flat / path.name).write_bytes(path.read_bytes())
    table = run("num-mix", flat, tmp_path / "a", ["m2"])
    assert table.evaluated_on is None and table.runs[0].results == {}
    assert "There are no labels" in (tmp_path / "a" / "ablation.md").read_text()
    judged = run("num-mix", flat, tmp_path / "a", ["m2"], test_data=str(images))
    assert judged.evaluated_on == str(images) and set(judged.runs[0].results) == {"knn", "linear-fast"}
    with pytest.raises(ValueError, match="has no labels"):
        run("num-mix", flat, tmp_path / "a", ["m2"], test_data=str(flat))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seeds": [0, 0]}, "without repeats"),
        ({"seeds": []}, "at least one"),
        ({"budget": "1min"}, "give one of them"),
        ({"num_mix": 4}, "is what ablation 'num-mix' varies"),
        ({"rows": ["m9"]}, "unknown row 'm9'"),
    ],
)
def test_mistakes(images: Path, tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run("num-mix", images, tmp_path / "a", **{"rows": ["m2"], **changed})
    assert not (tmp_path / "a").exists()


def test_from_weights_that_are_good_already(images: Path, trained_run: Path, tmp_path: Path) -> None:
    sizes = ("recipe", "dim", "depth", "heads")
    settings = {k: v for k, v in SETTINGS.items() if k not in sizes} | {"recipe": "adapt", "epochs": 1}
    settings |= {"init_from": str(trained_run), "rows": ("mixup", "patchmix")}
    table = patchmix.ablate("mix", data=str(images), out=tmp_path / "a", **settings)
    assert f"{trained_run}, recipe adapt" in table.training
    assert all(run.results["knn"].images == 12 and run.flops_per_image for run in table.runs)
    again = patchmix.ablate("mix", data=str(images), out=tmp_path / "a", **settings)  # nothing is left to train
    assert [run.results for run in again.runs] == [run.results for run in table.runs]
    with pytest.raises(ValueError, match=r"\(optim.layer_decay: 0.8 → 0.5\)"):
        patchmix.ablate("mix", data=str(images), out=tmp_path / "a", **settings, layer_decay=0.5)
    del settings["init_from"]
    with pytest.raises(ValueError, match="model same needs weights to start from; give --init-from WEIGHTS"):
        patchmix.ablate("mix", data=str(images), out=tmp_path / "b", **settings)
