"""Colors changed in batches by torch, against the CPU path image by image, and against slow float versions."""

from __future__ import annotations

import colorsys
from dataclasses import replace
from itertools import islice, permutations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from benchmarks.plain_views import two_views
from patchmix.build import build_loader, build_prepare
from patchmix.config import Config, TrainConfig, ViewsConfig, differences
from patchmix.data.decode import DecodeError
from patchmix.data.device_views import Crops, change_colors, color_rows
from patchmix.data.loader import Batch, Loader
from patchmix.data.randomness import uniforms
from patchmix.data.sources import open_source
from patchmix.data.views import DRAWS, Parameters, View, Views, draw_parameters, render
from tests.data.test_views import colorfulness_of, far_apart, gradient_of, mean_of, spread_of

SIZE, MAX_SIGMA = 32, 2.0
PLAIN = View(
    SIZE, (1.0, 1.0), (1.0, 1.0), jitter=0, brightness=0, contrast=0, saturation=0, hue=0, gray=0, blur=0, solarize=0
)
STRONG = replace(PLAIN, jitter=1, brightness=0.8, contrast=0.8, saturation=1.0, hue=0.3)


def parameters(view: View, count: int) -> Parameters:
    return draw_parameters(view, np.full((count, 2), SIZE), uniforms(DRAWS, 5, 0, np.arange(count), 0))


def on_device(images: np.ndarray, drawn: Parameters) -> np.ndarray:
    """float (N, h, w, 3), unflipped."""
    pixels = change_colors(torch.from_numpy(images), torch.from_numpy(color_rows(drawn)), max_sigma=MAX_SIGMA)
    assert pixels.dtype == torch.float32
    assert pixels.is_contiguous()
    assert float(pixels.min()) >= -0.001
    assert float(pixels.max()) <= 255.001
    return pixels.permute(0, 2, 3, 1).numpy()


def on_cpu(images: np.ndarray, view: View, drawn: Parameters) -> np.ndarray:
    return render(view, list(images), drawn._replace(flip=np.zeros(len(images), bool))).astype(np.float64)


# In gray levels: rounding to 8 bits is 0.25 on average and 0.5 at most, for each operation. OpenCV's matrices are fixed
# point, its blur's weights multiples of 1/256; hue and saturation in 8 bits can cost a dark or pale pixel several.
@pytest.mark.parametrize(
    ("changes", "mean", "largest"),
    [
        ({"jitter": 1, "brightness": 0.9}, 0.3, 0.51),
        ({"jitter": 1, "contrast": 0.9}, 0.3, 0.51),
        ({"jitter": 1, "saturation": 0.9}, 0.3, 1.5),
        ({"jitter": 1, "hue": 0.5}, 0.5, 9.0),
        ({"jitter": 1, "brightness": 0.4, "contrast": 0.4, "saturation": 0.2}, 0.5, 3.0),
        ({"gray": 1}, 0.3, 0.6),
        ({"blur": 1}, 0.4, 3.5),
        ({"solarize": 1}, 0.001, 0.001),
        ({}, 0.001, 0.001),
    ],
)
def test_each_operation_equals_the_cpus(
    small_images: np.ndarray, changes: dict[str, float], mean: float, largest: float
) -> None:
    images, view = small_images[:300], replace(PLAIN, **changes)
    drawn = parameters(view, 300)
    error = np.abs(on_device(images, drawn) - on_cpu(images, view, drawn))
    assert error.mean() < mean
    assert error.max() < largest


def test_some_and_none_of_the_images_may_have_an_operation(small_images: np.ndarray) -> None:
    images = small_images[:300]
    view = View(SIZE, (1.0, 1.0), (1.0, 1.0), jitter=0.5, gray=0.3, blur=0.5, solarize=0.5)
    drawn = parameters(view, 300)
    untouched = ~(drawn.jitter | drawn.gray | (drawn.sigma > 0) | drawn.solarize)
    assert 10 < untouched.sum() < 100
    changed = on_device(images, drawn)
    assert np.abs(changed[untouched] - images[untouched]).max() < 0.001
    assert np.abs(changed - on_cpu(images, view, drawn)).mean(axis=(1, 2, 3)).max() < 2


def test_every_order_is_its_own(small_images: np.ndarray) -> None:
    """24 orders of the same image and factors, far enough apart to tell."""
    orders = np.array(list(permutations(range(4))))
    images = np.stack([small_images[7]] * 24)
    one = parameters(STRONG, 1)
    same = {name: np.repeat(values, 24, axis=0) for name, values in one._asdict().items()}
    strengths = {"brightness": np.full(24, 1.5), "contrast": np.full(24, 0.5), "saturation": np.full(24, 1.9)}
    drawn = Parameters(**{**same, **strengths, "hue": np.full(24, 60), "order": orders})
    ours, wanted = on_device(images, drawn), on_cpu(images, STRONG, drawn)
    distance = np.abs(ours[:, None] - wanted[None]).mean(axis=(2, 3, 4))  # (24, 24)
    assert distance.diagonal().max() < 1.5
    # Where operations commute on this image two orders are one; the others must differ.
    apart = np.abs(wanted[:, None] - wanted[None]).mean(axis=(2, 3, 4)) > 4
    assert apart.sum() > 300
    assert distance[apart].min() > 2 * distance.diagonal().max()


def test_hue_is_the_textbooks(small_images: np.ndarray) -> None:
    images = np.concatenate([small_images[:6, ::4, ::4], np.full((1, 8, 8, 3), 90, np.uint8)])
    view = replace(PLAIN, jitter=1, hue=0.5)
    drawn = parameters(view, 7)
    ours = on_device(images, drawn)
    for image, mine, turn in zip(images, ours, drawn.hue / 256, strict=True):
        for pixel, new in zip(image.reshape(-1, 3) / 255, mine.reshape(-1, 3) / 255, strict=True):
            h, s, v = colorsys.rgb_to_hsv(*pixel.tolist())
            assert new == pytest.approx(colorsys.hsv_to_rgb((h + turn) % 1, s, v), abs=1e-5)


@pytest.mark.parametrize("size", [1, 4, 6, 20])  # the largest kernel reaches 6 pixels
def test_blur_is_a_gaussian_with_a_mirrored_border(size: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, size, size, 3), dtype=np.uint8)
    sigmas = np.array([0.0, 0.1, 0.5, 1.0, 1.7, 2.0])
    drawn = parameters(PLAIN, 6)._replace(sigma=sigmas)
    ours = on_device(images, drawn)
    for image, mine, sigma in zip(images, ours, sigmas.tolist(), strict=True):
        reach = int(np.ceil(3 * sigma))
        weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / max(sigma, 1e-9)) ** 2)
        kernel = np.outer(weights, weights) / weights.sum() ** 2
        padded = np.pad(
            image.astype(float), ((reach, reach), (reach, reach), (0, 0)), "reflect" if size > 1 else "edge"
        )
        windows = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape, (0, 1))
        np.testing.assert_allclose(mine, (windows * kernel).sum((3, 4)), atol=1e-3)


def test_bf16_autocast_changes_nothing(small_images: np.ndarray) -> None:
    images, rows = torch.from_numpy(small_images[:40]), torch.from_numpy(color_rows(parameters(View(SIZE), 40)))
    plain = change_colors(images, rows, max_sigma=MAX_SIGMA)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(change_colors(images, rows, max_sigma=MAX_SIGMA), plain)


def test_a_gpu_could_run_it_without_the_host_waiting() -> None:
    """On tensors without values: reading one, or mixing in a tensor of the CPU, would fail."""
    mode = FakeTensorMode()
    images, rows = (
        FakeTensor(mode, torch.empty(shape, dtype=kind, device="meta"), torch.device("cuda:0"))
        for shape, kind in (((5, 9, 9, 3), torch.uint8), ((5, 2, 11), torch.float32))
    )
    with mode:
        batch = Batch([images, images], torch.arange(5), None, epoch=0, bad=(), colors=rows)
        for view in build_prepare(ViewsConfig(), 3)(batch):
            assert view.shape == (5, 3, 9, 9)
            assert view.device.type == "cuda"


class TestWhole:
    @pytest.mark.parametrize("bad", [0, 5])
    def test_views_equal_the_cpus_with_local_crops_and_bad_images(
        self, bad: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = Config(views=ViewsConfig(local_crops=2, local_size=16), train=TrainConfig(batch_size=64))
        source = open_source("shapes:128", "train")
        load = source.load

        def torn(position: int) -> np.ndarray:
            if bad and position % bad == 0:
                raise DecodeError(str(position), "torn")
            return load(position)

        monkeypatch.setattr(source, "load", torn)
        loaders = [build_loader(config.replace(workers=0, views=where), source, SIZE) for where in ("cpu", "device")]
        cpu, device = (next(loader.batches(3)) for loader in loaders)
        assert cpu.epoch == 1
        assert len(cpu.bad) >= bad
        assert cpu.colors is None
        assert device.colors is not None
        assert device.colors.shape == (64, 4, 11)
        assert cpu.indices.tolist() == device.indices.tolist()
        prepare = build_prepare(config.views, 3)
        for number, (one, other) in enumerate(zip(prepare(cpu), prepare(device), strict=True)):
            assert one.shape == other.shape == (64, 3, *(SIZE if number < 2 else 16,) * 2)
            assert other.is_contiguous()
            error = (one - other).abs().mean(dim=(1, 2, 3)) * 255 * 0.226  # in gray levels
            assert error.mean() < 1
            assert error.max() < 2.5

    def test_are_distributed_as_the_cpus(self, small_images: np.ndarray) -> None:
        views = two_views(SIZE, (0.1, 1.0))
        images, indices = list(small_images), np.arange(len(small_images))
        cpu = Views(views, seed=1)(images, epoch=0, indices=indices)
        crops = Crops(views, seed=2)
        rows = torch.from_numpy(crops.colors(epoch=0, indices=indices))
        for number, pixels in enumerate(crops(images, epoch=0, indices=indices)):
            changed = change_colors(torch.from_numpy(pixels), rows[:, number], max_sigma=MAX_SIGMA)
            ours = changed.permute(0, 2, 3, 1).numpy()
            for measure in (mean_of, spread_of, gradient_of, colorfulness_of):
                assert not far_apart(measure(ours), measure(cpu[number])), measure.__name__
            grays = [(colorfulness_of(each) < 0.5).mean() for each in (ours, cpu[number])]
            assert abs(grays[0] - grays[1]) < 0.06


class TestLoading:
    source = open_source("shapes:48", "train")

    def batches(self, count: int, start: int = 0, **options: int) -> list[Batch]:
        loader = Loader(self.source, Crops(two_views(16), seed=3), batch_size=16, seed=3, **options)
        return list(islice(loader.batches(start), count))

    @staticmethod
    def tensors(batch: Batch) -> list[Tensor]:
        assert batch.colors is not None
        return [batch.indices, *batch.views, batch.colors]

    def same(self, one: list[Batch], other: list[Batch]) -> None:
        for a, b in zip(one, other, strict=True):
            for x, y in zip(self.tensors(a), self.tensors(b), strict=True):
                assert torch.equal(x, y)

    def test_does_not_depend_on_workers_and_goes_on_anywhere(self) -> None:
        straight = self.batches(5)
        self.same(self.batches(5, workers=2), straight)
        self.same(self.batches(3, start=2), straight[2:])
        assert not torch.equal(self.tensors(straight[0])[-1], self.tensors(straight[3])[-1])

    def test_does_not_depend_on_processes(self) -> None:
        ranks = [self.batches(3, world_size=2, rank=rank) for rank in (0, 1)]
        for whole, *parts in zip(self.batches(3), *ranks, strict=True):
            for x, *pieces in zip(self.tensors(whole), *map(self.tensors, parts), strict=True):
                assert torch.equal(x, torch.cat(pieces))

    def test_the_colors_move_with_the_batch(self) -> None:
        moved = self.batches(1)[0].to("meta")
        assert [tensor.device.type for tensor in self.tensors(moved)] == ["cpu", *["meta"] * 3]  # indices stay

    def test_large_images_are_reduced_as_on_the_cpu(self) -> None:
        views = two_views(32)
        for index in range(20):
            scales = [make(views, seed=0).reduction(900, 1200, epoch=1, index=index) for make in (Views, Crops)]
            assert scales[0] == scales[1]


class TestSetting:
    def test_reaches_the_configuration(self) -> None:
        assert Config().runtime.views == "cpu"
        assert Config().replace(views="device").runtime.views == "device"

    def test_an_unknown_one_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"runtime\.views is 'gpu'; it must be 'cpu' or 'device'"):
            Config().replace(views="gpu")

    def test_may_change_when_a_run_goes_on(self) -> None:
        assert differences(Config(), Config().replace(views="device")) == []
