"""The report and the comparison of a real run, with results of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from patchmix.evaluate.results import Result, append_result
from patchmix.study.compare import compare, print_comparison
from patchmix.study.reporting import facts_of, report_runs


@pytest.fixture
def run(own_run: Path) -> Path:
    common = {"fingerprint": "f", "encoder": "vit", "weights": "0123456789"}
    append_result(own_run, Result("knn", {"top1": 0.5}, 100, "shapes", **common))
    append_result(own_run, Result("detect", {"box_ap": 0.519, "mask_ap": 0.461}, 50, "coco", **common))
    return own_run


def test_detection_stands_beside_accuracies(run: Path) -> None:
    console = Console(record=True, width=100)
    print_comparison(compare([run]), console)
    text = console.export_text()
    assert "50.00" in text
    assert "40.4 … 59.6" in text
    assert "51.9 / 46.1" in text


def test_the_report_has_results_command_and_cost(run: Path) -> None:
    page = report_runs([run], images=0).read_text()
    assert (run / "report.html").is_file()
    for word in ("51.9 / 46.1", "50.00", "--config", "kNN 50.0 %"):
        assert word in page


def test_facts_of_a_run_and_of_anything_else(run: Path, tmp_path: Path) -> None:
    facts = facts_of(run)
    assert facts.command == f"patchmix pretrain shapes:64 --out runs/again --config {run / 'config.yaml'}"
    assert facts.flops_per_image is not None and facts.flops_per_image > 1e6
    assert facts.paper == {}  # the demo is not the paper's training
    assert facts_of(tmp_path).command is None
    with pytest.raises(ValueError, match="give at least one run"):
        report_runs([])
