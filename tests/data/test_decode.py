"""Every kind of file comes out as upright RGB, 8 bits; what cannot be read says so."""

from __future__ import annotations

import io
import pickle
import struct
import subprocess
import sys
import threading
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from patchmix.data.decode import DecodeError, decode, size_of

# Four quarters of different colors, 24 high and 16 wide: any turn, flip or swapped channel shows.
PICTURE = np.zeros((24, 16, 3), np.uint8)
PICTURE[:12, :8] = (200, 30, 40)
PICTURE[:12, 8:] = (20, 180, 60)
PICTURE[12:, :8] = (30, 50, 220)
PICTURE[12:, 8:] = (240, 230, 90)
GRAY = np.linspace(0, 255, 24 * 16).astype(np.uint8).reshape(24, 16)


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def rgb() -> Image.Image:
    return Image.fromarray(PICTURE)


def close(one: np.ndarray, other: np.ndarray, within: int = 0) -> None:
    assert one.dtype == np.uint8
    assert one.shape == other.shape
    assert np.abs(one.astype(int) - other.astype(int)).max() <= within


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("WEBP", {"lossless": True}),
    ],
)
def test_lossless_rgb(kind: str, options: dict[str, object]) -> None:
    data = encode(rgb(), kind, **options)
    close(decode(data, "x"), PICTURE)
    assert decode(data, "x").flags.c_contiguous
    assert size_of(data, "x") == (24, 16)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("JPEG", {"quality": 98, "subsampling": 0}), ("JPEG", {"quality": 98, "progressive": True, "subsampling": 0})],
)
def test_lossy_rgb(kind: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(rgb(), kind, **options)
    monkeypatch.setattr("patchmix.data.decode.to_rgb", None)  # OpenCV decodes this, and as Pillow does
    close(decode(data, "x"), PICTURE, within=12)
    close(decode(data, "x"), np.asarray(Image.open(io.BytesIO(data))), within=3)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF", "JPEG"])
def test_gray(kind: str) -> None:
    data = encode(Image.fromarray(GRAY), kind, **({"quality": 100} if kind == "JPEG" else {}))
    close(decode(data, "x"), np.repeat(GRAY[:, :, None], 3, 2), within=1 if kind == "JPEG" else 0)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP"])
def test_one_bit(kind: str) -> None:
    bits = Image.fromarray(GRAY > 127)
    close(decode(encode(bits, kind), "x"), np.repeat(np.where(GRAY > 127, 255, 0).astype(np.uint8)[:, :, None], 3, 2))


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "TIFF"])
def test_palette(kind: str) -> None:
    close(decode(encode(rgb().convert("P", palette=Image.Palette.ADAPTIVE), kind), "x"), PICTURE, within=1)


def test_palette_with_transparency_is_laid_on_white() -> None:
    image = Image.new("P", (4, 4))
    image.putpalette([10, 20, 30, 250, 0, 0])
    image.putpixel((1, 2), 1)
    decoded = decode(encode(image, "PNG", transparency=0), "x")
    assert decoded[0, 0].tolist() == [255, 255, 255]
    assert decoded[2, 1].tolist() == [250, 0, 0]


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_alpha_is_laid_on_white(kind: str) -> None:
    rgba = np.dstack([PICTURE, np.full((24, 16), 255, np.uint8)])
    rgba[:12, :, 3] = 0
    rgba[12:, :8, 3] = 128
    decoded = decode(encode(Image.fromarray(rgba), kind, **({"lossless": True} if kind == "WEBP" else {})), "x")
    close(decoded[:12], np.full((12, 16, 3), 255, np.uint8))
    close(decoded[12:, 8:], PICTURE[12:, 8:])
    close(decoded[12:, :8], np.rint(PICTURE[12:, :8] * (128 / 255) + 255 * (127 / 255)).astype(np.uint8), within=1)


def test_gray_with_alpha_is_laid_on_white() -> None:
    image = Image.new("LA", (3, 3), (40, 0))
    close(decode(encode(image, "PNG"), "x"), np.full((3, 3, 3), 255, np.uint8))


def test_rgb_with_a_transparent_color_is_laid_on_white() -> None:
    decoded = decode(encode(rgb(), "PNG", transparency=(200, 30, 40)), "x")
    assert decoded[0, 0].tolist() == [255, 255, 255]
    assert decoded[0, 15].tolist() == [20, 180, 60]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_gray_keeps_its_high_byte(kind: str) -> None:
    deep = (GRAY.astype(np.uint16) << 8) + 77
    close(decode(encode(Image.fromarray(deep), kind), "x"), np.repeat(GRAY[:, :, None], 3, 2))


def test_16_bit_color_keeps_its_high_byte() -> None:
    import cv2

    deep = (PICTURE.astype(np.uint16) << 8) + 77
    _, data = cv2.imencode(".png", deep[:, :, ::-1])
    close(decode(data.tobytes(), "x"), PICTURE, within=1)


@pytest.mark.parametrize("scale", [1.0, 255.0])
def test_float_tiff(scale: float) -> None:
    image = Image.fromarray(GRAY.astype(np.float32) / 255 * np.float32(scale))
    close(decode(encode(image, "TIFF"), "x"), np.repeat(GRAY[:, :, None], 3, 2))


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk(kind: str) -> None:
    data = encode(rgb().convert("CMYK"), kind, **({"quality": 98, "subsampling": 0} if kind == "JPEG" else {}))
    close(decode(data, "x"), PICTURE, within=12)


def test_an_animation_is_its_first_frame() -> None:
    other = Image.new("RGB", (16, 24), (1, 2, 3))
    for kind, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        data = encode(rgb(), kind, save_all=True, append_images=[other], **options)
        close(decode(data, "x"), PICTURE, within=1)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_rotated_by_exif(kind: str, orientation: int) -> None:
    undo = {
        1: lambda x: x,
        2: lambda x: x[:, ::-1],
        3: lambda x: x[::-1, ::-1],
        4: lambda x: x[::-1],
        5: lambda x: x.swapaxes(0, 1),
        6: lambda x: np.rot90(x, 1),
        7: lambda x: np.rot90(x, 2).swapaxes(0, 1),
        8: lambda x: np.rot90(x, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 98, "subsampling": 0}, "WEBP": {"lossless": True}}.get(kind, {})
    data = encode(Image.fromarray(np.ascontiguousarray(undo(PICTURE))), kind, exif=exif, **options)
    close(decode(data, "x"), PICTURE, within=12 if kind == "JPEG" else 0)
    assert size_of(data, "x") == (24, 16)


def test_a_file_too_large_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(encode(rgb(), "PNG"))
    struct.pack_into(">II", data, 16, 20_000, 20_000)  # says 400 million pixels
    struct.pack_into(">I", data, 29, zlib.crc32(data[12:29]))
    with pytest.raises(DecodeError, match=r"bomb.png: its pixels are more than the limit of 100,000,000"):
        decode(bytes(data), "bomb.png")
    struct.pack_into(">II", data, 16, 12_000, 10_000)
    struct.pack_into(">I", data, 29, zlib.crc32(data[12:29]))
    with pytest.raises(DecodeError, match=r"bomb.png: 12000 x 10000 pixels are more than the limit"):
        decode(bytes(data), "bomb.png")
    monkeypatch.setattr("patchmix.data.decode.MAX_PIXELS", 100)
    for kind in ("JPEG", "GIF", "BMP", "WEBP"):
        with pytest.raises(DecodeError, match="more than the limit of 100"):
            decode(encode(rgb(), kind), "x")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_truncated_file_is_an_error(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = encode(Image.fromarray(noise), kind)
    for keep in (0, 5, 30, len(data) // 2, len(data) - 40):
        with pytest.raises(DecodeError, match="cut: "):
            decode(data[:keep], "cut")
    assert capfd.readouterr().err == ""


def test_threads_leave_the_warnings_of_the_program_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, opened, first_is_done = threading.Event(), Image.open, threading.Event()

    def open_meanwhile(file: io.BytesIO) -> Image.Image:
        if entered.is_set():  # the second one: it ends after the first one
            entered.clear()
            first_is_done.wait(5)
        else:
            entered.set()
            while entered.is_set():
                pass
        return opened(file)

    def decode_first() -> None:
        decode(data, "x")
        first_is_done.set()

    data, before = encode(rgb(), "PNG"), list(warnings.filters)
    monkeypatch.setattr(Image, "open", open_meanwhile)
    first = threading.Thread(target=decode_first)
    first.start()
    entered.wait(5)
    decode(data, "x")
    first.join(5)
    assert warnings.filters == before


def test_pillow_does_not_warn_of_broken_exif(tmp_path: Path) -> None:
    broken = b"Exif\0\0MM\0*\0\0\0\x08\0\x05\x01\x12\0\x03\0\0\0\x09\0\0\xff\xff"
    (tmp_path / "x.jpg").write_bytes(encode(rgb(), "JPEG", exif=broken))
    code = "import sys, pathlib, patchmix.data.decode as d; d.decode(pathlib.Path(sys.argv[1]).read_bytes(), 'x')"
    command = [sys.executable, "-c", code, str(tmp_path / "x.jpg")]  # its own process: pytest has its own filters
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_no_image_is_an_error() -> None:
    with pytest.raises(DecodeError, match=r"note\.jpg: not an image that OpenCV or Pillow can read"):
        decode(b"hello, I am a text" * 10, "note.jpg")


def test_the_error_survives_the_way_from_a_worker() -> None:
    error = pickle.loads(pickle.dumps(DecodeError("a.jpg", "broken")))
    assert (error.key, error.reason, str(error)) == ("a.jpg", "broken", "a.jpg: broken")
    assert isinstance(error, ValueError)


@given(data=st.binary(max_size=60), kind=st.sampled_from(["JPEG", "PNG", "WEBP", "GIF"]), at=st.integers(0, 400))
@settings(max_examples=150)
def test_damage_is_an_image_or_a_decode_error(data: bytes, kind: str, at: int) -> None:
    whole = encode(rgb(), kind)
    at = min(at, len(whole))
    damaged = whole[:at] + data + whole[at + len(data) :]
    try:
        decoded = decode(damaged, "x")
    except DecodeError:
        return
    assert decoded.ndim == 3
    assert decoded.shape[2] == 3
