"""Each pixel operation against torchvision's, on real images, with given strengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torchvision.transforms import functional as TF

from patchmix.data import pixels
from patchmix.data.pixels import resize
from tests.oracles import views as oracle


@pytest.fixture(scope="module")
def images(small_images: np.ndarray, photos: list[np.ndarray]) -> list[np.ndarray]:
    return [*small_images[:40], *photos[:8]]


def differences(images: list[np.ndarray], ours: object, theirs: object) -> tuple[float, float]:
    """Largest and mean absolute difference over all images."""
    parts = []
    for image in images:
        before = image.copy()
        mine = ours(image)  # type: ignore[operator]
        assert mine.dtype == np.uint8
        np.testing.assert_array_equal(image, before, err_msg="the input was written to")
        wanted = np.asarray(theirs(Image.fromarray(image)))  # type: ignore[operator]
        parts.append(np.abs(mine.astype(int) - wanted.astype(int)).ravel())
    joined = np.concatenate(parts)
    return float(joined.max()), float(joined.mean())


# torchvision's Pillow blend truncates where we round: one gray level, half of one on average.
@pytest.mark.parametrize("factor", [0.6, 0.83, 1.0, 1.21, 1.4])
class TestBlends:
    def test_brightness(self, images: list[np.ndarray], factor: float) -> None:
        import cv2

        (matrix,) = pixels.blend_matrices(np.array([factor]), 0)
        largest, mean = differences(
            images, lambda x: cv2.transform(x, matrix), lambda x: TF.adjust_brightness(x, factor)
        )
        assert largest <= 1
        assert mean < 0.6

    def test_contrast(self, images: list[np.ndarray], factor: float) -> None:
        (matrix,) = pixels.contrast_matrices(np.array([factor]))
        largest, mean = differences(
            images, lambda x: pixels.adjust_contrast(x, matrix), lambda x: TF.adjust_contrast(x, factor)
        )
        assert largest <= 2
        assert mean < 0.7

    def test_saturation(self, images: list[np.ndarray], factor: float) -> None:
        import cv2

        (matrix,) = pixels.blend_matrices(np.array([factor]), pixels.LUMA)
        largest, mean = differences(
            images, lambda x: cv2.transform(x, matrix), lambda x: TF.adjust_saturation(x, factor)
        )
        assert largest <= 2
        assert mean < 0.6


@pytest.mark.parametrize("steps", [1, 13, 26, 127, 230, 255])
def test_hue(images: list[np.ndarray], steps: int) -> None:
    # torchvision multiplies by 255 and truncates; half a step more makes it the same number of steps.
    turn = steps if steps <= 128 else steps - 256
    factor = np.clip((turn + np.sign(turn) * 0.5) / 255, -0.5, 0.5)
    largest, mean = differences(images, lambda x: pixels.turn_hue(x, steps), lambda x: TF.adjust_hue(x, factor))
    # Both go through 8-bit HSV, and round it differently.
    assert mean < 1.5
    assert largest <= 12


def test_gray(images: list[np.ndarray]) -> None:
    import cv2

    largest, _ = differences(
        images, lambda x: cv2.transform(x, pixels.GRAY), lambda x: TF.rgb_to_grayscale(x, num_output_channels=3)
    )
    assert largest <= 1


def test_solarize(images: list[np.ndarray]) -> None:
    assert differences(images, pixels.solarize, lambda x: ImageOps.solarize(x, 128)) == (0, 0)


@pytest.mark.parametrize("sigma", [0.1, 0.25, 0.4, 0.7, 1.0, 1.5, 2.0])
def test_blur(images: list[np.ndarray], sigma: float) -> None:
    size = 2 * int(np.ceil(4 * sigma)) + 1
    largest, mean = differences(
        images, lambda x: pixels.blur(x, sigma), lambda x: TF.gaussian_blur(x, [size, size], [sigma, sigma])
    )
    assert largest <= 3
    assert mean < 0.6


@pytest.mark.parametrize("sigma", np.linspace(0.1, 2.0, 30).tolist())
def test_blur_keeps_a_plain_image(sigma: float) -> None:
    plain = np.full((32, 32, 3), 201, np.uint8)
    np.testing.assert_array_equal(pixels.blur(plain, sigma), plain)


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
@settings(max_examples=100)
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
