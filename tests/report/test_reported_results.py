"""The report and the comparison of a real run, with results of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from patchmix.evaluate.results import Result, append_result
from patchmix.interop.loading import load_backbone
from patchmix.report.page import read_record, report
from patchmix.settings import Compare, Report
from patchmix.study.compare import compare, rows_of


@pytest.fixture
def run(own_run: Path) -> Path:
    common = {"fingerprint": "f", "encoder": "vit", "weights": load_backbone(own_run).digest()}
    append_result(own_run, Result("knn", {"top1": 0.5}, 100, "shapes", **common))
    append_result(own_run, Result("detect", {"box_ap": 0.519, "mask_ap": 0.461}, 50, "coco", **common))
    return own_run


def test_detection_stands_beside_accuracies(run: Path) -> None:
    console = Console(record=True, width=100)
    compare(Compare((run,)), console)
    text = console.export_text()
    assert "50.00" in text
    assert "40.4 … 59.6" in text
    assert "51.9 / 46.1" in text


def test_the_report_has_results_command_and_cost(run: Path) -> None:
    page = report(Report((run,), images=0)).read_text()
    assert (run / "report.html").is_file()
    for word in ("51.9 / 46.1", "50.00", "--config", "kNN 50.0 %"):
        assert word in page


def test_a_run_has_a_command_a_cost_and_perhaps_the_papers_numbers(run: Path) -> None:
    record = read_record(run)
    assert record.command == f"patchmix pretrain shapes:64 --out runs/again --config {run / 'config.yaml'}"
    assert record.history.flops_per_image is not None and record.history.flops_per_image > 1e6
    rows = rows_of("a", record.config, record.results)
    assert len(rows) == 2 and all(row.paper is None for row in rows)  # the demo is not the paper's training
    with pytest.raises(ValueError, match="give at least one run"):
        report(Report(()))
