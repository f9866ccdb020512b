"""Images of other depths and channels than 8-bit RGB: read exactly, normalized by what is measured, through runs."""

from __future__ import annotations

import io
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow.parquet as pq
import pytest
import tifffile
import torch
from PIL import Image

import patchmix
from benchmarks.plain_views import two_views
from patchmix.cli import main
from patchmix.config import read_config
from patchmix.data.decode import DecodeError, read_image, to_unit
from patchmix.data.device_views import Crops, Prepare
from patchmix.data.loader import one_pass
from patchmix.data.memory import mean_and_std
from patchmix.data.python import name_of
from patchmix.data.sources import open_source
from patchmix.data.views import CenterCrop, View, Views
from patchmix.interop.backbone import Architecture, Backbone, fitted
from patchmix.nn.vit import create_encoder
from tests.conftest import SMALL_RUN

RNG = np.random.default_rng(0)
BANDS = RNG.integers(0, 65536, (32, 21, 18, 5), dtype=np.uint16)  # (N, H, W, C)
BANDS[..., 3] //= 50  # channels of very different ranges
LABELS = np.arange(32) % 2
RUN: dict[str, Any] = {k: v for k, v in SMALL_RUN.items() if k != "mean"} | {
    "recipe": "demo", "model": "vit_tiny_patch8_32", "image_size": 16, "depth": 2, "epochs": 2, "batch_size": 8,
    "workers": 0, "device": "cpu", "in_chans": 5, "keep_checkpoints": 99, "checkpoint_epochs": 0.75,
}  # fmt: skip


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def tiff(array: np.ndarray, **options: Any) -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(file, array, **options)
    return file.getvalue()


def write(root: Path, kind: str, *, labeled: bool = True) -> Path:
    for i, image in enumerate(BANDS):
        folder = root / ("ab"[LABELS[i]] if labeled else "")
        folder.mkdir(parents=True, exist_ok=True)
        data = npy(image) if kind == "npy" else tiff(image, photometric="rgb", compression="deflate")
        (folder / f"{i:02}.{kind}").write_bytes(data)
    return root


# ---------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("order", ["<u2", ">u2"])
def test_bands_are_read_as_they_are(order: str) -> None:
    image = BANDS[0]
    planes = np.ascontiguousarray(image.transpose(2, 0, 1))
    files = {
        "npy": npy(image.astype(order)),
        "npy, channels first": npy(planes.astype(order)),
        "tiff": tiff(image, photometric="rgb", byteorder=order[0]),
        "tiff, planar": tiff(planes, photometric="minisblack", planarconfig="separate", byteorder=order[0]),
        "tiff, pages": tiff(planes, photometric="minisblack", byteorder=order[0]),
        "tiff, compressed": tiff(image, photometric="rgb", compression="deflate", predictor=2, byteorder=order[0]),
        "big tiff": tiff(image, photometric="rgb", bigtiff=True),
    }
    for name, data in files.items():
        found = read_image(data, name, 5)
        assert found.dtype == np.dtype(np.uint16) and found.flags.c_contiguous and np.array_equal(found, image), name
    for dtype, kept in ((np.uint8, np.uint8), (np.int16, np.float32), (np.float64, np.float32)):
        values = (image // 3).astype(dtype) if dtype != np.int16 else image.view(np.int16)
        found = read_image(npy(values), "x", 5)
        assert found.dtype == kept and np.array_equal(found, values)


def test_16_bits_of_pictures_are_kept() -> None:
    color, gray = np.ascontiguousarray(BANDS[0][..., :3]), np.ascontiguousarray(BANDS[0][..., 0])
    repeated = np.repeat(gray[..., None], 3, axis=2)
    lzw = io.BytesIO()
    Image.fromarray(gray).save(lzw, "TIFF", compression="tiff_lzw")
    for data, expected in [
        (cv2.imencode(".png", color[..., ::-1])[1].tobytes(), color),
        (cv2.imencode(".png", gray)[1].tobytes(), repeated),
        (tiff(color, photometric="rgb"), color),
        (tiff(color.transpose(2, 0, 1), photometric="rgb", planarconfig="separate"), color),
        (tiff(gray), repeated),
        (tiff(gray, photometric="miniswhite"), 65535 - repeated),
        (lzw.getvalue(), repeated),
        (npy(color), color),
        (npy(gray), repeated),
    ]:
        found = read_image(data, "x")
        assert found.dtype == np.uint16 and np.array_equal(found, expected)
    crop = CenterCrop(18)([BANDS[0][:18], color[:18].repeat(2, axis=2)[..., :5]], epoch=0, indices=np.arange(2))[0]
    assert crop.dtype == np.float32 and np.array_equal(np.rint(crop[0] * 65535), BANDS[0][:18])
    both = CenterCrop(18)([color[:18], (color[:18] >> 8).astype(np.uint8)], epoch=0, indices=np.arange(2))[0]
    assert np.array_equal(np.rint(both[1] * 255), color[:18] >> 8)  # 8 and 16 bits in one batch


@pytest.mark.parametrize(
    ("data", "channels", "reason"),
    [
        (npy(BANDS[0]), 3, r"its shape is \(21, 18, 5\), not \(H, W, 3\) or \(3, H, W\); use .* --in-chans 5"),
        (npy(BANDS[0]), 4, "--in-chans 5"),
        (tiff(BANDS[0], photometric="rgb"), 3, "it has 5 channels; use an encoder with --in-chans 5"),
        (tiff(BANDS[0], photometric="rgb"), 6, "--in-chans 5"),
        (tiff(BANDS[0][..., :3].astype(np.int16), photometric="rgb"), 3, r"its floats span .*; give RGB in \[0, 1\]"),
        (tiff(np.array([[-1000, 3000]], np.int16)), 3, "its values span -1000 to 3000; give 8 or 16 bits, from 0 on"),
        (tiff(np.array([[7, 70_000]], np.uint32)), 3, "its values span 7 to 70000"),
        (cv2.imencode(".png", BANDS[0][..., :3])[1].tobytes(), 5, "5 channels are read from TIFF and .npy files only"),
        (npy(BANDS[0].astype(np.int64)), 5, "its values are int64; give uint8, uint16, int16 or floats"),
        (npy(np.full((4, 4, 5), np.nan)), 5, "NaN or infinite"),
        (npy(np.full((4, 4, 3), 7.0)), 3, r"its floats span 7 to 7; give RGB in \[0, 1\]"),
        (npy(BANDS[0])[:200], 5, "ends before its pixels do"),
        (npy(BANDS[0])[:20], 5, "x: "),
        (tiff(BANDS[0], photometric="rgb")[:300], 5, "x: "),
        (npy(np.array([{}, 1], dtype=object)), 5, "x: "),  # a pickle is not opened
    ],
)
def test_what_cannot_be_read_is_one_line(data: bytes, channels: int, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason) as error:
        read_image(data, "x", channels)
    assert "\n" not in str(error.value)


def test_rgb_of_floats_is_read_from_tiff() -> None:
    color = (BANDS[0][..., :3] / 65535).astype(np.float32)
    found = read_image(tiff(color, photometric="rgb"), "x")
    assert found.dtype == np.float32 and np.array_equal(found, color)


def test_threads_parse_one_header_of_npy_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two, Python 3.11.7 raises "AST constructor recursion depth mismatch" once in a while."""
    real, parsing, most = np.lib.format.read_array_header_1_0, [], []

    def slow(file: Any) -> Any:
        parsing.append(file)
        most.append(len(parsing))
        time.sleep(0.01)
        parsing.pop()
        return real(file)

    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", slow)
    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(lambda number: read_image(npy(BANDS[0]), str(number), 5), range(8)))) == 8
    assert max(most) == 1


def test_missing_codec_names_the_extra() -> None:
    bands = io.BytesIO()
    Image.fromarray(BANDS[0][..., 0]).save(bands, "TIFF", compression="tiff_lzw")
    if "imagecodecs" in str(tifffile.TIFF) or _can_lzw(bands.getvalue()):
        pytest.skip("imagecodecs is installed")
    with pytest.raises(DecodeError, match=r"pip install 'patchmix-ssl\[tiff\]'"):
        read_image(bands.getvalue(), "x", 2)


def _can_lzw(data: bytes) -> bool:
    try:
        tifffile.imread(io.BytesIO(data))
    except ValueError:
        return False
    return True


# ----------------------------------------------------------------------------------------------- what is measured


def test_mean_and_std_are_those_of_all_pixels(tmp_path: Path) -> None:
    values = BANDS.astype(np.float64).reshape(-1, 5) / 65535
    for data in (BANDS, str(write(tmp_path, "npy"))):
        mean, std = mean_and_std(open_source(name_of(data), cache_bytes=0, in_chans=5))
        assert mean == pytest.approx(values.mean(axis=0), rel=1e-5)
        assert std == pytest.approx(values.std(axis=0), rel=1e-5)
    wide = BANDS.astype(np.float32) * 3 - 500
    mean, std = mean_and_std(open_source(name_of(wide), in_chans=5))
    flat = wide.astype(np.float64).reshape(-1, 5)
    assert mean == pytest.approx(flat.mean(axis=0), rel=1e-5) and std == pytest.approx(flat.std(axis=0), rel=1e-5)
    bytes_ = (BANDS[..., :3] >> 8).astype(np.uint8)
    mean, _ = mean_and_std(open_source(name_of(bytes_)))
    assert mean == pytest.approx(bytes_.reshape(-1, 3).mean(axis=0) / 255, rel=1e-5)
    flat_channel = BANDS.copy()
    flat_channel[..., 2] = 7
    with pytest.raises(ValueError, match=r"channel 2 of .* has the same value everywhere; remove it, or give --mean"):
        mean_and_std(open_source(name_of(flat_channel), in_chans=5))


# ------------------------------------------------------------------------------------------------------------ views


def normalized(data: Any, transform: Any, channels: int) -> torch.Tensor:
    source = open_source(name_of(data), in_chans=channels)
    batch = next(iter(one_pass(source, transform, batch_size=len(source))))
    return Prepare(mean=(0.0,) * channels, std=(1.0,) * channels, in_chans=channels)(batch)[0]


def test_8_bits_and_16_bits_get_the_same_views() -> None:
    small = RNG.integers(0, 256, (12, 6, 5, 3), dtype=np.uint8)
    pictures = np.stack([cv2.resize(image, (40, 44), interpolation=cv2.INTER_CUBIC) for image in small])
    view = replace(two_views(32)[0], jitter=1.0, gray=0.3, solarize=0.5, blur=0.5)
    plain = normalized(pictures, Views([view], seed=0), 3)
    deep = normalized(pictures.astype(np.uint16) * 257, Views([view], seed=0), 3)
    assert (plain - deep).abs().mean() < 1 / 255 and (plain - deep).abs().max() < 12 / 255  # rounding, most in hue


@pytest.mark.parametrize("channels", [2, 5, 70])
def test_bands_get_brightness_contrast_and_blur_alike_on_both_sides(channels: int) -> None:
    bands = RNG.integers(0, 65536, (6, 40, 44, channels), dtype=np.uint16)
    sharp = View(32, jitter=1.0, gray=1.0, solarize=1.0, blur=0.0)
    for view, within in ((sharp, 1e-5), (replace(sharp, blur=1.0), 0.02)):  # the CPU's blur has weights of n / 256
        cpu, device = (normalized(bands, create([view], seed=0), channels) for create in (Views, Crops))
        torch.testing.assert_close(cpu, device, atol=within, rtol=0)
    assert (cpu - normalized(bands, Views([sharp], seed=0), channels)).abs().mean() > 0.02
    whole = View(40, (1.0, 1.0), (1.0, 1.0), flip=0, jitter=1.0, blur=0, saturation=0, hue=0, gray=0)
    image = bands[:, :, :40]
    changed = normalized(image, Views([whole], seed=0), channels).double()
    slopes = []
    for before, after in zip(torch.from_numpy(to_unit(image)).double().permute(0, 3, 1, 2), changed, strict=True):
        # Brightness b and contrast c, in any order: after = b·c·before + a multiple of each channel's own mean.
        slope = ((after - after.mean((1, 2), True)) / (before - before.mean((1, 2), True))).median()
        shift = after - slope * before
        assert shift.std((1, 2)).max() < 1e-5
        slopes.append(float(slope))
    assert np.std(slopes) > 0.1


# ------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("kind", ["tif", "npy"])
def test_train_resume_and_evaluate(kind: str, tmp_path: Path) -> None:
    data = write(tmp_path / "data", kind)
    options = RUN | ({"cache_gb": 0.0} if kind == "npy" else {"stem": "conv"})
    run = patchmix.pretrain(data, tmp_path / "a", **options)
    config, backbone = read_config(run.path), run.load()
    flat = BANDS.astype(np.float64).reshape(-1, 5) / 65535
    assert config.views.mean == backbone.mean == pytest.approx(flat.mean(axis=0), rel=1e-5)
    assert (config.views.hue, config.views.gray, config.views.solarize) == (0, 0, (0, 0))
    assert backbone.architecture.in_chans == 5
    (tmp_path / "b" / "checkpoints").mkdir(parents=True)
    shutil.copy(run.path / "checkpoints" / "step-000000003.pt", tmp_path / "b" / "checkpoints")
    again = patchmix.pretrain(data, tmp_path / "b", resume="auto", **options)
    assert again.load().digest() == backbone.digest() and again.load().mean == backbone.mean
    assert run.knn(str(data), k=(3,), device="cpu").images == 32
    assert run.linear(str(data), device="cpu", workers=0).images == 6  # a fifth of each class
    tuned = run.finetune(str(data), device="cpu", workers=0, epochs=1, batch_size=16)
    assert tuned.images == 6 and tuned.settings["rand_augment"] is None and tuned.settings["crop"] == [0.08, 1.0]
    main(["embed", str(run.path), "--data", str(data), "--out", str(tmp_path / "e.parquet"), "--workers", "0"])
    vectors = np.stack(pq.read_table(tmp_path / "e.parquet")["vector"].to_numpy())
    files = sorted(data.rglob(f"*.{kind}"))
    ours = backbone.embed([str(file) for file in files], device="cpu").numpy()
    np.testing.assert_allclose(ours, vectors, rtol=1e-3, atol=1e-3)
    order = [int(file.stem) for file in files]
    np.testing.assert_allclose(backbone.embed(BANDS[order], device="cpu").numpy(), ours, rtol=1e-3, atol=1e-3)
    if kind == "tif":
        main(["shards", str(data), "--out", str(tmp_path / "shards"), "--per-shard", "9"])
        assert run.knn(str(tmp_path / "shards"), k=(3,), device="cpu").images == 32
    main(["show", "attention", str(run.path), "--data", str(data), "--out", str(tmp_path / "attention.png")])


def test_arrays_from_python_and_views_on_the_device(tmp_path: Path) -> None:
    tensors = torch.utils.data.TensorDataset(
        torch.from_numpy(BANDS.astype(np.float32)).permute(0, 3, 1, 2), torch.from_numpy(LABELS)
    )
    run = patchmix.pretrain(tensors, tmp_path / "a", views="device", **RUN)
    assert run.load().mean == pytest.approx(BANDS.reshape(-1, 5).mean(axis=0), rel=1e-5)
    assert patchmix.knn(run.path, data=tensors, k=(3,), device="cpu").images == 32
    more = patchmix.adapt(run.path, (BANDS, LABELS), tmp_path / "b", **_adapting())  # 5 channels, as the weights have
    assert more.load().architecture.in_chans == 5 and more.load().mean == run.load().mean


def _adapting() -> dict[str, Any]:
    return {k: v for k, v in RUN.items() if k not in ("recipe", "model", "in_chans", "dim", "depth", "image_size")}


def test_rgb_weights_are_adapted_to_bands(trained_run: Path, tmp_path: Path) -> None:
    run = patchmix.adapt(trained_run, BANDS, tmp_path / "a", in_chans=5, **_adapting() | {"head_warmup": 0.99})
    start = patchmix.load(trained_run)
    kernel = start.weights["patch_embed.proj.weight"]
    expected = torch.cat([kernel, kernel[:, :2]], dim=1) * 3 / 5
    torch.testing.assert_close(run.load().weights["patch_embed.proj.weight"], expected)
    assert len(run.load().mean) == 5 and len(start.mean) == 3


def test_the_first_convolution_of_a_stem_is_adapted_as_timm_does() -> None:
    sizes: dict[str, Any] = {"dim": 24, "depth": 1, "heads": 2, "stem": "conv"}
    weights = create_encoder("vit_tiny_patch8_32", **sizes).state_dict()
    encoder = create_encoder("vit_tiny_patch8_32", in_chans=7, **sizes)
    encoder.load_state_dict(fitted(weights, encoder))
    kernel = weights["patch_embed.proj.0.weight"]
    expected = torch.cat([kernel, kernel, kernel[:, :1]], dim=1) * 3 / 7
    torch.testing.assert_close(encoder.state_dict()["patch_embed.proj.0.weight"], expected)


def test_segmentation_of_bands(tmp_path: Path) -> None:
    for split, part in (("train", range(12)), ("val", range(12, 16))):
        for kind in ("images", "masks"):
            (tmp_path / kind / split).mkdir(parents=True)
        for i in part:
            (tmp_path / "images" / split / f"{i}.tif").write_bytes(tiff(BANDS[i], photometric="rgb"))
            Image.fromarray((BANDS[i, :, :, 0] > 30000).astype(np.uint8)).save(tmp_path / "masks" / split / f"{i}.png")
    encoder = create_encoder("vit_tiny_patch8_16", dim=24, depth=1, heads=2, in_chans=5)
    shape = Architecture.of("vit_tiny_patch8_16", encoder)
    Backbone(shape, encoder.state_dict(), (0.5,) * 5, (0.3,) * 5).save(tmp_path / "encoder.safetensors")
    for how in ({"protocol": "fast"}, {"batch_size": 4}):
        result = patchmix.segment(
            tmp_path / "encoder.safetensors",
            data=tmp_path,
            out=tmp_path / "out",
            epochs=1,
            workers=0,
            device="cpu",
            **how,
        )
        assert result.images == 4


# ------------------------------------------------------------------------------------------------------- mistakes


def test_mistakes_are_one_line(tmp_path: Path, trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "data", "npy")
    five = patchmix.pretrain(data, tmp_path / "five", **RUN | {"epochs": 0.25})
    cases: list[tuple[Any, str]] = [
        (lambda: patchmix.pretrain(data, tmp_path / "x", **RUN | {"in_chans": 3}), "--in-chans 5"),
        (
            lambda: patchmix.pretrain(BANDS, tmp_path / "x", **RUN | {"in_chans": 3}),
            "has images of 5 channels",
        ),
        (
            lambda: patchmix.pretrain("shapes:64", tmp_path / "x", **RUN),
            "of 3 channels, the encoder takes 5",
        ),
        (lambda: patchmix.pretrain(data, tmp_path / "x", mean=(0.5, 0.5), **RUN), "mean has 2 values for 5 channels"),
        (lambda: patchmix.knn(trained_run, data=str(data), device="cpu"), "use an encoder with --in-chans 5"),
        (
            lambda: patchmix.detect(five.path, data="coco", device="cpu"),
            "detect reads RGB images, but the encoder takes 5 channels",
        ),
        (
            lambda: patchmix.pretrain(
                data, tmp_path / "x", method="distill", teacher=str(trained_run), **_without_patchmix()
            ),
            "the teacher takes 3 channels, the student 5",
        ),
        (
            lambda: patchmix.adapt(five.path, "shapes:64", tmp_path / "x", in_chans=1, **_adapting()),
            "take 5 channels, which can't become 1",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


def _without_patchmix() -> dict[str, Any]:
    return {k: v for k, v in RUN.items() if k not in ("num_mix", "head_hidden", "head_out")}


def test_arrays_beside_images_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, "npy", labeled=False)
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "x.png")
    assert len(open_source(tmp_path)) == 1
