"""Curves: what stands on the axis, what is drawn."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from patchmix.report.curves import (
    MOST_POINTS,
    History,
    curves_data,
    curves_figure,
    read_history,
    show_curves,
)
from patchmix.settings import ShowCurves
from patchmix.study.doctor import loss_terms

ROWS = [
    {"kind": "monitor", "step": 0, "epoch": 0.0, "knn": 0.1, "rank": 5.0},
    *(
        {"kind": "train", "step": s, "epoch": s / 4, "oto": 3.0 - s / 8, "oto/chance": 3.5, "oto/floor": 0.5, "lr": 0.1}
        | {"seconds": 36.0 * s, "images_per_second": 10.0, "loss": 3.0}
        for s in (2, 4, 6)
    ),
    {"kind": "monitor", "step": 5, "epoch": 1.25, "knn": 0.4, "rank": None},
]


def test_axes() -> None:
    history = History("a", ROWS, batch_size=32, flops_per_image=2e9)
    curves = {panel["key"]: panel["series"][0] for panel in curves_data([history])["panels"]}
    assert (curves["knn"]["x"]["epochs"], curves["knn"]["y"]) == ([0.0, 1.25], [10, 40])
    assert curves["knn"]["x"]["images"] == [0, 160]
    assert curves["knn"]["x"]["hours"] == pytest.approx([0, 0.05])  # between steps 4 and 6: 180 s
    assert curves["oto"]["x"]["flops"] == [32 * s * 2e9 for s in (2, 4, 6)]
    assert curves["rank"]["y"] == [5.0]
    with pytest.raises(ValueError, match="with its batch size; choose the axis among epochs, hours"):
        curves_figure([History("b", ROWS)], axis="images")
    with pytest.raises(ValueError, match="FLOPs per image"):
        curves_figure([History("b", ROWS, batch_size=32)], axis="flops")


def test_runs_are_overlaid_with_chance_and_floor() -> None:
    figure = curves_figure([History("a", ROWS), History("b", ROWS)])
    panels = {axis.get_title(): axis for axis in figure.axes if axis.get_title()}
    assert list(panels) == [
        *("loss: oto", "kNN accuracy (%)", "effective rank of the features", "learning rate", "images per second")
    ]
    loss, knn = panels["loss: oto"], panels["kNN accuracy (%)"]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["a", "chance", "floor", "b"]
    assert len(loss.lines) == 2 + 2  # each run, bounds once
    assert list(knn.lines[0].get_ydata()) == pytest.approx([10, 40])
    short = [row for row in ROWS if row["step"] <= 4]
    loss = curves_figure([History("a", short), History("b", ROWS)]).axes[0]
    (chance,) = (line for line in loss.lines if line.get_label() == "chance")
    assert list(chance.get_xdata()) == [0.5, 1.0, 1.5]  # as long as the longest run


def test_labels_of_short_times_do_not_overlap() -> None:
    rows = [row | {"seconds": 1.1 * row["step"]} for row in ROWS if row["kind"] == "train"]
    figure = curves_figure([History("a", rows)], axis="hours")
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [text.get_window_extent(renderer) for text in figure.axes[0].get_xticklabels()]
    assert len(boxes) > 3
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_runs_of_the_same_name_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / parent / "tiny" for parent in ("one", "two")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setattr("patchmix.report.curves.write", lambda figures: list(figures.values()))
    (figure,) = show_curves(ShowCurves(tuple(folders), tmp_path / "c.svg"))
    texts = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]  # type: ignore[attr-defined]
    assert texts == ["tiny (1)", "tiny (2)"]


def test_real_run_and_mistakes(run: Path, tmp_path: Path) -> None:
    history = read_history(run)
    assert history.batch_size == 32 and loss_terms(history.rows) == ["oto", "mto", "region"]
    drawn = {panel["key"] for panel in curves_data([history])["panels"]}
    assert drawn >= {"oto", "mto", "region", "knn", "rank", "lr", "weight_decay", "momentum"}
    assert history.flops_per_image is not None and history.flops_per_image > 1e6
    assert show_curves(ShowCurves((run, run), tmp_path / "hours.pdf", axis="hours"))[0].is_file()
    assert show_curves(ShowCurves((run,), tmp_path / "f.svg", axis="flops"))[0].is_file()
    with pytest.raises(ValueError, match="give at least one run"):
        show_curves(ShowCurves((), tmp_path / "f.svg"))
    with pytest.raises(ValueError, match=r"no metrics\.jsonl"):
        show_curves(ShowCurves((tmp_path,), tmp_path / "f.svg"))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="nothing to draw yet"):
        show_curves(ShowCurves((tmp_path,), tmp_path / "f.svg"))


def test_the_pages_series_are_thin_and_hold_the_last_point() -> None:
    rows = [{"step": s, "epoch": s / 10, "loss": float(s), "seconds": s} for s in range(10 * MOST_POINTS + 3)]
    data = curves_data([History("a", rows), History("b", [])])
    (series,) = data["panels"][0]["series"]
    assert len(series["y"]) <= MOST_POINTS + 1 and series["y"][-1] == rows[-1]["loss"]
    assert [kind for kind, _ in data["axes"]] == ["epochs", "hours"] == list(series["x"])
    assert curves_data([History("b", [])])["panels"] == []
    json.dumps(data, allow_nan=False)
