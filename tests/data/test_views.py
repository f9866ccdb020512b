from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import transforms as T
from torchvision.transforms import functional as TF

from benchmarks.plain_views import pipeline, two_views
from patchmix.data.randomness import uniforms
from patchmix.data.views import (
    DRAWS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    CenterCrop,
    Parameters,
    View,
    Views,
    draw_parameters,
    render,
    to_float,
)
from tests.oracles import views as oracle

CIFAR = two_views(32, (0.1, 1.0))


def parameters(view: View, sizes: list[tuple[int, int]], *, seed: int = 0) -> Parameters:
    draw = uniforms(DRAWS, seed, 0, np.arange(len(sizes)), 0)
    return draw_parameters(view, np.array(sizes, np.int64), draw)


def far_apart(one: np.ndarray, other: np.ndarray) -> bool:
    """Kolmogorov-Smirnov: whether two samples come from different distributions, at a level of 0.001."""
    both = np.sort(np.concatenate([one, other]))
    below = np.searchsorted(np.sort(one), both, "right") / len(one)
    beside = np.searchsorted(np.sort(other), both, "right") / len(other)
    return bool(np.abs(below - beside).max() > 1.95 * np.sqrt(1 / len(one) + 1 / len(other)))


def test_the_two_views_are_the_papers() -> None:
    one, two = two_views(224)
    assert (one.area, one.blur, one.solarize) == ((0.05, 1.0), 1.0, 0.0)
    assert (two.area, two.blur, two.solarize) == ((0.05, 1.0), 0.1, 0.2)
    for view in (one, two):
        assert (view.ratio, view.flip, view.jitter, view.gray) == ((3 / 4, 4 / 3), 0.5, 0.8, 0.2)
        assert (view.brightness, view.contrast, view.saturation, view.hue) == (0.4, 0.4, 0.2, 0.1)
        assert view.sigma == (0.1, 2.0)
    assert CIFAR[0].area == (0.1, 1.0)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"area": (0.5, 0.1)}, r"area is \(0\.5, 0\.1\); it must be a range with 0 < low <= high <= 1$"),
        ({"area": (0.5, 1.1)}, "<= 1"),
        ({"sigma": (0.0, 1.0)}, r"sigma is \(0\.0, 1\.0\); it must be a range with 0 < low <= high$"),
    ],
)
def test_a_wrong_view_is_refused(wrong: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        View(**{"size": 32, **wrong})  # type: ignore[arg-type]


class TestRandomness:
    def test_is_a_function_of_seed_epoch_index_and_view(self, small_images: np.ndarray) -> None:
        images, indices = list(small_images[:8]), np.arange(8)
        same = [small_images[0]] * 2

        def make(seed: int = 0, epoch: int = 0, shift: int = 0) -> list[np.ndarray]:
            return Views([CIFAR[0], CIFAR[0]], seed=seed)(images, epoch=epoch, indices=indices + shift)

        first = make()
        np.testing.assert_array_equal(first[0], make()[0])
        assert not np.array_equal(first[0], first[1])
        for other in (make(seed=1), make(epoch=1), make(shift=1)):
            assert not np.array_equal(first[0], other[0])
        twice = Views(CIFAR, seed=0)(same, epoch=0, indices=np.array([5, 5]))
        np.testing.assert_array_equal(twice[0][0], twice[0][1])

    @given(order=st.permutations(range(12)), cut=st.integers(1, 11))
    @settings(max_examples=20)
    def test_does_not_depend_on_the_batch(self, order: list[int], cut: int) -> None:
        images = np.random.default_rng(0).integers(0, 256, (12, 20, 24, 3), dtype=np.uint8)
        views = Views(CIFAR, seed=3)
        together = views(list(images), epoch=2, indices=np.arange(12))
        for part in (order[:cut], order[cut:]):
            apart = views([images[i] for i in part], epoch=2, indices=np.array(part))
            for whole, piece in zip(together, apart, strict=True):
                np.testing.assert_array_equal(whole[part], piece)

    def test_an_empty_batch_has_empty_views(self) -> None:
        for transform in (Views(CIFAR, seed=0), CenterCrop(32)):
            for view in transform([], epoch=0, indices=np.empty(0, np.int64)):
                assert view.shape == (0, 32, 32, 3)


class TestCrops:
    @pytest.mark.parametrize("size", [(32, 32), (120, 200), (30, 20)])
    def test_are_distributed_as_torchvisions(self, size: tuple[int, int]) -> None:
        height, width = size
        view = View(32, (0.1, 1.0))
        ours = parameters(view, [size] * 6000).box
        picture = torch.empty(3, height, width)
        crop = T.RandomResizedCrop.get_params
        theirs = np.array([crop(picture, list(view.area), list(view.ratio)) for _ in range(6000)])
        for measure in (
            lambda box: box[:, 2] * box[:, 3],
            lambda box: box[:, 2] / box[:, 3],
            lambda box: box[:, 0],
            lambda box: box[:, 1],
        ):
            assert not far_apart(measure(ours), measure(theirs))

    def test_the_comparison_can_tell_distributions_apart(self) -> None:
        one = parameters(View(32, (0.1, 1.0)), [(32, 32)] * 6000).box
        two = parameters(View(32, (0.15, 1.0)), [(32, 32)] * 6000).box
        assert far_apart(one[:, 2] * one[:, 3], two[:, 2] * two[:, 3])

    @given(size=st.tuples(st.integers(1, 400), st.integers(1, 400)), low=st.floats(0.01, 1.0))
    @settings(max_examples=60)
    def test_lie_inside_the_image(self, size: tuple[int, int], low: float) -> None:
        top, left, height, width = parameters(View(8, (low, 1.0)), [size] * 20).box.T
        assert (np.minimum(height, width) >= 1).all()
        assert (np.minimum(top, left) >= 0).all()
        assert (top + height <= size[0]).all()
        assert (left + width <= size[1]).all()

    @pytest.mark.parametrize("size", [(20, 400), (400, 20)])
    def test_fall_back_to_the_center(self, size: tuple[int, int]) -> None:
        view = View(8, (0.9, 1.0))  # never fits with a legal ratio
        wanted = T.RandomResizedCrop.get_params(torch.empty(3, *size), list(view.area), list(view.ratio))
        assert parameters(view, [size] * 5).box.tolist() == [list(wanted)] * 5


class TestProportions:
    def test_are_the_views(self) -> None:
        drawn = parameters(two_views(32)[1], [(32, 32)] * 20_000)
        for share, wanted in (
            (drawn.flip.mean(), 0.5),
            (drawn.jitter.mean(), 0.8),
            (drawn.gray.mean(), 0.2),
            ((drawn.sigma > 0).mean(), 0.1),
            (drawn.solarize.mean(), 0.2),
        ):
            assert abs(share - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / 20_000)

    def test_strengths_are_uniform_in_their_ranges(self) -> None:
        drawn = parameters(two_views(32)[0], [(32, 32)] * 20_000)
        turned = np.where(drawn.hue > 128, drawn.hue - 256, drawn.hue) / 256
        for values, low, high in (
            (drawn.brightness, 0.6, 1.4),
            (drawn.contrast, 0.6, 1.4),
            (drawn.saturation, 0.8, 1.2),
            (turned + uniforms(1, 9, np.arange(20_000))[:, 0] / 256 - 1 / 512, -0.1, 0.1),
            (drawn.sigma, 0.1, 2.0),
        ):
            assert not far_apart(values, np.linspace(low, high, 20_000))

    def test_every_order_of_the_four_is_equally_frequent(self) -> None:
        orders = parameters(CIFAR[0], [(32, 32)] * 24_000).order
        _, counts = np.unique(orders, axis=0, return_counts=True)
        assert len(counts) == 24
        assert np.abs(counts - 1000).max() < 150

    def test_operations_are_drawn_independently(self) -> None:
        drawn = parameters(two_views(32)[1], [(32, 32)] * 20_000)
        columns = [drawn.flip, drawn.jitter, drawn.gray, drawn.sigma > 0, drawn.solarize, drawn.brightness, drawn.hue]
        correlation = np.corrcoef(np.stack([column.astype(float) for column in columns])) - np.eye(len(columns))
        assert np.abs(correlation).max() < 0.03


class TestPixels:
    @pytest.mark.parametrize("number", [0, 1])
    def test_equal_torchvisions_with_the_same_parameters(
        self, number: int, small_images: np.ndarray, photos: list[np.ndarray]
    ) -> None:
        for images, view in (
            (list(small_images[:200]), CIFAR[number]),
            (photos, two_views(96)[number]),
        ):
            drawn = parameters(view, [image.shape[:2] for image in images])
            ours = render(view, images, drawn)
            theirs = np.stack([oracle.render(image, view.size, drawn, i) for i, image in enumerate(images)])
            error = np.abs(ours.astype(float) - theirs.astype(float)).mean(axis=(1, 2, 3))
            # Four operations that truncate there and round here, in 8 bits each.
            assert error.mean() < 2.0
            assert error.max() < 6.0
            assert abs((ours.astype(float) - theirs).mean()) < 1.5

    @pytest.mark.parametrize("number", [0, 1])
    def test_are_distributed_as_torchvisions(self, number: int, small_images: np.ndarray) -> None:
        view = CIFAR[number]
        images = list(small_images)
        (ours,) = Views([view], seed=1)(images, epoch=0, indices=np.arange(len(images)))
        random.seed(0)
        plain = pipeline(view)
        theirs = np.stack([np.asarray(plain(Image.fromarray(image))) for image in images])
        for measure in (mean_of, spread_of, gradient_of, colorfulness_of):
            assert not far_apart(measure(ours), measure(theirs)), measure.__name__
        ours_gray, theirs_gray = (colorfulness_of(views) < 0.5 for views in (ours, theirs))
        assert abs(ours_gray.mean() - theirs_gray.mean()) < 0.06

    def test_the_views_are_contiguous_and_not_the_input(self, small_images: np.ndarray) -> None:
        before = small_images[:50].copy()
        for view in Views(CIFAR, seed=0)(list(small_images[:50]), epoch=0, indices=np.arange(50)):
            assert view.shape == (50, 32, 32, 3)
            assert view.dtype == np.uint8
            assert view.flags.c_contiguous
        np.testing.assert_array_equal(small_images[:50], before)

    def test_flip_mirrors_left_and_right(self) -> None:
        image = np.zeros((8, 8, 3), np.uint8)
        image[:, :4] = 255
        plain = View(8, (1.0, 1.0), (1.0, 1.0), flip=1.0, jitter=0, gray=0, blur=0)
        np.testing.assert_array_equal(
            Views([plain], seed=0)([image], epoch=0, indices=np.arange(1))[0][0], image[:, ::-1]
        )


def mean_of(views: np.ndarray) -> np.ndarray:
    return views.mean(axis=(1, 2, 3))


def spread_of(views: np.ndarray) -> np.ndarray:
    return views.std(axis=(1, 2, 3))


def gradient_of(views: np.ndarray) -> np.ndarray:
    # Pillow's blur is three box filters: a little different from a Gaussian at the finest scale, so not squared.
    return np.abs(np.diff(views.astype(float), axis=2)).mean(axis=(1, 2, 3))


def colorfulness_of(views: np.ndarray) -> np.ndarray:
    return (views.max(axis=3).astype(float) - views.min(axis=3)).mean(axis=(1, 2))


class TestCenterCrop:
    @pytest.mark.parametrize(("size", "resize"), [(32, None), (96, 110), (128, None), (64, 65)])
    def test_equals_torchvision(self, size: int, resize: int | None, photos: list[np.ndarray]) -> None:
        (ours,) = CenterCrop(size, resize=resize)(photos, epoch=0, indices=np.arange(len(photos)))
        bicubic = T.InterpolationMode.BICUBIC
        for mine, photo in zip(ours, photos, strict=True):
            theirs = TF.center_crop(TF.resize(Image.fromarray(photo), [resize or size], bicubic), [size])
            assert np.abs(mine.astype(int) - np.asarray(theirs).astype(int)).max() <= 2

    def test_a_crop_larger_than_the_image_is_refused(self) -> None:
        with pytest.raises(ValueError, match="resize 20 must be at least"):
            CenterCrop(32, resize=20)


def test_to_float_equals_torchvision(small_images: np.ndarray) -> None:
    result = to_float(torch.from_numpy(small_images[:4]), IMAGENET_MEAN, IMAGENET_STD)
    wanted = torch.stack(
        [TF.normalize(TF.to_tensor(image), list(IMAGENET_MEAN), list(IMAGENET_STD)) for image in small_images[:4]]
    )
    assert result.dtype == torch.float32
    assert result.is_contiguous()
    torch.testing.assert_close(result, wanted, atol=1e-5, rtol=1e-5)
