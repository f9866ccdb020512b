from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from patchmix.config import Config, to_yaml
from patchmix.evaluate.results import Result, append_result
from patchmix.recipes import RECIPES
from patchmix.settings import Compare
from patchmix.study.compare import compare, paper_accuracies


def paper_config(data: str = "cifar10", epochs: float = 800.0, model: str = "vit_tiny_patch2_32") -> Config:
    config = RECIPES["paper"](model, epochs=epochs)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, path=data))


def result(
    protocol: str, top1: float, *, data: str = "cifar10", weights: str = "a" * 64, changed: dict[str, Any] | None = None
) -> Result:
    return Result(
        protocol=protocol,
        metrics={"top1": top1},
        images=10_000,
        data=data,
        fingerprint="f",
        encoder="vit_tiny_patch2_32",
        weights=weights,
        changed=changed,
    )


def make_run(folder: Path, config: Config | None, *results: Result) -> Path:
    folder.mkdir()
    if config is not None:
        (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    for line in results:
        append_result(folder, line)
    return folder


def test_results_stand_beside_the_papers_numbers(tmp_path: Path) -> None:
    results = [result("knn", 0.91), result("linear", 0.95), result("linear-fast", 0.9), result("knn", 0.92)]
    run = make_run(tmp_path / "a", paper_config(), *results)
    rows = {row.protocol: row for row in compare(Compare((run,)))}
    assert all(row.run == str(run) and row.config == paper_config() for row in rows.values())
    assert rows["knn"].result is not None and rows["knn"].result.top1 == 0.92  # the latest
    paper = {"knn": 92.9, "linear": 94.4, "finetune": 97.5, "linear-fast": None}  # the last is not the paper's protocol
    assert {name: row.paper for name, row in rows.items()} == paper
    assert rows["finetune"].result is None and "not evaluated" in rows["finetune"].cells()


def test_the_table_has_short_names_where_they_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def table(*names: str, parent: Path = tmp_path) -> str:
        printed = io.StringIO()
        compare(Compare(tuple(parent / name for name in names)), Console(file=printed, width=300))
        return printed.getvalue()

    for name in ("a", "b", "sub", "sub/a"):
        make_run(tmp_path / name, None, result("knn", 0.9, data=str(tmp_path / "photos")))
    assert str(tmp_path) not in table("a", "b") and "photos" in table("a", "b")
    assert str(tmp_path / "a") in table("a", "sub/a") and str(tmp_path / "sub/a") in table("a", "sub/a")
    monkeypatch.chdir(tmp_path / "sub")
    assert "sub  kNN" in table(".", parent=Path())


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 200},
        {"base_lr": 1e-3},
        {"num_mix": 2},
        {"heads": 6},
        {"batch_size": 256},
        {"recipe": "demo"},
    ],
)
def test_another_training_has_no_number_of_the_papers(settings: dict[str, Any]) -> None:
    assert paper_accuracies(paper_config().replace(**settings), "cifar10") == {}


def test_what_does_not_change_the_training_may_differ() -> None:
    config = paper_config("sets/cifar10").replace(seed=7, workers=9, accumulate=2)
    assert paper_accuracies(config, "cifar10")["knn"] == 92.9
    assert paper_accuracies(config, "cifar100") == {}  # trained on one set and evaluated on another
    assert paper_accuracies(paper_config("cifar100"), "cifar100") != {}
    assert paper_accuracies(paper_config(epochs=1600), "cifar10")["knn"] == 93.5


def test_weights_and_data_are_not_mixed(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "a",
        paper_config(),
        result("knn", 0.5, weights="b" * 64),
        result("linear", 0.6),
        result("knn", 0.7, data="cifar100"),
    )
    found = [row for row in compare(Compare((run,))) if row.result]
    assert [(row.result.data, row.result.weights[0], row.protocol, row.paper) for row in found if row.result] == [
        ("cifar10", "b", "knn", 92.9),
        ("cifar10", "a", "linear", 94.4),
        ("cifar100", "a", "knn", None),  # the paper's was trained on it
    ]


def test_other_options_do_not_hide_the_default(tmp_path: Path) -> None:
    changed = {"k": [3], "pool": "mean"}
    pixels = result("knn", 0.4, weights="raw pixels")
    run = make_run(tmp_path / "a", None, result("knn", 0.8), result("knn", 0.6, changed=changed), pixels)
    rows = [row.cells() for row in compare(Compare((run,)))]
    assert [(row[1], row[3], row[6]) for row in rows] == [
        ("kNN", "80.00", "aaaaaaaa"),
        ("kNN", "40.00", "raw pixels"),
        ("kNN (k 3, pool mean)", "60.00", "aaaaaaaa"),
    ]


def test_runs_without_results_and_results_without_a_run(tmp_path: Path) -> None:
    trained = make_run(tmp_path / "trained", paper_config())
    imported = make_run(tmp_path / "imported", None, result("knn", 0.8))
    first, *paper = compare(Compare((trained, imported)))
    assert [(row.protocol, row.result, row.paper) for row in paper] == [
        ("knn", None, 92.9),
        ("linear", None, 94.4),
        ("finetune", None, 97.5),
    ]
    assert first.config is None and first.paper is None and first.result is not None and first.result.top1 == 0.8
    with pytest.raises(ValueError, match="neither a run"):
        compare(Compare((tmp_path / "nothing",)))
    with pytest.raises(ValueError, match="nothing to compare"):
        compare(Compare(()))


def test_the_table(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", paper_config(), result("knn", 0.9134))
    other = make_run(
        tmp_path / "b", None, result("another", 0.2), result("linear-fast", 0.5), result("knn@5-shot", 0.3)
    )
    stream = io.StringIO()
    rows = compare(Compare((run, other)), Console(file=stream, width=240))
    assert [row.protocol for row in rows if row.result] == ["knn", "knn@5-shot", "linear-fast", "another"]
    text = stream.getvalue()
    for wanted in ("91.34", "90.8 … 91.9", "92.9", "linear (fast)", "50.00", "aaaaaaaa", "kNN, 5-shot", "30.00"):
        assert wanted in text
    assert f"{run}: vit_tiny_patch2_32, recipe paper, 800 epochs on cifar10" in text
    assert "mIoU (fast)" not in text  # nobody has one
