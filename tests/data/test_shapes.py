from __future__ import annotations

import numpy as np
import pytest
import torch

from patchmix.data.shapes import _OUTLINES, CLASSES, SIZE, _ground, draw_shapes, shapes_source


def nearest_neighbor_accuracy(train: np.ndarray, test: np.ndarray, neighbors: int) -> float:
    """Share of test rows whose class (row number mod 10) wins the vote among the nearest training rows."""
    nearest = torch.cdist(torch.from_numpy(test), torch.from_numpy(train)).topk(neighbors, largest=False).indices
    votes = torch.nn.functional.one_hot(nearest % 10, 10).sum(1)
    return float((votes.argmax(1) == torch.arange(len(test)) % 10).float().mean())


@pytest.fixture(scope="module")
def train() -> np.ndarray:
    return draw_shapes("train", 10_000)


def test_an_image_depends_on_its_split_and_number_alone(train: np.ndarray) -> None:
    np.testing.assert_array_equal(draw_shapes("train", 30), train[:30])
    test = draw_shapes("test", 30)
    assert not any(np.array_equal(test[i], train[i]) for i in range(30))
    assert len({image.tobytes() for image in train}) == len(train)


def test_raw_pixels_do_not_solve_it(train: np.ndarray) -> None:
    test = draw_shapes("test", 1000)
    flat = [images.reshape(len(images), -1).astype(np.float32) for images in (train, test)]
    accuracy = nearest_neighbor_accuracy(flat[0], flat[1], 5)
    assert 0.1 < accuracy < 0.3


def test_the_ground_says_nothing_about_the_class() -> None:
    """Nor does it tell images apart: all have the same mean."""
    ground = _ground("train", 5000).reshape(5000, -1)
    assert nearest_neighbor_accuracy(ground[:4500], ground[4500:], 5) < 0.14
    assert ground.mean(axis=1).std() < 3.0


def test_colors_are_the_same_in_all_classes(train: np.ndarray) -> None:
    means = []
    for label in range(10):
        pixels = train[label::10].reshape(-1, 3).astype(np.float64)
        bright = pixels[pixels.max(axis=1) > 170]
        means.append(bright.mean(axis=0))
    assert np.std(means, axis=0).max() < 6.0


def test_the_outlines_are_different_and_visible() -> None:
    import cv2

    def silhouette(name: str, turn: float = 0.0) -> np.ndarray:
        rotate = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        mask = np.zeros((64, 64), np.uint8)
        parts = [np.rint((part @ rotate.T) * 24 + 32).astype(np.int32) for part in _OUTLINES[name]]
        cv2.fillPoly(mask, parts, 1)
        return mask.astype(bool)

    for name in CLASSES:
        assert 0.08 < silhouette(name).mean() < 0.5
        for other in CLASSES:
            if name < other:
                best = max(
                    (silhouette(name) & turned).sum() / (silhouette(name) | turned).sum()
                    for turned in (silhouette(other, angle) for angle in np.linspace(0, 2 * np.pi, 24))
                )
                assert best < 0.85, (name, other)


def test_source() -> None:
    source = shapes_source("train", 25)
    assert len(source) == 25
    assert source.classes == CLASSES
    assert source.labels is not None
    assert source.labels.tolist() == [i % 10 for i in range(25)]
    assert source.load(3).shape == (SIZE, SIZE, 3)
    assert source.key(3) == "shapes-train#3"
    prints = {shapes_source(s, n).fingerprint() for s, n in (("train", 25), ("train", 26), ("test", 25))}  # type: ignore[arg-type]
    assert len(prints) == 3
    assert source.fingerprint() in prints
