"""Rows against the paper's tables, intervals against scipy, and what is printed and written."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from patchmix.evaluate.results import Result, t_quantile
from patchmix.report.ablation_table import (
    AblationRun,
    AblationTable,
    ablation_figure,
    choose_rows,
    estimate,
    print_table,
    rows_of,
    write_table,
)

METHODS = ("patchmix", "mocov3", "dino")
# As the paper prints them: CIFAR-10 linear, kNN, CIFAR-100 linear, kNN.
PAPER = {
    "mix": {
        "baseline": (89.8, 88.2, 66.0, 61.2),
        "mixup": None,
        "cutmix": None,
        "cutmix+mixup": (90.6, 88.7, 66.8, 62.3),
        "regionswap": (92.1, 91.3, 70.4, 64.2),
        "resizemix": (94.2, 92.1, 77.1, 66.7),
        "patchmix": (96.0, 94.6, 78.7, 75.4),
    },
    "num-mix": {
        "m1": (89.8, 88.2, 66.0, 61.2),
        "m2": (95.6, 94.3, 77.6, 71.1),
        "m3": (96.0, 94.6, 78.7, 75.4),
        "m4": (95.7, 94.3, 75.2, 70.9),
    },
    "terms": {
        "oto": (91.1, 87.0, 69.7, 59.7),
        "mto": (None, None, 61.3, 57.2),
        "mtm": (None, None, 52.6, 47.4),
        "oto+mto": (95.4, 93.8, 77.9, 69.2),
        "oto+mto+mtm": (96.0, 94.6, 78.7, 75.4),
    },
    "epochs": {"eighth": None, "quarter": None, "half": (96.0, 94.6, 78.7, 75.4), "full": (96.4, 95.1, 78.9, 74.6)},
    "method": {
        "patchmix": (96.0, 94.6, 78.7, 75.4),
        "mocov3": (90.2, 89.1, 66.4, 62.3),
        "dino": (92.6, 91.8, 63.8, 60.6),
    },
}


@pytest.mark.parametrize("ablation", PAPER)
def test_rows_and_numbers_are_the_papers(ablation: str) -> None:
    found = {row.name: row.paper for row in rows_of(ablation, METHODS)}
    assert found == PAPER[ablation]
    assert list(found) == list(PAPER[ablation])


def test_rows_are_chosen_by_name() -> None:
    rows = rows_of("terms", METHODS)
    assert [row.name for row in choose_rows(rows, ["oto+mto", "oto"])] == ["oto", "oto+mto"]
    assert choose_rows(rows, []) == rows
    with pytest.raises(ValueError, match="unknown row 'oto-mto'; did you mean 'oto\\+mto'"):
        choose_rows(rows, ["oto-mto"])
    with pytest.raises(ValueError, match="unknown ablation 'mixes'; did you mean 'mix'"):
        rows_of("mixes", METHODS)


# ------------------------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 10, 29, 100])
def test_students_quantiles(freedom: int) -> None:
    assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


def result(top1: float, protocol: str = "knn", images: int = 400) -> Result:
    return Result(protocol, {"top1": top1}, images, "shapes", "f", "vit", "w" * 64)


def test_intervals_of_one_and_of_several_seeds() -> None:
    values = [0.41, 0.44, 0.48]
    found = estimate([result(v) for v in values])
    low, high = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert found is not None
    assert found == pytest.approx((np.mean(values), low, high))
    one = estimate([result(0.41)])
    wilson = stats.binomtest(round(0.41 * 400), 400).proportion_ci(0.95, method="wilson")
    assert one is not None
    assert one == pytest.approx((0.41, wilson.low, wilson.high))
    assert estimate([]) is None


# --------------------------------------------------------------------------------------------------------- the table


def ablated(ablation: str = "num-mix", *, labeled: bool = True, seeds: int = 2) -> AblationTable:
    rows = choose_rows(rows_of(ablation, METHODS), ["m2", "m3", "m4"] if ablation == "num-mix" else [])
    runs = []
    for seed in range(seeds):
        for i, row in enumerate(rows[:2]):
            top1 = 0.5 + 0.1 * i + 0.02 * seed
            results = {p: result(top1, p) for p in ("knn", "linear-fast")} if labeled else {}
            health = {"rank": 12.0 + seed, "mean_cosine": 0.25}
            cost = (1 + i) * 2e9
            runs.append(
                AblationRun(row.name, seed, f"out/{row.name}-seed{seed}", 1000, 60.0 + seed, cost, results, health)
            )
    runs.append(AblationRun(rows[2].name, 0, "out/x", failure="step 3: loss is nan"))
    return AblationTable(ablation, rows, range(seeds), "shapes", "shapes" if labeled else None, "a ViT, 3 epochs", runs)


def printed(table: AblationTable) -> str:
    out = io.StringIO()
    print_table(table, Console(file=out, width=80))
    return out.getvalue()


def test_the_table_fits_80_columns_and_says_which_interval() -> None:
    text = printed(ablated())
    half = 100 * stats.t.ppf(0.975, 1) * 0.01
    assert f"51.0 ± {half:.1f}" in text and f"61.0 ± {half:.1f}" in text
    assert "Student's t over the seeds" in " ".join(text.split()) and "2 of 2" in text and "0 of 2, 1 failed" in text
    assert "1,000" in text and "60" in text
    one = printed(ablated(seeds=1))
    assert "of rows with one seed Wilson's for the test images" in " ".join(one.split()) and "50.0 ± 4.9" in one
    assert all(len(line.rstrip()) <= 80 for line in (text + one).splitlines())


def test_without_labels_health_is_shown() -> None:
    text = printed(ablated(labeled=False))
    assert "12.5" in text and "0.25" in text and "kNN" not in text


@pytest.mark.parametrize("ablation", ["num-mix", "epochs", "method"])
def test_files(tmp_path: Path, ablation: str) -> None:
    table = ablated(ablation)
    write_table(table, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["ablation.md", "ablation.csv", "ablation.json", "ablation.png"]
    )
    page = (tmp_path / "ablation.md").read_text()
    assert "51.0 ± 12.7" in page and "failed: step 3: loss is nan" in page and "| 94.6 | 96.0 | 75.4 | 78.7 |" in page
    lines = list(csv.DictReader((tmp_path / "ablation.csv").open()))
    assert [float(line["knn_mean"] or "nan") for line in lines[:2]] == pytest.approx([0.51, 0.61])
    assert lines[2]["knn_mean"] == "" and lines[2]["failed"] == "1"
    stored = json.loads((tmp_path / "ablation.json").read_text())
    assert stored["rows"][1]["runs"][1]["results"]["knn"]["metrics"]["top1"] == pytest.approx(0.62)
    assert stored["rows"][1]["linear_low"] == pytest.approx(0.61 - stats.t.ppf(0.975, 1) * 0.01)
    assert cv2.imread(str(tmp_path / "ablation.png")).std() > 5  # not blank


def test_a_figure_has_a_point_with_a_bar_for_each_row() -> None:
    knn, linear = ablation_figure(ablated()).axes
    assert [label.get_text() for label in knn.get_yticklabels()] == ["m2", "m3", "m4"]
    points = [container.lines[0].get_xydata()[0].tolist() for container in linear.containers]
    assert points == [pytest.approx([51.0, 0]), pytest.approx([61.0, 1])]  # %, row
