"""docs/results/experiments.py: every training is one that `patchmix pretrain` knows, and the queue continues."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from patchmix.cli import parse
from patchmix.config import parse_minutes
from patchmix.settings import Pretrain

DOCS = Path(__file__).resolve().parents[1] / "docs"


def script(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def experiments() -> Any:
    return script(DOCS / "results" / "experiments.py")


@pytest.mark.parametrize("group", script(DOCS / "results" / "experiments.py").GROUPS)
def test_every_training_is_a_known_one(experiments: Any, group: str) -> None:
    seen = set()
    for training in experiments.rows(group):
        flags = ["cifar10", "--out", "run", *experiments.flags(training, 100.0, "shapes:500")]
        config = parse(Pretrain, flags, prog="patchmix pretrain").run
        assert config.train.seed == training.seed
        assert config.train.epochs == pytest.approx(parse_minutes(training.budget) * 60 * 100 / 500, rel=1e-3)
        assert group == "speed" or config.recipe == "fast"
        assert (config.model.dim, config.model.depth) == (128, 4)
        seen.add((str(config), str(training.part), training.evaluations))
    assert len(seen) == len(list(experiments.rows(group)))  # no two of a group are the same


def test_what_is_in_the_log_is_not_trained_again(
    experiments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Path] = []

    def train(data: str, folder: Path, options: list[str], *evaluations: Any) -> dict[str, float]:
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append(folder)
        return {"images": 1, "seconds": 2, "gflops_per_image": 0.1, "knn": 50.0}

    measured: list[str] = []

    def images_per_second(data: str, out: Path, training: Any) -> float:
        measured.append(training.name)
        return 123.4

    monkeypatch.setattr(experiments, "train", train)
    monkeypatch.setattr(experiments, "images_per_second", images_per_second)
    log = tmp_path / "new" / "runs.csv"
    call = ["shapes", "views", "--out", str(log.parent)]
    experiments.main([*call, "--measure"])
    assert not trained
    assert measured == [f"{method}, {views}" for views in experiments.VIEWS for method in ("fast", "mocov3")]
    with pytest.raises(KeyboardInterrupt):
        experiments.main(call)
    trained.clear()
    experiments.main([*call, "--budget", "1min", "--settings=--momentum 0.99", "--only", "fast, fl"])
    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["seed"], row["budget"]) for row in rows] == [
        ("fast, flips", "0", "5min"),
        ("mocov3, flips", "0", "5min"),
        ("fast, flips", "1", "5min"),
        ("fast, flips", "2", "1min"),
    ]
    assert rows[-1]["settings"] == f"{experiments.VIEWS['flips']} --momentum 0.99"
    assert len(trained) == 1
    assert len(measured) == 7  # flips with this momentum are new


def test_what_was_chosen_is_tested_without_training_it_again(
    experiments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, calls = tmp_path / "cifar10", []
    data.mkdir()
    for name in ("train", "test"):
        pq.write_table(pa.table({"label": [0]}), data / f"{name}.parquet")

    def train(*call: Any) -> dict[str, float]:
        calls.append(call)
        return {"images": 1, "seconds": 2, "gflops_per_image": 0.1, "knn": 50.0}

    monkeypatch.setattr(experiments, "train", train)
    monkeypatch.setattr(experiments, "flags", lambda *_: [])
    monkeypatch.setattr(experiments, "images_per_second", lambda *_: 100.0)
    experiments.main([str(data), "sizes", "bf16", "--out", str(tmp_path / "out"), "--only", "fast, seed 0"])
    sizes, bf16 = calls
    assert sizes[:3] == bf16[:3]  # images, folder and flags
    assert (sizes[3], bf16[3]) == (sizes[0], str(data))  # what they are evaluated on


def test_parts_of_the_training_images(experiments: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": range(50_000)}), tmp_path / "train.parquet")
    pq.write_table(pa.table({"label": range(-9, 0)}), tmp_path / "test.parquet")

    def labels(group: str) -> list[list[int]]:
        folder = Path(experiments.cut(str(tmp_path), next(experiments.rows(group)), tmp_path / "parts"))
        files = [folder / f"{name}.parquet" for name in ("train", "test")]
        return [pq.read_table(file)["label"].to_pylist() for file in files if file.exists()]

    assert labels("without") == [list(range(50_000))]
    assert labels("small") == [list(range(1_000)), list(range(-9, 0))]
    one_thousand = Path(experiments.repeated(tmp_path / "parts" / "data-1000-test")) / "train.parquet"
    assert pq.read_table(one_thousand)["label"].to_pylist() == list(range(1_000)) * 20
    assert labels("views") == [list(range(50_000)), list(range(-9, 0))]


def test_tables_of_the_results_follow_from_the_log() -> None:
    page, figures = (DOCS / "results.md").read_text(encoding="utf-8"), script(DOCS / "figures.py")
    tables = [figures.table_of_parts(group, base) for group, base in figures.TABLES.items()]
    assert [len(rows) >= expected for rows, expected in zip(tables, (20, 9, 6), strict=True)] == [True] * 3
    for rows in (*tables, figures.table_of_few_images(), figures.table_of_sizes()):
        assert "\n".join(rows) in page


@pytest.mark.slow
def test_a_training_of_the_queue_for_real(experiments: Any, tmp_path: Path) -> None:
    log = tmp_path / "runs.csv"
    experiments.main(["shapes:256", "hour", "--out", str(tmp_path), "--csv", str(log), "--budget", "20s"])
    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["fast", "mocov3"]
    assert all(int(row["images"]) > 0 and float(row["knn"]) > 0 and float(row["gflops_per_image"]) > 0 for row in rows)
