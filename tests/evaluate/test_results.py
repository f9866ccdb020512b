from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from patchmix.evaluate.results import Result, append_result, print_result, read_results, wilson
from patchmix.progress import new_bar


def test_a_name_with_a_rare_line_end_does_not_cut_its_result(tmp_path: Path) -> None:
    append_result(tmp_path, result := make_result(data="a\u2028b"))
    assert read_results(tmp_path) == [result]


def test_names_in_brackets_are_no_styles(capsys: pytest.CaptureFixture[str]) -> None:
    classes = [{"name": name, "iou": 0.5} for name in ("[sky]", "[/sea]")]
    print_result(replace(make_result(), details={"classes": classes}))
    assert "[sky]" in (printed := capsys.readouterr().out) and "[/sea]" in printed


def test_a_bar_shows_names_in_brackets() -> None:
    screen = io.StringIO()
    with new_bar(Console(file=screen, force_terminal=True, width=120)) as bar:
        bar.add_task("features of data/[old]/train", total=1)
    assert "[old]" in screen.getvalue()


def make_result(protocol: str = "knn", top1: float = 0.9, images: int = 100, data: str = "cifar10") -> Result:
    return Result(
        protocol=protocol,
        metrics={"top1": top1, "top5": 0.99},
        images=images,
        data=data,
        fingerprint="f" * 32,
        encoder="vit_tiny_patch2_32",
        weights="0123456789abcdef",
        settings={"k": 20, "temperature": 0.07},
    )


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17, Table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_has_the_published_values(hits: int, count: int, low: float, high: float) -> None:
    assert wilson(hits / count, count) == pytest.approx((low, high), abs=5e-5)


@given(count=st.integers(1, 100_000), share=st.floats(0, 1))
def test_wilson_solves_its_equation(count: int, share: float) -> None:
    """Both ends p satisfy |share − p| = z √(p(1 − p)/n), and lie in 0…1 around the share."""
    low, high = wilson(share, count)
    assert 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1
    for end in (low, high):
        assert abs(share - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / count), abs=1e-6)


def test_results_come_back_in_order(tmp_path: Path) -> None:
    results = [make_result(top1=0.5), make_result("finetune", top1=0.75)]
    for result in results:
        append_result(tmp_path / "run", result)
    assert read_results(tmp_path / "run") == results
    assert read_results(tmp_path) == []
    assert results[0].date[:2] == "20" and "T" in results[0].date


def test_a_line_cut_short_costs_only_itself(tmp_path: Path) -> None:
    first, second, third = make_result(top1=0.1), make_result(top1=0.2), make_result(top1=0.3)
    append_result(tmp_path, first)
    path = append_result(tmp_path, second)
    path.write_bytes(path.read_bytes()[:-30])
    append_result(tmp_path, third)
    assert read_results(tmp_path) == [first, third]


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"can't write to .*results\.jsonl"):
        append_result(tmp_path / "file", make_result())


def test_the_table_shows_intervals_and_settings() -> None:
    stream = io.StringIO()
    print_result(make_result(), Console(file=stream, width=80))
    text = stream.getvalue()
    low, high = (f"{100 * end:.2f}" for end in wilson(0.9, 100))
    for wanted in ("kNN: vit_tiny_patch2_32 on cifar10", "90.00", low, high, "k 20", "temperature 0.07", "100 test"):
        assert wanted in text
