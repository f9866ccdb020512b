from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from patchmix.cli import main
from patchmix.data.shapes import shapes_source
from patchmix.evaluate.finetune import finetune
from patchmix.evaluate.knn import knn
from patchmix.evaluate.labeled import few_labels, open_labeled
from patchmix.evaluate.linear import linear
from patchmix.evaluate.protocol import changed
from patchmix.evaluate.results import mean_over_draws, protocol_name, read_results, wilson
from patchmix.interop.backbone import Backbone
from patchmix.settings import Finetune, Knn, Linear
from tests.evaluate.conftest import write_image


def test_corrected_labels_are_other_data(tmp_path: Path) -> None:
    """Also in a file of the same size: a result for the old labels must not be reused."""
    found = []
    for labels in ([0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 0, 1]):
        table = pa.table({"image": [b"a", b"b", b"c", b"d"], "label": labels})
        pq.write_table(table, tmp_path / "train.parquet")
        found.append(((tmp_path / "train.parquet").stat().st_size, open_labeled(tmp_path).fingerprint()))
    assert found[0] == found[2] != found[1]
    assert found[0][0] == found[1][0]


def test_masks_are_not_a_class(tmp_path: Path) -> None:
    for folder in ("images", "masks"):
        write_image(tmp_path / folder / "1.png", np.zeros((8, 8, 3), np.uint8))
    with pytest.raises(ValueError, match="images with masks instead of classes; use `patchmix segment`"):
        open_labeled(tmp_path)


# ---------------------------------------------------------------------------------------------------------- the draws


@given(seed=st.integers(0, 1000), shots=st.integers(1, 4))
def test_shots_are_so_many_of_each_class_and_depend_on_seed_and_draw_only(seed: int, shots: int) -> None:
    source = shapes_source("train", 63)
    assert source.labels is not None
    drawn = [few_labels(source, shots=shots, fraction=None, seed=seed, draw=draw) for draw in range(3)]
    for positions in drawn:
        assert np.bincount(source.labels[positions]).tolist() == [shots] * 10
        assert len(set(positions.tolist())) == 10 * shots
    again = few_labels(source, shots=shots, fraction=None, seed=seed, draw=1)
    assert np.array_equal(again, drawn[1])
    assert not np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[1], few_labels(source, shots=shots, fraction=None, seed=seed + 1, draw=1))


def test_a_fraction_is_taken_of_each_class(tmp_path: Path) -> None:
    for name, count in {"cat": 40, "dog": 10, "emu": 3}.items():
        for i in range(count):
            write_image(tmp_path / name / f"{i}.png", np.full((4, 4, 3), i, np.uint8))
    train = open_labeled(tmp_path).train
    assert train.labels is not None
    positions = few_labels(train, shots=None, fraction=0.2, seed=0, draw=0)
    assert np.bincount(train.labels[positions]).tolist() == [8, 2, 1]
    positions = few_labels(train, shots=None, fraction=0.01, seed=0, draw=0)
    assert np.bincount(train.labels[positions]).tolist() == [1, 1, 1]  # every class has a label


def test_all_images_are_drawn_equally_often() -> None:
    source = shapes_source("train", 60)  # six of each class
    counts = np.zeros(60)
    for draw in range(600):
        counts[few_labels(source, shots=2, fraction=None, seed=0, draw=draw)] += 1
    assert np.abs(counts / 600 - 2 / 6).max() < 4 * math.sqrt(2 / 9 / 600)  # four standard deviations


# ------------------------------------------------------------------------------------------------------- the intervals


def test_the_interval_has_the_error_of_the_draws_and_of_the_test_images() -> None:
    values = [0.41, 0.44, 0.48]
    mean, (low, high) = mean_over_draws(values, 10**9)  # so many test images have no error
    t = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert (low, high) == pytest.approx(t, abs=1e-4)
    assert mean == pytest.approx(np.mean(values))
    assert mean_over_draws([0.4], 50) == (0.4, pytest.approx(wilson(0.4, 50)))
    assert mean_over_draws([0.4, 0.4], 50)[1] == pytest.approx(wilson(0.4, 50))
    assert mean_over_draws([0.0, 1.0], 50)[1] == (0.0, 1.0)
    wider = mean_over_draws(values, 100)[1]
    assert wider[0] < min(low, wilson(mean, 100)[0]) and wider[1] > max(high, wilson(mean, 100)[1])


def test_names_of_protocols() -> None:
    assert protocol_name("knn") == "kNN"
    assert protocol_name("knn@5-shot") == "kNN, 5-shot"
    assert protocol_name("linear-fast@1%") == "linear (fast), 1%"


# ---------------------------------------------------------------------------------------------------- whole evaluation


@pytest.mark.parametrize("fraction", [False, True])
def test_knn_is_the_mean_over_the_draws(fraction: bool, backbone: Backbone, tmp_path: Path) -> None:
    few: dict[str, Any] = {"fraction": 0.05} if fraction else {"shots": 3}
    result = knn(Knn("", "shapes:200", **few, draws=4, out=tmp_path), backbone)
    assert result.protocol == ("knn@5%" if fraction else "knn@3-shot")
    assert result.settings["bank"] == (10 if fraction else 30)
    draws = result.details["top1_of_draws"]
    assert len(set(draws)) > 1 and result.top1 == pytest.approx(np.mean(draws))
    assert result.interval() == pytest.approx(mean_over_draws(draws, 2000)[1])
    (stored,) = read_results(tmp_path)
    assert stored.metrics == result.metrics and stored.interval() == pytest.approx(result.interval())
    again = knn(Knn("", "shapes:200", **few, draws=4), backbone)
    assert again.metrics == result.metrics
    other = knn(Knn("", "shapes:200", **few, draws=4, seed=1), backbone)
    assert other.metrics != result.metrics


def test_the_fast_linear_protocol_with_few_labels(backbone: Backbone) -> None:
    result = linear(Linear("", "shapes:200", protocol="fast", shots=4, draws=3, epochs=20, workers=0), backbone)
    assert result.protocol == "linear-fast@4-shot"
    assert result.settings["chosen_on"] == "10 held-out training images"
    assert result.top1 == pytest.approx(np.mean(result.details["top1_of_draws"])) and result.top1 > 0.1
    one = linear(Linear("", "shapes:200", protocol="fast", shots=1, draws=2, epochs=20, workers=0), backbone)
    assert one.settings["candidates"] == 1 and one.top1 > 0.1  # there is nothing to choose on


def test_fine_tuning_with_few_labels(backbone: Backbone, tmp_path: Path) -> None:
    settings = Finetune("", "shapes:100", shots=2, draws=2, epochs=1, workers=0, out=tmp_path)
    result = finetune(settings, backbone)
    assert result.protocol == "finetune@2-shot"
    assert result.settings["batch_size"] == 20
    assert len(list(tmp_path.glob("finetune-*"))) == 2  # a training for each draw
    assert len(result.details["top1_of_draws"]) == 2
    again = finetune(settings, backbone)  # goes on at its end
    assert again.metrics == result.metrics and len(list(tmp_path.glob("finetune-*"))) == 2


def test_without_a_test_split_the_drawn_images_are_not_tested_on(backbone: Backbone, class_folder: Path) -> None:
    result = knn(Knn("", str(class_folder), shots=2, draws=2), backbone)
    assert result.settings["test"] == "a fifth held out"
    assert result.images == 3
    data = open_labeled(class_folder).with_test()
    assert data.test is not None
    tested = {data.test.key(i) for i in range(len(data.test))}
    for draw in range(20):
        positions = few_labels(data.train, shots=2, fraction=None, seed=0, draw=draw)
        assert not tested & {data.train.key(i) for i in positions}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["knn", "--shots", "5"], "folder (train) has 3 images, too few for 5 shots; use --shots 3, or add images"),
        (["linear", "--protocol", "fast", "--shots", "4"], "too few for 4 shots"),
        (["finetune", "--shots", "9"], "too few for 9 shots"),
        (["knn", "--shots", "1", "--fraction", "0.5"], "give one of them"),
        (["linear", "--shots", "1"], "add --protocol fast"),
        (["knn", "--fraction", "1.5"], "fraction"),
        (["knn", "--shots", "2", "--k", "7"], "only 6 labeled images can vote"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str],
    message: str,
    backbone: Backbone,
    class_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    backbone.save(tmp_path / "encoder.safetensors")
    monkeypatch.setattr("patchmix.evaluate.features.extract_all", lambda *_, **__: pytest.fail("the encoder ran"))
    with pytest.raises(SystemExit) as stop:
        main([words[0], str(tmp_path / "encoder.safetensors"), "--data", str(class_folder), *words[1:]])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and message in error


def test_the_number_of_draws_tells_results_apart() -> None:
    assert changed(Knn("w", "d", shots=5, draws=20)) == {"draws": 20}
    assert changed(Knn("w", "d", draws=20)) == {}  # without few labels there are none
