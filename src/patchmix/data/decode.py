"""Bytes → upright RGB pixels, or as many channels as an encoder takes: (H, W, C).

OpenCV decodes what it decodes right and fast (8-bit JPEG and PNG without alpha); Pillow does the rest. Pixels with
alpha are composited over white. An animation is its first frame. `decode` gives 8 bits; `read_image` keeps the depth of
16-bit files and of arrays, and reads other numbers of channels than RGB's with NumPy and tifffile.
"""

import io
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import tifffile
from PIL import Image, ImageOps, UnidentifiedImageError

Pixels = npt.NDArray[Any]  # uint8 (H, W, 3) unless said otherwise

EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
MAX_PIXELS = 100_000_000  # against decompression bombs; checked in the header, before anything is decoded

_JPEG, _PNG, _NPY = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"\x93NUMPY"
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_EXTENSIONS = {_JPEG: "jpg", _PNG: "png", b"RIFF": "webp", b"GIF8": "gif", b"BM": "bmp", b"P6": "ppm", b"P5": "pgm"}
_ONE_HEADER = threading.Lock()  # of .npy: NumPy parses it with `ast`, which Python 3.11.7, for one, can't do in threads
_SPECIAL_CHUNKS = (b"tRNS", b"eXIf", b"acTL")  # of PNG: a transparent color, orientation, animation
# What is wrong with a file is said once, by DecodeError. (`catch_warnings` in threads would silence the program.)
logging.getLogger("tifffile").setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", module=r"PIL\.")

_REDUCED_FLAGS = {2: cv2.IMREAD_REDUCED_COLOR_2, 4: cv2.IMREAD_REDUCED_COLOR_4, 8: cv2.IMREAD_REDUCED_COLOR_8}


class DecodeError(ValueError):
    """A sample that cannot be turned into pixels; prints as "key: reason"."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key, self.reason = key, reason

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


class Reduced(NamedTuple):
    """Pixels at a half, a quarter or an eighth of the scale, with the size of the whole image."""

    pixels: Pixels
    height: int
    width: int


def decode(data: bytes, key: str, reduction: int = 1) -> Pixels:
    """Decode an image file's bytes: uint8 (H, W, 3), RGB, upright. Raises DecodeError naming `key`.

    A JPEG may be taken at 1 / `reduction` (1, 2, 4 or 8) of its scale, which its transform makes cheap.
    """
    with _decode_errors(key), _open_pillow(data, key) as image:
        # If the file's end is missing, Pillow says what is wrong, where OpenCV prints to stderr on its own.
        if _is_simple(image, data) and _is_complete(data):
            pixels = _imdecode(data, _REDUCED_FLAGS.get(reduction, cv2.IMREAD_COLOR))
            width, height = (-(-side // reduction) for side in image.size)
            if pixels is not None and pixels.shape[:2] == (height, width):
                return np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB, dst=pixels), np.uint8)
        if reduction > 1:
            image.draft(None, (image.width // reduction, image.height // reduction))
        return np.ascontiguousarray(to_rgb(image), dtype=np.uint8)


def pixel_channels(in_chans: int) -> int:
    """The channels of the images that an encoder of `in_chans` is given: RGB for 1, which is their mean, and 3."""
    return 3 if in_chans == 1 else in_chans


def read_image(data: bytes, key: str, channels: int = 3) -> Pixels:
    """As `decode`, but in the file's own depth, and with as many channels: uint8, uint16 or float32 (H, W, channels).

    .npy files and, unless channels are 3, TIFF files are taken as they are: (H, W, C), (C, H, W) or (H, W).
    """
    if data.startswith(_NPY):
        return as_pixels(_read_npy(data, key), key, channels)
    if channels == 3:
        deep = _decode_16_bits(data, key)
        return decode(data, key) if deep is None else deep
    if data.startswith(_TIFF):
        return as_pixels(_read_tiff(data, key), key, channels)
    raise DecodeError(key, f"{channels} channels are read from TIFF and .npy files only; give such files")


def read_reduced(data: bytes, key: str, channels: int, reduction: Callable[[int, int], int]) -> "Pixels | Reduced":
    """As `read_image`, but a JPEG at the scale that `reduction` gives for its height and width: 1, 2, 4 or 8."""
    if channels != 3 or not data.startswith(_JPEG):
        return read_image(data, key, channels)
    size = size_of(data, key)
    chosen = reduction(*size)
    pixels = decode(data, key, chosen)
    return pixels if chosen == 1 else Reduced(pixels, *size)


def shape_of(data: bytes, key: str, channels: int) -> tuple[int, int, int, int]:
    """Height, width, channels and bytes per value of what `read_image` gives; from the header, where that has them."""
    deep_png = data.startswith(_PNG) and data[24:25] == b"\x10"
    if channels == 3 and not deep_png and not data.startswith((_NPY, *_TIFF)):
        return *size_of(data, key), 3, 1
    image = read_image(data, key, channels)
    return *image.shape, image.itemsize


def as_pixels(array: npt.NDArray[Any], key: str, channels: int) -> Pixels:
    """An array (H, W), (H, W, C) or (C, H, W) as (H, W, channels); gray becomes RGB where channels are 3."""
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.ndim == 2:
        array = array[:, :, None]
    fitting = (channels, 1) if channels == 3 else (channels,)
    if array.ndim == 3 and array.shape[2] not in fitting and array.shape[0] in fitting:
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in fitting:
        hint = f"; use an encoder with --in-chans {min(array.shape)}" if array.ndim == 3 else ""
        raise DecodeError(key, f"its shape is {array.shape}, not (H, W, {channels}) or ({channels}, H, W){hint}")
    _check_size(array.shape[0], array.shape[1] * -(-channels // 3), key)
    if array.dtype not in (np.uint8, np.uint16):
        if array.dtype.kind != "f" and array.dtype != np.int16:
            raise DecodeError(key, f"its values are {array.dtype}; give uint8, uint16, int16 or floats")
        array = array.astype(np.float32)
        low, high = float(array.min()), float(array.max())
        if not np.isfinite([low, high]).all():
            raise DecodeError(key, "it has NaN or infinite values; fill them")
        if channels == 3 and not 0 <= low <= high <= 1:
            raise DecodeError(key, f"its floats span {low:.3g} to {high:.3g}; give RGB in [0, 1], or uint8 or uint16")
    if array.shape[2] != channels:
        array = np.repeat(array, channels, axis=2)
    return np.ascontiguousarray(array)


def to_unit(pixels: Pixels) -> npt.NDArray[np.float32]:
    """Integers → float32 in 0…1; floats are what they are."""
    white = {np.dtype(np.uint8): 255, np.dtype(np.uint16): 65535}.get(pixels.dtype, 1)
    return pixels.astype(np.float32) / np.float32(white)


def is_rgb8(pixels: Pixels) -> bool:
    return pixels.dtype == np.uint8 and pixels.shape[2] == 3


def to_picture(pixels: Pixels) -> Pixels:
    """uint8 (H, W, 3) to look at: 8 bits of RGB; of other channels the first three, each from its darkest 2 % on."""
    if is_rgb8(pixels):
        return pixels
    values = to_unit(pixels)
    if pixels.shape[2] != 3:
        values = values[:, :, [0, 1, 2] if pixels.shape[2] > 3 else [0, 0, 0]]
        low, high = np.percentile(values, (2, 98), axis=(0, 1))
        values = (values - low) / np.maximum(high - low, 1e-12)
    return (values.clip(0, 1) * 255).astype(np.uint8)


def _read_npy(data: bytes, key: str) -> npt.NDArray[Any]:
    with _decode_errors(key), _ONE_HEADER:
        file = io.BytesIO(data)
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        if int(np.prod(shape, dtype=object)) * dtype.itemsize > len(data):  # before a damaged header takes memory
            raise ValueError("it ends before its pixels do")
        return np.asarray(np.load(io.BytesIO(data), allow_pickle=False))


def _read_tiff(data: bytes, key: str) -> npt.NDArray[Any]:
    """All samples of all pages, without regard to colors."""
    with _decode_errors(key), tifffile.TiffFile(io.BytesIO(data)) as file:
        series = file.series[0]
        if series.size > 3 * MAX_PIXELS:
            raise ValueError(f"{series.size:,} values are more than the limit of {3 * MAX_PIXELS:,}")
        return np.asarray(series.asarray())


def _decode_16_bits(data: bytes, key: str) -> Pixels | None:
    """uint16 (H, W, 3) of a gray or RGB file of 16 bits, upright and without alpha; also RGB that only tifffile reads.

    None for all others, which `decode` reads.
    """
    tags: dict[int, Any] = {}
    is_deep = False
    if data.startswith(_PNG):
        is_deep = data[24:26] in (b"\x10\0", b"\x10\2") and _is_complete(data)
        is_deep = is_deep and _is_simple(_open_pillow(data, key), data)
    elif data.startswith(_TIFF):
        try:
            with _open_pillow(data, key) as image:
                tags = dict(getattr(image, "tag_v2", {}))
        except DecodeError as error:
            return _read_rgb_tiff(data, key, error)
        bits = tags.get(258)
        if tags.get(284) == 2 and bits == (16,) * 3:  # a plane per channel: Pillow and OpenCV take it for pixels
            return _read_rgb_tiff(data, key)
        upright_colors = tags.get(274, 1) == 1 and tags.get(262) in (0, 1, 2)
        is_deep = upright_colors and set(tags.get(339, (1,))) == {1} and bits in ((16,), (16,) * 3)
    pixels = _imdecode(data, cv2.IMREAD_UNCHANGED) if is_deep else None
    if pixels is None or pixels.dtype != np.uint16:
        return None
    if tags.get(262) == 0:  # it stores white as 0; OpenCV turns that over in 8 bits only
        pixels = ~pixels
    return np.asarray(cv2.cvtColor(pixels, cv2.COLOR_GRAY2RGB if pixels.ndim == 2 else cv2.COLOR_BGR2RGB))


def _read_rgb_tiff(data: bytes, key: str, error: DecodeError | None = None) -> Pixels:
    """By tifffile; `error` says why Pillow cannot read it."""
    try:
        array = _read_tiff(data, key)
    except DecodeError as failure:
        raise (error or failure) from None
    found = min(array.shape) if array.ndim == 3 else 3
    if found != 3:
        raise DecodeError(key, f"it has {found} channels; use an encoder with --in-chans {found}") from error
    return as_pixels(array, key, 3)


def size_of(data: bytes, key: str) -> tuple[int, int]:
    """(height, width) of the decoded image, from its header. Raises DecodeError."""
    with _decode_errors(key):
        try:
            image = _open_pillow(data, key)
        except DecodeError:
            with suppress(Exception), tifffile.TiffFile(io.BytesIO(data)) as file:  # of many channels
                page: Any = file.pages[0]
                return int(page.imagelength), int(page.imagewidth)
            raise
        with image:
            if _is_simple(image, data):
                return image.height, image.width
            if image.format == "TIFF":  # whose size Pillow has turned already, or not: it depends on its version
                upright = ImageOps.exif_transpose(image)
                return upright.height, upright.width
            sideways = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
            return (image.width, image.height) if sideways else (image.height, image.width)


def extension_of(data: bytes) -> str:
    """The usual extension of an image file, by how its bytes begin; "tif" for all that are not known."""
    return next((extension for magic, extension in _EXTENSIONS.items() if data.startswith(magic)), "tif")


def _is_simple(image: Image.Image, data: bytes) -> bool:
    """Whether OpenCV decodes a file of this kind as well as Pillow does; from its header."""
    if image.format == "PNG":  # a chance match inside the compressed pixels only means the slower way
        return image.mode in ("L", "RGB", "I;16") and not any(chunk in data for chunk in _SPECIAL_CHUNKS)
    return image.format == "JPEG" and image.mode in ("L", "RGB") and "exif" not in image.info  # may be rotated


def _is_complete(data: bytes) -> bool:
    return data.rstrip(b"\0")[-2:] == b"\xff\xd9" if data[:2] == b"\xff\xd8" else b"IEND" in data[-16:]


def _imdecode(data: bytes, flags: int) -> Any:
    """BGR; None for what OpenCV cannot decode. Not turned: which formats it turns differs between its versions."""
    with suppress(cv2.error):
        return cv2.imdecode(np.frombuffer(data, np.uint8), flags | cv2.IMREAD_IGNORE_ORIENTATION)
    return None


def to_rgb(image: Image.Image) -> npt.NDArray[np.generic]:
    """Any PIL image, upright and over white: uint8 (H, W, 3)."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):
        values = np.nan_to_num(np.asarray(image, dtype=np.float64))
        if image.mode == "F":
            gray = np.rint(values * (255 if values.size and values.max() <= 1 else 1))  # 0…1, or 0…255
        else:
            gray, low, high = values // 256, values.min(), values.max()  # 16 bits, kept in 32 by some decoders
            if low < 0 or high > 65535:
                raise ValueError(f"its values span {low:.0f} to {high:.0f}; give 8 or 16 bits, from 0 on")
        return np.repeat(gray.clip(0, 255).astype(np.uint8)[:, :, None], 3, axis=2)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, rgba)
    return np.asarray(image.convert("RGB"))


def _open_pillow(data: bytes, key: str) -> Image.Image:
    with _decode_errors(key):
        image = Image.open(io.BytesIO(data))
    _check_size(image.height, image.width, key)
    return image


def _check_size(height: int, width: int, key: str) -> None:
    if height * width > MAX_PIXELS:
        raise DecodeError(key, f"{width} x {height} pixels are more than the limit of {MAX_PIXELS:,}")
    if height * width == 0:
        raise DecodeError(key, "has no pixels")


@contextmanager
def _decode_errors(key: str) -> Iterator[None]:
    """Pillow, NumPy and tifffile raise nearly anything on damaged files; from here on it is a DecodeError."""
    try:
        yield
    except DecodeError:
        raise
    except UnidentifiedImageError as error:
        raise DecodeError(key, "not an image that OpenCV or Pillow can read") from error
    except Image.DecompressionBombError as error:  # Pillow's own limit, above ours
        raise DecodeError(key, f"its pixels are more than the limit of {MAX_PIXELS:,}") from error
    except Exception as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        hint = "; install it with pip install 'patchmix-ssl[tiff]'" if "imagecodecs" in reason else ""
        raise DecodeError(key, reason + hint) from error
