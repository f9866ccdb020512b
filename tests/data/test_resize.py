from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from patchmix.data.resize import resize
from tests.oracles import views as oracle


def by_pillow(image: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


def difference(one: np.ndarray, other: np.ndarray) -> int:
    return int(np.abs(one.astype(int) - other.astype(int)).max())


# Both ways through the code, growing and shrinking in each direction.
@given(
    rows=st.integers(1, 90),
    columns=st.integers(1, 90),
    height=st.integers(1, 64),
    width=st.integers(1, 64),
    seed=st.integers(0, 99),
    hard=st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_equals_the_definition_within_rounding(
    rows: int, columns: int, height: int, width: int, seed: int, hard: bool
) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (rows + 3, columns + 5, 3), dtype=np.uint8)
    if hard:  # black and white noise overshoots most
        image = np.where(image > 127, 255, 0).astype(np.uint8)
    crop = image[2 : 2 + rows, 1 : 1 + columns]
    result = resize(crop, height, width)
    assert result.shape == (height, width, 3)
    assert result.dtype == np.uint8
    assert result.flags.c_contiguous
    assert difference(result, oracle.resize(crop, height, width)) <= 2


@pytest.mark.parametrize(("size", "target"), [(32, 20), (20, 32), (480, 224), (150, 224)])
def test_differs_from_pillow_rarely_on_photos(
    size: int, target: int, small_images: np.ndarray, photos: list[np.ndarray]
) -> None:
    image = small_images[0] if size <= 32 else np.array(Image.fromarray(photos[0]).resize((640, 640)))
    crop = image[:size, :size]
    result, wanted = resize(crop, target, target), by_pillow(np.ascontiguousarray(crop), target, target)
    assert difference(result, wanted) <= 2
    assert (result != wanted).mean() < 0.3
    assert abs(result.astype(float).mean() - wanted.astype(float).mean()) < 0.1


def test_the_result_is_new_memory() -> None:
    image = np.zeros((4, 4, 3), np.uint8)
    assert not np.shares_memory(resize(image, 4, 4), image)
