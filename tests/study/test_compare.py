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
from patchmix.study.compare import compare, paper_accuracies, read_rows


def paper_config(data: str = "cifar10", epochs: float = 800.0, model: str = "vit_tiny_patch2_32") -> Config:
    config = RECIPES["paper"](model, epochs=epochs)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, path=data))


def result(protocol: str, top1: float, *, data: str = "cifar10", weights: str = "a" * 64) -> Result:
    return Result(
        protocol=protocol,
        metrics={"top1": top1},
        images=10_000,
        data=data,
        fingerprint="f",
        encoder="vit_tiny_patch2_32",
        weights=weights,
    )


def make_run(folder: Path, config: Config | None, *results: Result) -> Path:
    folder.mkdir()
    if config is not None:
        (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    for line in results:
        append_result(folder, line)
    return folder


def test_results_stand_beside_the_papers_numbers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", paper_config(), result("knn", 0.91), result("linear", 0.95), result("knn", 0.92))
    (row,) = read_rows([run])
    assert row.config == paper_config() and row.model == "vit_tiny_patch2_32"
    assert row.results["knn"].top1 == 0.92  # the latest
    assert row.paper == {"knn": 92.9, "linear": 94.4, "finetune": 97.5}  # linear-fast is not the paper's protocol


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


def test_weights_and_data_are_not_mixed_in_a_row(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "a",
        paper_config(),
        result("knn", 0.5, weights="b" * 64),
        result("linear", 0.6),
        result("knn", 0.7, data="cifar100"),
    )
    rows = read_rows([run])
    assert [(row.data, row.weights and row.weights[0], sorted(row.results)) for row in rows] == [
        ("cifar10", "b", ["knn"]),
        ("cifar10", "a", ["linear"]),
        ("cifar100", "a", ["knn"]),
    ]


def test_runs_without_results_and_results_without_a_run(tmp_path: Path) -> None:
    trained = make_run(tmp_path / "trained", paper_config())
    imported = make_run(tmp_path / "imported", None, result("knn", 0.8))
    first, second = read_rows([trained, imported])
    assert first.results == {} and first.paper == {}
    assert (second.config, second.model, second.paper) == (None, "vit_tiny_patch2_32", {})
    with pytest.raises(ValueError, match="neither a run"):
        read_rows([tmp_path / "nothing"])
    with pytest.raises(ValueError, match="nothing to compare"):
        read_rows([])


def test_the_table(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", paper_config(), result("knn", 0.9134))
    other = make_run(tmp_path / "b", None, result("linear-fast", 0.5), result("knn@5-shot", 0.3))
    stream = io.StringIO()
    compare(Compare((run, other)), Console(file=stream, width=240))
    text = stream.getvalue()
    for wanted in ("91.34", "90.8 … 91.9", "paper 92.9", "linear (fast)", "50.00", "aaaaaaaa", "kNN, 5-shot", "30.00"):
        assert wanted in text
    assert "fine-tune" not in text  # nobody has one
