"""JPEGs that are decoded at the scale their views need: hardly other pixels, the same distribution, the same order."""

from __future__ import annotations

import io
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from benchmarks.plain_views import two_views
from patchmix.data.decode import DecodeError, Reduced, decode, read_reduced
from patchmix.data.loader import Loader
from patchmix.data.sources import open_source
from patchmix.data.views import View, Views
from tests.data.test_views import far_apart


def picture(seed: int, height: int, width: int) -> np.ndarray:
    """Soft shapes with some texture, as photos have: noise at several scales."""
    random = np.random.default_rng(seed)
    image = np.zeros((height, width, 3))
    for scale, weight, colors in ((4, 25.0, 3), (12, 15.0, 3), (24, 25.0, 1), (80, 8.0, 1)):
        noise = random.normal(0, weight, (scale, scale, colors)).astype(np.float32)
        image += cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC).reshape(height, width, colors)
    return np.clip(image + 128, 0, 255).astype(np.uint8)


def jpeg(image: np.ndarray, **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=92, **options)
    return file.getvalue()


def turned(image: np.ndarray) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return jpeg(image, exif=exif)


@pytest.mark.parametrize("reduction", [2, 4, 8])
@pytest.mark.parametrize("encode", [jpeg, turned], ids=["opencv", "pillow"])
def test_a_reduced_image_is_the_image_made_smaller(reduction: int, encode: object) -> None:
    # A turned image begins with what was a last, incomplete block: less than a reduced pixel, not compared here.
    data = encode(picture(0, 504, 760) if encode is turned else picture(0, 501, 763))  # type: ignore[operator]
    whole = decode(data, "a")
    reduced = read_reduced(data, "a", 3, lambda height, width: reduction)
    assert isinstance(reduced, Reduced)
    assert (reduced.height, reduced.width) == whole.shape[:2]
    assert reduced.pixels.shape[:2] == (-(-whole.shape[0] // reduction), -(-whole.shape[1] // reduction))
    down, across = (-side % reduction for side in whole.shape[:2])
    full = np.pad(whole, ((0, down), (0, across), (0, 0)), "edge")
    small = cv2.resize(full, reduced.pixels.shape[1::-1], interpolation=cv2.INTER_AREA)
    assert np.abs(small.astype(int) - reduced.pixels).mean() < 2.0


def test_other_formats_are_decoded_whole_and_damage_is_reported() -> None:
    image = picture(1, 200, 300)
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    assert np.array_equal(read_reduced(file.getvalue(), "a", 3, lambda height, width: 4), image)  # type: ignore[arg-type]
    with pytest.raises(DecodeError, match=r"^a: "):
        read_reduced(jpeg(image)[:2000], "a", 3, lambda height, width: 2)


def test_the_scale_is_fine_enough_for_every_view() -> None:
    whole = (1.0, 1.0)
    for side, expected in ((31, 1), (95, 1), (96, 2), (191, 2), (192, 4), (384, 8), (5000, 8)):
        views = Views([View(32, whole, whole), View(16, whole, whole)], seed=0)
        assert views.reduction(side, side, epoch=0, index=0) == expected
    # The finer of the crops decides.
    views = Views(two_views(32), seed=0)
    for index in range(50):
        both = views.reduction(600, 800, epoch=3, index=index)
        alone = [
            Views([view], seed=0).reduction(600, 800, epoch=3, index=index) for view in views.views[:1]
        ]  # the second view alone would draw as the first
        assert both <= alone[0]


def from_files(pictures: list[np.ndarray], folder: Path, views: Views, epoch: int) -> list[np.ndarray]:
    for i, image in enumerate(pictures):
        (folder / f"{i:04}.jpg").write_bytes(jpeg(image))
    loader = Loader(open_source(folder, cache_bytes=0), views, batch_size=len(pictures), seed=0)
    batch = next(loader.batches(epoch))
    order = np.argsort(batch.indices.numpy())
    return [view.numpy()[order] for view in batch.views]


def test_views_from_files_are_those_of_whole_images(tmp_path: Path) -> None:
    pictures = [picture(i, 480 + 7 * i, 640 - 5 * i) for i in range(12)]
    views = Views(two_views(32, (0.2, 1.0)), seed=1)
    used = [views.reduction(*image.shape[:2], epoch=2, index=i) for i, image in enumerate(pictures)]
    assert max(used) >= 4 and len(set(used)) > 1, used
    ours = from_files(pictures, tmp_path, views, epoch=2)
    decoded = [decode(jpeg(image), "a") for image in pictures]
    wanted = views(decoded, epoch=2, indices=np.arange(12))
    for mine, whole in zip(ours, wanted, strict=True):
        error = np.abs(mine.astype(int) - whole)
        assert error.mean() < 2.5
        assert abs((mine.astype(float) - whole).mean()) < 0.7
    again = from_files(pictures, tmp_path, Views(two_views(32, (0.2, 1.0)), seed=1), epoch=2)
    assert all(np.array_equal(one, other) for one, other in zip(ours, again, strict=True))


def test_views_from_files_are_distributed_as_those_of_whole_images(tmp_path: Path) -> None:
    pictures = [picture(i, 240, 320) for i in range(150)]
    plain = {"jitter": 0.0, "gray": 0.0, "blur": 0.0}
    ours = from_files(pictures, tmp_path, Views([View(24, **plain)], seed=1), epoch=0)[0]  # type: ignore[arg-type]
    (whole,) = Views([View(24, **plain)], seed=2)(pictures, epoch=0, indices=np.arange(150))  # type: ignore[arg-type]
    for measure in (
        lambda views: views.mean(axis=(1, 2, 3)),
        lambda views: views.std(axis=(1, 2, 3)),
        lambda views: np.abs(np.diff(views.astype(float), axis=2)).mean(axis=(1, 2, 3)),
    ):
        assert not far_apart(measure(ours), measure(whole))
