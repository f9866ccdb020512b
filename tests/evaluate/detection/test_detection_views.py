"""Canvases: pixels, masks and boxes stay together through jitter, flip, cut and packing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchmix.evaluate.detection.coco import mask_of, open_split
from patchmix.evaluate.detection.views import (
    Placement,
    TrainingViews,
    fitted,
    fitted_views,
    jittered,
    place_image,
    place_mask,
    unpack,
)

MEAN = (0.5, 0.4, 0.3)
unit = st.floats(0, 1, exclude_max=True)


@given(st.integers(1, 3000), st.integers(1, 3000), st.tuples(unit, unit, unit, unit))
def test_jitter_stays_in_its_range_and_cuts_inside(height: int, width: int, draws: tuple[float, ...]) -> None:
    where = jittered(height, width, 128, scale=(0.1, 2.0), draws=draws)
    assert 12 <= max(where.height, where.width) <= 256
    seen = where.visible(128)
    assert 1 <= seen[0] <= 128 and 1 <= seen[1] <= 128
    assert where.top + seen[0] <= where.height and where.left + seen[1] <= where.width
    if where.height >= 128:
        assert seen[0] == 128, "a large image leaves no canvas empty"
    assert where.flip == (draws[3] < 0.5)


def test_jitter_reaches_both_ends() -> None:
    ends = [jittered(100, 50, 200, scale=(0.1, 2.0), draws=(d, d, d, 0.9)) for d in (0.0, 0.999999)]
    assert (ends[0].height, ends[0].width, ends[0].top) == (20, 10, 0)
    assert (ends[1].height, ends[1].width, ends[1].top, ends[1].left) == (400, 200, 200, 0)


def test_fitting_keeps_the_ratio_and_fills_with_the_mean(coco: Path) -> None:
    assert fitted(480, 640, 1024) == Placement(768, 1024)
    assert fitted(1, 5000, 64) == Placement(1, 64)
    image = np.full((60, 80, 3), 200, np.uint8)
    pixels, sizes = fitted_views([image], size=40, mean=MEAN, epoch=0, indices=np.array([0]))
    assert sizes.tolist() == [[30, 40, 60, 80]]
    assert (pixels[0, :30] == 200).all()
    assert (pixels[0, 30:] == [128, 102, 76]).all()


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(("height", "width", "top", "left"), [(180, 240, 40, 100), (45, 60, 0, 0), (60, 80, 0, 16)])
def test_pixels_and_masks_move_together(coco: Path, flip: bool, height: int, width: int, top: int, left: int) -> None:
    """The bright rectangle is where its polygon says, the dark disc where its run lengths say."""
    source = open_split(coco, "train2017")
    where = Placement(height, width, top, left, flip)
    image = source.load(0)
    canvas = place_image(image, where, 64, [100 / 255] * 3)
    for annotation in source.objects(0):
        mask = place_mask(annotation, *image.shape[:2], where, 64).astype(bool)
        seen = (canvas[..., 0] > 175) if annotation["category_id"] == 7 else (canvas[..., 0] < 50)
        assert (mask & seen).sum() >= 0.85 * (mask | seen).sum()


def test_a_polygon_is_cut_as_if_it_had_been_drawn_whole() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        points = generator.uniform(0, 50, 12)
        annotation = {"id": 1, "image_id": 1, "segmentation": [points.tolist()]}
        whole = place_mask(annotation, 50, 50, Placement(150, 150), 150)
        cut = place_mask(annotation, 50, 50, Placement(150, 150, 37, 61), 64)
        expected = whole[37 : 37 + 64, 61 : 61 + 64]
        differ = cut != expected  # pycocotools rounds points below 0 the other way
        assert differ.sum() <= 20 < 300 < whole.sum()


def test_native_size_is_the_annotation_itself(coco: Path) -> None:
    source = open_split(coco, "train2017")
    for annotation in source.objects(1):
        mask = place_mask(annotation, 72, 48, Placement(72, 48), 80)
        assert np.array_equal(mask[:72, :48], mask_of(annotation, 72, 48))
        assert not mask[72:].any() and not mask[:, 48:].any()


def test_what_is_packed_comes_out_again(coco: Path) -> None:
    source = open_split(coco, "train2017")
    views = TrainingViews(source, size=50, scale=(1.0, 1.0), flip=False, mean=MEAN, seed=0)
    indices = np.array([4, 0, 1])  # the first one is empty
    arrays = views([source.load(i) for i in indices], epoch=0, indices=indices)
    pixels, sizes, targets = unpack([torch.from_numpy(a) for a in arrays])
    assert pixels.shape == (3, 50, 50, 3)
    assert sizes == [(38, 50), (38, 50), (50, 33)]
    assert [len(t["boxes"]) for t in targets] == [0, 2, 2]
    assert targets[0]["masks"].shape == (0, 50, 50)
    for n, index in ((1, 0), (2, 1)):
        image = source.load(index)
        for k, annotation in enumerate(source.objects(index)):
            expected = place_mask(annotation, *image.shape[:2], fitted(*image.shape[:2], 50), 50)
            assert np.array_equal(targets[n]["masks"][k].numpy(), expected)
            y, x = np.nonzero(expected)
            assert targets[n]["boxes"][k].tolist() == [x.min(), y.min(), x.max() + 1, y.max() + 1]
            assert int(targets[n]["labels"][k]) == source.label(annotation)


def test_objects_that_are_cut_off_are_dropped(coco: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_split(coco, "train2017")
    views = TrainingViews(source, size=32, scale=(2.0, 2.0), flip=False, mean=MEAN, seed=0)
    counts = set()
    for epoch in range(12):
        arrays: list[Any] = views([source.load(1)], epoch=epoch, indices=np.array([1]))
        counts.add(int(arrays[1][0, 2]))
        assert (arrays[2][:, 2:] > arrays[2][:, :2]).all(), "boxes have area"
    assert len(counts) > 1


def test_a_view_depends_on_seed_epoch_and_image_only(coco: Path) -> None:
    source = open_split(coco, "train2017")

    def made(seed: int, epoch: int, indices: list[int]) -> Any:
        views = TrainingViews(source, size=48, scale=(0.1, 2.0), flip=True, mean=MEAN, seed=seed)
        return views([source.load(i) for i in indices], epoch=epoch, indices=np.array(indices))[0]

    both = made(0, 3, [0, 1])
    assert np.array_equal(both[1], made(0, 3, [1])[0])
    assert not np.array_equal(both[1], made(0, 4, [1])[0])
    assert not np.array_equal(both[1], made(1, 3, [1])[0])


def test_a_long_image_does_not_take_all_memory() -> None:
    where = jittered(1, 20_000, 8192, scale=(2.0, 2.0), draws=(0.5, 0.5, 0.5, 0.9))
    assert where.width <= 8_000
    assert cv2.resize(np.zeros((1, 9, 3), np.uint8), (where.width, where.height)).shape == (
        where.height,
        where.width,
        3,
    )
