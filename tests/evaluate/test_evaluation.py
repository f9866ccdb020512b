"""`patchmix evaluate`: the numbers of the single commands, from one pass over the images, in one table."""

from __future__ import annotations

import csv
import shutil
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from patchmix import evaluation
from patchmix.build import build_method
from patchmix.cli import main
from patchmix.config import read_config, validate
from patchmix.evaluate import attentive, features, sweep
from patchmix.evaluate import segment as segment_module
from patchmix.evaluate.knn import knn
from patchmix.evaluate.linear import linear
from patchmix.evaluate.segment import segment
from patchmix.evaluation import Score, evaluate
from patchmix.interop.backbone import Backbone
from patchmix.interop.loading import load_backbone
from patchmix.settings import Evaluate, Knn, Linear, Segment
from patchmix.train.checkpoint import Checkpoints, load_checkpoint
from tests.evaluate.conftest import write_image
from tests.evaluate.test_segment import write_scenes

EVERY = ["knn", "linear", "few-shot", "attentive", "segment"]


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_LEAST_STEPS", 20)
    monkeypatch.setattr(attentive, "_LEAST_STEPS", 5)
    monkeypatch.setattr(segment_module, "FAST_STEPS", 20)


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Two classes of scenes with masks: those of the second are mirrored in brightness."""
    for split, count in (("train", 12), ("test", 5)):
        for i, name in enumerate(("cat", "dog")):
            folders = [tmp_path / "pets" / kind / split / name for kind in ("images", "masks")]
            write_scenes(*folders, count, first=100 * i)
    return tmp_path / "pets"


def run(runs: list[Path], data: list[Any], out: Path, **options: Any) -> dict[tuple[str, str, str], Score]:
    usual = {"ignore_index": (255,), "shots": 2, "draws": 2, "device": "cpu"}
    given = {"runs": tuple(map(str, runs)), "data": tuple(map(str, data)), "out": out}
    scores = evaluate(validate(Evaluate, given | usual | options), Console(quiet=True))
    return {(score.data, score.entry.name, score.protocol): score for score in scores}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the images that go through encoders, by their weights; nothing is kept on disk."""
    seen: Counter[str] = Counter()
    create = Backbone.encoder

    def counting(self: Backbone, **options: Any) -> Any:
        encoder = create(self, **options)
        encoder.patch_embed.register_forward_hook(lambda _, images, __: seen.update({self.digest(): len(images[0])}))
        return encoder

    monkeypatch.setattr(Backbone, "encoder", counting)
    monkeypatch.setattr(features, "_keep", lambda path, found: None)
    return seen


def test_every_protocol_from_one_pass_with_the_numbers_of_the_commands(
    own_run: Path, pets: Path, tmp_path: Path, passes: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = run([own_run], [pets], tmp_path / "out")
    assert [(name, protocol) for _, name, protocol in scores] == [
        *(("tiny", protocol) for protocol in EVERY),
        *(("untrained", protocol) for protocol in EVERY),
        *(("raw pixels", protocol) for protocol in EVERY[:3]),
    ]
    start = build_method(read_config(own_run)).encoder.state_dict()
    digests = {name: score.result.weights for (_, name, _), score in scores.items()}
    untrained = evaluation.untrained(str(own_run), load_backbone(own_run))
    assert untrained.digest() == digests["untrained"]
    for name, tensor in start.items():
        assert torch.equal(untrained.weights[name], tensor)
    assert passes == {digests["tiny"]: 24 + 10, digests["untrained"]: 24 + 10}  # each image once; pixels need no pass

    monkeypatch.setenv("PATCHMIX_CACHE", str(tmp_path / "another"))
    common: dict[str, Any] = {"weights": str(own_run), "data": str(pets / "images"), "out": tmp_path / "single"}
    fast = common | {"protocol": "fast", "workers": 0}
    masks: dict[str, Any] = {"data": pets, "ignore_index": (255,), "protocol": "fast", "workers": 0}
    singles = {
        "knn": knn(Knn(**common)),
        "linear": linear(Linear(**fast)),
        "few-shot": linear(Linear(**fast, shots=2, draws=2)),
        "attentive": linear(Linear(**fast, pool="attentive")),
        "segment": segment(Segment(**common | masks)),
    }
    for protocol, single in singles.items():
        found = scores[str(pets), "tiny", protocol].result
        assert found.protocol == single.protocol and found.weights == single.weights
        assert found.metrics == pytest.approx(single.metrics, abs=0.05), protocol  # rounding may turn one image
    assert scores[str(pets), "raw pixels", "knn"].result.encoder == "raw pixels"


def test_the_same_call_evaluates_nothing_again_and_another_seed_what_depends_on_it(
    own_run: Path, pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run([own_run], [pets], tmp_path / "out")
    ran: list[str] = []

    def watched(original: Any, task: Any) -> Any:
        result = original(task)
        ran.append(result.protocol)
        return result

    for name in ("knn_of", "linear_of", "segment_fast_of"):
        monkeypatch.setattr(evaluation, name, partial(watched, getattr(evaluation, name)))
    again = run([own_run], [pets], tmp_path / "out")
    assert ran == [] and {k: s.percent for k, s in again.items()} == {k: s.percent for k, s in first.items()}
    run([own_run], [pets], tmp_path / "out", seed=1, baselines=False)
    assert ran == ["linear-fast", "linear-fast@2-shot", "attentive", "segment-fast"]  # kNN has no random numbers
    ran.clear()
    run([own_run], [pets], tmp_path / "out", baselines=False, ignore_index=(9, 255))
    assert ran == ["segment-fast"]
    ran.clear()
    (tmp_path / "out/results.jsonl").unlink()
    run([own_run], [pets], tmp_path / "out", baselines=False, protocols=("knn", "segment"))
    assert ran == ["knn", "segment-fast"]


def test_results_of_other_settings_are_not_reused(own_run: Path, pets: Path, tmp_path: Path) -> None:
    wanted = run([own_run], [pets], tmp_path / "alone", baselines=False)
    common: dict[str, Any] = {"weights": str(own_run), "data": str(pets / "images"), "out": tmp_path / "out"}
    fast: dict[str, Any] = common | {"protocol": "fast", "workers": 0, "epochs": 3.0}
    knn(Knn(**common, k=(1,)))
    linear(Linear(**fast))
    linear(Linear(**fast, shots=2, draws=2))
    linear(Linear(**fast, pool="attentive"))
    segment(Segment(**fast | {"data": pets}))
    found = run([own_run], [pets], tmp_path / "out", baselines=False)
    assert {key: score.result.settings for key, score in found.items()} == {
        key: score.result.settings for key, score in wanted.items()
    }


def test_equal_weights_of_other_heads_or_normalization_are_other_encoders(backbone: Backbone, tmp_path: Path) -> None:
    shape = replace(backbone.architecture, heads=6)
    others = {"heads": {"architecture": shape}, "normalization": {"mean": (0.5,) * 3, "std": (0.1,) * 3}}
    files = {name: tmp_path / f"{name}.safetensors" for name in ("plain", *others)}
    for name, file in files.items():
        replace(backbone, **others.get(name, {})).save(file)
    together = run([*files.values()], ["shapes:100"], tmp_path / "out", protocols=("knn",))
    rows = {name: score.percent for (_, name, _), score in together.items()}
    assert len({rows[name] for name in files}) == 3
    for name, file in files.items():
        alone = run([file], ["shapes:100"], tmp_path / name, protocols=("knn",))
        assert alone["shapes:100", name, "knn"].percent == rows[name]
        assert alone["shapes:100", "untrained", "knn"].percent == rows[f"untrained {file}"]
    pixels = [
        run([files[name]], ["shapes:100"], tmp_path / "pixels", protocols=("knn",))["shapes:100", "raw pixels", "knn"]
        for name in files
    ]
    assert pixels[0].percent == pixels[1].percent != pixels[2].percent == rows["raw pixels"]


def test_all_steps_make_a_curve(own_run: Path, class_folder: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(own_run / "checkpoints", keep=9)
    last = checkpoints.last
    assert last is not None
    state = load_checkpoint(last)
    state["method"] = {name: tensor * 1.1 for name, tensor in state["method"].items()}
    state["step"] = 2
    checkpoints.save(state, 2)
    other = Path(shutil.copytree(own_run, tmp_path / "again" / "tiny", symlinks=True))
    options: dict[str, Any] = {"all_steps": True, "protocols": ("knn",)}
    scores = run([own_run, other], [class_folder], tmp_path / "out", **options)
    assert [(name, score.entry.step, len(score.entry.runs)) for (_, name, _), score in scores.items()] == [
        *(("tiny, step 2 (1)", 2, 1), ("tiny, step 4 (2)", 4, 1)),
        *(("tiny, step 2 (3)", 2, 1), ("tiny, step 4 (4)", 4, 1)),
        *(("untrained", 0, 2), ("raw pixels", None, 0)),
    ]
    assert scores[str(class_folder), "tiny, step 4 (2)", "knn"].result.weights == load_backbone(own_run).digest()
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {f"evaluation.{e}" for e in ("md", "csv", "png")}
    figure = evaluation.curves(list(scores.values()), validate(Evaluate, {"runs": (str(own_run),), "data": ("x",)}))
    line = figure.axes[0].lines[0]
    assert list(line.get_xdata()) == [0, 2, 4]
    assert list(line.get_ydata()) == [
        scores[str(class_folder), name, "knn"].percent[0]
        for name in ("untrained", "tiny, step 2 (1)", "tiny, step 4 (2)")
    ]


def test_curves_leave_out_what_was_skipped(
    own_run: Path, pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "MOST_BYTES", 0)
    options: dict[str, Any] = {"all_steps": True, "protocols": ("segment",)}
    assert run([own_run], [pets], tmp_path / "out", **options) == {}
    assert not (tmp_path / "out/evaluation.png").exists()
    monkeypatch.undo()
    scores = run([own_run], [pets], tmp_path / "out", **options | {"baselines": False})
    given = {"runs": (str(own_run), "another"), "data": (str(pets),)}
    figure = evaluation.curves(list(scores.values()), validate(Evaluate, given))
    assert [line.get_label() for line in figure.axes[0].lines] == [str(own_run)]


def test_sets_with_labels_or_masks_only_stand_in_one_table(
    own_run: Path, pets: Path, class_folder: Path, backbone: Backbone, tmp_path: Path
) -> None:
    shutil.move(pets / "images/train/cat", tmp_path / "all")
    for kind in ("images", "masks"):  # no class folders
        for split in ("train", "test"):
            folder = tmp_path / "plain" / kind / split
            shutil.copytree(pets / kind / split / "dog", folder)
    backbone.save(tmp_path / "other.safetensors")
    runs, sets = [own_run, tmp_path / "other.safetensors"], [class_folder, tmp_path / "plain"]
    protocols = ("knn", "few-shot", "segment")
    scores = run(runs, sets, tmp_path / "out", protocols=protocols, shots=1)
    names = ["tiny", "other", f"untrained {own_run}", f"untrained {tmp_path / 'other.safetensors'}", "raw pixels"]
    assert [(data, name) for data, name, protocol in scores if protocol == "knn"] == [
        (str(class_folder), name) for name in names
    ]
    assert [key for key in scores if key[2] == "segment"] == [(str(sets[1]), name, "segment") for name in names[:4]]

    text = (tmp_path / "out/evaluation.md").read_text()
    assert "| data | encoder | kNN | 1-shot | mIoU |" in text
    value, low, high = scores[str(class_folder), "tiny", "knn"].percent
    assert f"| {class_folder} | tiny | {value:.1f} ± {(high - low) / 2:.1f} | " in text
    assert f"| {sets[1]} | tiny | – | – | " in text
    with (tmp_path / "out/evaluation.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(scores) == 5 * 2 + 4
    assert float(rows[0]["low"]) == pytest.approx(low, abs=1e-3) and rows[0]["protocol"] == "knn"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "folder"], "there is nothing to evaluate; give at least one run's folder"),
        (["tiny", "--data"], "there is nothing to evaluate; give at least one run's folder"),
        (["tiny", "--data", "folder"], "class class0 of folder (train) has 3 images, too few for 5 shots"),
        (["tiny", "--data", "nothing"], "nothing"),
        (["encoder.safetensors", "--data", "folder", "--all-steps"], "has no checkpoints for --all-steps"),
        (["tiny", "--data", "pets", "--ignore-index", "4", "7", "255"], "have the classes [9], without the ignored"),
        (["tiny", "--data", "folder", "--protocols", "segment"], "segment does not apply to folder; choose from knn"),
        (["tiny", "--data", "bad"], "is 32 × 47 px, the image 32 × 48; give masks of their images' size"),
        (["tiny", "--data", "empty"], "masks/train has no masks; put a PNG of class indices there"),
    ],
)
def test_mistakes_end_in_one_line(
    words: list[str],
    message: str,
    own_run: Path,
    class_folder: Path,
    pets: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(own_run / "encoder.safetensors", tmp_path)
    for name in ("bad", "empty"):
        shutil.copytree(pets, name)
    write_image(Path("bad/masks/train/cat/3.png"), np.zeros((47, 32), np.uint8))
    shutil.rmtree("empty/masks/train")
    Path("empty/masks/train").mkdir()
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", *words])
    line = capsys.readouterr().err
    assert stop.value.code == 2 and line.count("\n") == 1 and message in line


def test_the_splits_of_ade20k_are_no_classes(tmp_path: Path) -> None:
    for split, count in (("training", 4), ("validation", 2)):
        write_scenes(tmp_path / "images" / split, tmp_path / "annotations" / split, count)
    assert evaluation.open_set(str(tmp_path), Evaluate(("x",), (str(tmp_path),)), 3).keys() == {"segment"}


def test_folders_below_images_that_are_no_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split, city in (("train", "aachen"), ("train", "bonn"), ("val", "frankfurt")):
        write_scenes(tmp_path / "cities/images" / split / city, tmp_path / "cities/masks" / split / city, 2)
    settings = Evaluate(("x",), ("~/cities",), protocols=("segment",))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert evaluation.open_set("~/cities", settings, 3).keys() == {"segment"}
    with pytest.raises(ValueError, match=r"'frankfurt' in .* is not one of the 2 class folders"):
        evaluation.open_set("~/cities", replace(settings, protocols=()), 3)
