from __future__ import annotations

import itertools
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchmix.data.contract import Source
from patchmix.data.shapes import shapes_source
from patchmix.evaluate import features, knn
from patchmix.evaluate.knn import fitting_ks, knn_predict
from patchmix.evaluate.labeled import Part
from patchmix.evaluate.monitor import Guard, monitor
from patchmix.evaluate.protocol import accuracy
from patchmix.evaluate.results import read_results
from patchmix.interop.backbone import Backbone
from patchmix.settings import Knn
from tests.oracles.knn import ranking, vote


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    bank=st.integers(2, 40),
    query_count=st.integers(1, 12),
    dim=st.integers(2, 6),
    classes=st.integers(1, 7),
    temperature=st.sampled_from([0.03, 0.07, 1.0]),
    block=st.sampled_from([1, 7, 64, 1 << 20]),
    rows=st.sampled_from([1, 5, 8192]),
    tile=st.sampled_from([1, 3, 128]),
    leave_one_out=st.booleans(),
)
def test_every_ranking_is_the_oracles(
    seed: int,
    bank: int,
    query_count: int,
    dim: int,
    classes: int,
    temperature: float,
    block: int,
    rows: int,
    tile: int,
    leave_one_out: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(bank, dim, generator=generator)
    labels = torch.randint(classes, (bank,), generator=generator)
    queries = vectors if leave_one_out else torch.randn(query_count, dim, generator=generator)
    available = bank - int(leave_one_out)
    ks = sorted({1, (available + 1) // 2, available})
    with pytest.MonkeyPatch.context() as patch:  # the answer may not depend on how the work is cut
        patch.setattr(knn, "BLOCK_ELEMENTS", block)
        patch.setattr(knn, "QUERY_ROWS", rows)
        patch.setattr(knn, "TILE_ROWS", tile)
        found = knn_predict(vectors, labels, queries, ks=ks, temperature=temperature, leave_one_out=leave_one_out)
    width = int(labels.max()) + 1
    for k in ks:
        for i, query in enumerate(queries.double().numpy()):
            without = i if leave_one_out else None
            votes = vote(
                vectors.double().numpy(), labels.tolist(), query, k=k, temperature=temperature, without=without
            )
            ordered = sorted(votes.values(), reverse=True)
            if any(a - b < 1e-4 * a for a, b in itertools.pairwise(ordered)):
                continue  # a tie, within single precision: either order is right
            assert found[k][i].tolist() == ranking(votes, 5, width)


def test_hand_made_votes() -> None:
    """Two of class 1 at 60° outweigh one of class 0 at 45° only where the temperature is high."""
    angles = np.deg2rad([45.0, 60.0, 60.0, 170.0])
    bank = torch.tensor(np.stack([np.cos(angles), np.sin(angles)], axis=1))
    labels = torch.tensor([0, 1, 1, 2])
    query = torch.tensor([[5.0, 0.0]])  # cosine: length does not count
    assert knn_predict(bank, labels, query, ks=[3], temperature=1.0)[3].tolist() == [[1, 0, -1]]
    assert knn_predict(bank, labels, query, ks=[3], temperature=0.07)[3].tolist() == [[0, 1, -1]]
    assert knn_predict(bank, labels, query, ks=[1], temperature=1.0)[1].tolist() == [[0, -1, -1]]


def test_leave_one_out_leaves_the_image_itself_out() -> None:
    bank = torch.eye(4)[[0, 0, 1, 1]] + 0.01 * torch.arange(4)[:, None]
    labels = torch.tensor([0, 1, 2, 3])  # every image's own label is unique: its own vote would be right
    found = knn_predict(bank, labels, bank, ks=[1], leave_one_out=True)[1]
    assert found[:, 0].tolist() == [1, 0, 3, 2]


def test_accuracy_counts_the_first_predictions() -> None:
    predictions = torch.tensor([[3, 1, 0], [2, 0, 1], [1, 2, -1]])
    labels = torch.tensor([1, 2, 0])
    assert accuracy(predictions, labels) == pytest.approx(1 / 3)
    assert accuracy(predictions, labels, top=2) == pytest.approx(2 / 3)
    assert accuracy(predictions, labels, top=5) == pytest.approx(2 / 3)


def test_the_usual_ks_that_fit() -> None:
    assert fitting_ks(50_000) == (10, 20, 100, 200)
    assert fitting_ks(100) == (10, 20, 100)
    assert fitting_ks(7) == (7,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_features_that_are_not_numbers_are_refused(bad: float) -> None:
    vectors = torch.randn(8, 3)
    broken = vectors.clone()
    broken[5, 1] = bad
    labels = torch.arange(8) % 2
    with pytest.raises(ValueError, match=r"the bank: .* 1 of 8 images .*image 5"):
        knn_predict(broken, labels, vectors, ks=[1])
    with pytest.raises(ValueError, match="the queries"):
        knn_predict(vectors, labels, broken, ks=[1])


@pytest.mark.parametrize(("ks", "message"), [([9], "k is 9, but only 8"), ([0], "k is 0"), ([3, -1], "k is -1")])
def test_a_k_that_makes_no_sense_fails(ks: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        knn_predict(torch.randn(8, 3), torch.arange(8) % 2, torch.randn(2, 3), ks=ks)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(8000, 30_000) | st.just(140_003),  # the last in groups of groups
    k=st.sampled_from([1, 2, 20, 128, 200, 500]),
    values=st.sampled_from([3, 50, 1 << 20]),  # few values: many are equal
)
def test_the_largest_of_long_rows_are_topks(seed: int, n: int, k: int, values: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(values, (4, n), generator=generator).float()
    rows[torch.rand(4, n, generator=generator) < 0.1] = -torch.inf
    found, places = knn.largest(rows, k)
    wanted = rows.topk(k, dim=1).values
    torch.testing.assert_close(found.sort(dim=1, descending=True).values, wanted, rtol=0, atol=0)
    torch.testing.assert_close(rows.gather(1, places), found, rtol=0, atol=0)
    assert all(len(set(row)) == k for row in places.tolist())


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block of similarities is larger than it may be, whatever the sizes of bank and queries."""
    seen: list[int] = []
    topk = torch.Tensor.topk

    def watched(self: torch.Tensor, *args: object, **kwargs: object) -> object:
        seen.append(self.numel())
        return topk(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(knn, "BLOCK_ELEMENTS", 1000)
    monkeypatch.setattr(knn, "QUERY_ROWS", 50)
    monkeypatch.setattr(torch.Tensor, "topk", watched)
    knn_predict(torch.randn(500, 4), torch.arange(500) % 3, torch.randn(300, 4), ks=[5])
    assert max(seen) <= 1000


# ---------------------------------------------------------------------------------------------------- whole evaluation


def test_an_evaluation_says_how_and_keeps_the_result(backbone: Backbone, tmp_path: Path) -> None:
    result = knn.knn(Knn("", "shapes:150", out=tmp_path / "run"), backbone)
    assert read_results(tmp_path / "run") == [result]
    assert result.images == 2000
    assert set(result.metrics) == {"top1", "top5", "top1@10", "top5@10", "top1@20", "top5@20", "top1@100", "top5@100"}
    assert result.metrics["top1"] == result.metrics["top1@20"]
    assert result.settings["k"] == 20
    assert result.settings["temperature"] == 0.07
    assert result.settings["layer"] == "class token after the last norm"
    assert result.weights == backbone.digest()
    assert "vit_tiny_patch8_32" in result.encoder


def test_a_k_above_the_bank_fails_before_the_work(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchmix.evaluate.features.extract_all", lambda *_, **__: pytest.fail("the encoder ran"))
    with pytest.raises(ValueError, match="k is 200, but only 50 labeled images"):
        knn.knn(Knn("", "shapes:50", k=(20, 200)), backbone)


def test_without_a_test_split_one_is_left_out(backbone: Backbone, class_folder: Path) -> None:
    """Fewer than 100 images, and each has a twin: the twin is found, and nobody votes for himself."""
    result = knn.knn(Knn("", str(class_folder), k=(1,)), backbone)
    assert result.images == 12
    assert result.settings["test"] == "leave-one-out"
    assert result.top1 == 1.0
    with pytest.raises(ValueError, match=re.escape("k is 12, but only 11")):
        knn.knn(Knn("", str(class_folder), k=(12,)), backbone)


def test_the_result_names_the_split_that_was_tested(backbone: Backbone, class_folder: Path, tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        shutil.copytree(class_folder, tmp_path / "data" / split)
    result = knn.knn(Knn("", str(tmp_path / "data")), backbone)
    assert result.settings["test"] == f"{tmp_path / 'data'} (val)"


def test_every_block_in_one_pass(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = knn.knn(Knn("", "shapes:150", cache=False), backbone)
    passes = count_passes(monkeypatch)
    result = knn.knn(Knn("", "shapes:150", layers=("all",), cache=False), backbone)
    assert passes == [150, 2000]
    assert {name: value for name, value in result.metrics.items() if "block" not in name} == plain.metrics
    blocks = {name: value for name, value in result.metrics.items() if "block" in name}
    assert list(blocks) == ["top1 of block 1", "top1 of block 2"]
    assert blocks["top1 of block 2"] == result.top1
    assert result.details["best_block"] == max((1, 2), key=lambda block: blocks[f"top1 of block {block}"])
    first = knn.knn(Knn("", "shapes:150", layers=(1,), pool="mean", shots=2, draws=2), backbone)
    assert 0 < first.metrics["top1 of block 1"] < 1 and first.details["best_block"] == 1
    with pytest.raises(ValueError, match="--layers 3: the encoder has 2 blocks; use numbers from 1 to 2, or all"):
        knn.knn(Knn("", "shapes:150", layers=(1, 3)), backbone)
    with pytest.raises(ValueError, match="--layers needs the blocks of an encoder, which --pool pixels does not use"):
        knn.knn(Knn("", "shapes:150", layers=(1,), pool="pixels"), backbone)


def test_the_monitor_leaves_unlabeled_images_out(backbone: Backbone) -> None:
    """-1 is no label, as in torchvision's STL10 and in test splits of the Hugging Face Hub."""
    train, test, encoder = shapes_source("train", 60), shapes_source("test", 40), backbone.encoder()
    assert train.labels is not None and test.labels is not None
    how: dict[str, Any] = {"image_size": 32, "mean": backbone.mean, "std": backbone.std, "device": torch.device("cpu")}
    how |= {"bank": 100, "queries": 100}

    def knn_of(train: Source, test: Source | None) -> float | None:
        return dict(monitor(train, test, **how, guard=Guard({}, lambda step: None))(encoder)).get("knn")

    def known(source: Source, count: int) -> Source:
        assert source.labels is not None
        return replace(source, labels=np.where(np.arange(len(source)) < count, source.labels, -1))  # type: ignore[type-var]

    assert knn_of(known(train, 0), test) is None and knn_of(known(train, 1), None) is None
    assert knn_of(known(train, 30), known(test, 0)) == knn_of(Part(train, np.arange(30)), None)
    assert knn_of(known(train, 30), known(test, 20)) == knn_of(Part(train, np.arange(30)), Part(test, np.arange(20)))


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The images of each pass over a source, from now on."""
    passes: list[int] = []
    original = features.extract_all

    def counted(encoder: object, source: Source, *args: object, **kwargs: object) -> object:
        passes.append(len(source))
        return original(encoder, source, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(features, "extract_all", counted)
    return passes
