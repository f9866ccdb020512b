"""Similarity, neighbors and maps: against kNN's own ranking and against numbers by hand."""

from __future__ import annotations

import math
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from patchmix.data.sources import open_source
from patchmix.evaluate import knn
from patchmix.interop.loading import load_backbone
from patchmix.report.gallery import Gallery, load_gallery
from patchmix.report.neighbors import (
    LINES,
    choose_keys,
    cosine,
    nearest,
    normalized,
    pack_explorer,
    principal_plane,
    show_map,
    show_neighbors,
    show_similarity,
    similarity_figure,
)
from patchmix.report.style import look
from patchmix.settings import ShowMap, ShowNeighbors, ShowSimilarity


def knn_ranking(vectors: torch.Tensor, k: int) -> torch.Tensor:
    unit = torch.nn.functional.normalize(vectors, dim=1)
    return knn.nearest(vectors, unit, k, first=0)[1]


def gallery_of(labels: torch.Tensor | None, *vectors: torch.Tensor) -> Gallery:
    runs = list(zip(("first", "second"), vectors, strict=False))
    return Gallery(open_source("shapes:64"), list(range(len(vectors[0]))), labels, runs)


def test_normalized_similarity_is_the_papers() -> None:
    vectors = torch.tensor([[2.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    found = normalized(cosine(vectors[:1], vectors))[0].tolist()
    assert found == pytest.approx([math.exp(s / 0.07) / math.exp(1 / 0.07) for s in (1.0, 0.6, 0.0)])


def test_neighbors_are_those_of_knn(run: Path) -> None:
    ((_, vectors),) = load_gallery([load_backbone(run)], "shapes:64", 300, device="cpu").runs
    assert torch.equal(nearest(vectors, range(300), 20)[0], knn_ranking(vectors, 20))
    places, values = nearest(vectors, [7], 3)
    assert 7 not in places and bool((values.diff() <= 0).all())


def test_the_explorer_has_the_neighbors_of_knn(run: Path) -> None:
    gallery = load_gallery([load_backbone(run)], "shapes:64", 300, device="cpu")
    ((_, vectors),) = gallery.runs
    (packed,) = pack_explorer(gallery)["runs"]
    assert packed["neighbors"] == knn_ranking(vectors, 20).tolist()
    expected = nearest(vectors, range(300), 20)[1].numpy()
    np.testing.assert_allclose(packed["cosines"], expected, atol=1e-5)


def test_of_equal_vectors_the_first_in_the_set_comes_first() -> None:
    base = torch.randn(1, 16)
    vectors = torch.cat([base.repeat(3, 1), base + 1e-3 * torch.randn(50, 16), torch.zeros(1, 16)])
    places, values = nearest(vectors, range(54), 10)
    assert places[:3, :2].tolist() == [[1, 2], [0, 2], [0, 1]]
    assert values[53].tolist() == [0.0] * 10 and places[53].tolist() == list(range(10))


def test_keys_are_of_the_same_a_related_and_other_classes() -> None:
    angles = torch.tensor([0.0, 0.3, 1.2, 2.0, 2.8]).repeat_interleave(4)  # class 1 is nearest to class 0
    vectors = torch.stack([angles.cos(), angles.sin()], dim=1) + 0.01 * torch.randn(20, 2)
    labels = torch.arange(5).repeat_interleave(4)
    gallery = gallery_of(labels, vectors)
    chosen = choose_keys(0, gallery)
    assert [int(labels[key]) for key, kind in chosen.items() if "other" not in kind] == [1, 0, 1]
    assert [*chosen.values()][len(chosen) // 2] == "same class" and 0 not in chosen
    assert {int(labels[key]) for key in chosen} == {0, 1, 2, 3, 4}
    assert set(choose_keys(3, gallery_of(None, vectors)).values()) == {"key"}


def test_bars_of_each_run_stand_beside_the_keys() -> None:
    a, labels = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.8, 0.6], [0.0, 1.0]]), torch.tensor([0, 0, 1, 1])
    keys = {1: "same class", 2: "another class", 3: "another class"}
    figure = similarity_figure(gallery_of(labels, a, a.flip(1) + 1), {0: keys})
    panels = [axis for axis in figure.axes if axis.get_title() in ("first", "second")]
    heights = [[bar.get_height() for bar in axis.patches] for axis in panels]
    assert heights[0] == pytest.approx([1.0, math.exp(-0.2 / 0.07), math.exp(-1 / 0.07)])
    assert heights[1][0] == pytest.approx(1.0) and heights[1][1] > heights[0][1]
    colors = [bar.get_facecolor() for bar in panels[0].patches]
    assert colors[0] != colors[1] == colors[2]


def test_pca_is_the_projection_on_the_first_two_axes() -> None:
    vectors = torch.randn(40, 6)
    unit = torch.nn.functional.normalize(vectors, dim=1).double()
    centered = unit - unit.mean(dim=0)
    axes = torch.linalg.eigh(centered.T @ centered).eigenvectors
    expected = centered @ axes[:, [-1, -2]]
    torch.testing.assert_close(principal_plane(vectors).abs(), expected.abs())
    assert principal_plane(vectors)[:, 0].abs().argmax() == principal_plane(vectors)[:, 0].argmax()
    with pytest.raises(ValueError, match="at least 3 images, not 2"):
        principal_plane(vectors[:2])


def test_the_frames_of_two_dozen_classes_differ() -> None:
    assert len({look(number, LINES) for number in range(24)}) == 24
    assert len({look(number, LINES)[0] for number in range(8)}) == 8


def test_figures_of_a_run(run: Path, other: Path, tmp_path: Path) -> None:
    some = {"images": 24, "device": "cpu"}
    few = {"images": 40, "device": "cpu"}
    for path in (
        *show_similarity(ShowSimilarity((run, other), "shapes:64", tmp_path / "s.png", **some)),
        *show_similarity(ShowSimilarity((run,), "shapes:64", tmp_path / "k.png", query=("2",), **some)),
        *show_neighbors(ShowNeighbors((run,), "shapes:64", tmp_path / "n.png", queries=2, k=3, **few)),
        *show_map(ShowMap((run,), "shapes:64", tmp_path / "m.png", images=20, device="cpu")),
    ):
        assert cv2.imread(str(path)).std() > 5  # not blank
    with pytest.raises(ValueError, match="query 99"):
        show_neighbors(ShowNeighbors((run,), "shapes:64", tmp_path / "n.png", query=("99",), **few))
    with pytest.raises(ValueError, match="at least one"):
        show_map(ShowMap((), "shapes:64", tmp_path / "m.png"))
    with pytest.raises(ValueError, match="k is 9; with 5 images it must lie between 1 and 4"):
        show_neighbors(ShowNeighbors((run,), "shapes:64", tmp_path / "n.png", k=9, images=5, device="cpu"))
