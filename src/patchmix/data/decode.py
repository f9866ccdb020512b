"""Bytes → upright RGB pixels: uint8 (H, W, 3).

OpenCV decodes what it decodes right and fast (8-bit JPEG and PNG without alpha); Pillow does the rest. Pixels with
alpha are composited over white. 16-bit images keep their high byte. An animation is its first frame.
"""

import io
import struct
import warnings
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

Pixels = npt.NDArray[np.uint8]

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
MAX_PIXELS = 100_000_000  # against decompression bombs; checked in the header, before anything is decoded

_REDUCED_FLAGS = {2: cv2.IMREAD_REDUCED_COLOR_2, 4: cv2.IMREAD_REDUCED_COLOR_4, 8: cv2.IMREAD_REDUCED_COLOR_8}


class DecodeError(ValueError):
    """A sample that cannot be turned into pixels; prints as "key: reason"."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


class Reduced(NamedTuple):
    """Pixels at a half, a quarter or an eighth of the scale, with the size of the whole image."""

    pixels: Pixels
    height: int
    width: int


class Header(NamedTuple):
    """From the first bytes. `simple`: OpenCV decodes this kind as well as Pillow does."""

    height: int
    width: int
    simple: bool


def decode(data: bytes, key: str) -> Pixels:
    """Decode an image file's bytes: uint8 (H, W, 3), RGB, upright. Raises DecodeError naming `key`."""
    header = read_header(data)
    if header is not None:
        _check_size(header.height, header.width, key)
    pixels = _decode_opencv(data, header, cv2.IMREAD_COLOR)
    if header is None or pixels is None or pixels.shape[:2] != (header.height, header.width):
        pixels = _decode_pillow(data, key)
    return pixels


def decode_reduced(data: bytes, key: str, size: tuple[int, int], reduction: int) -> Pixels | Reduced:
    """As `decode`, but a JPEG at 1 / `reduction` (1, 2, 4 or 8) of its scale, which its transform makes cheap.

    size: (height, width) from `size_of`. Other formats gain nothing and are decoded whole.
    """
    if reduction == 1 or data[:3] != b"\xff\xd8\xff":
        return decode(data, key)
    pixels = _decode_opencv(data, read_header(data), _REDUCED_FLAGS[reduction])
    if pixels is None or pixels.shape[:2] != tuple(-(-side // reduction) for side in size):
        pixels = _decode_pillow(data, key, reduction)
    return Reduced(pixels, *size)


def size_of(data: bytes, key: str) -> tuple[int, int]:
    """(height, width) of the decoded image, from its header. Raises DecodeError."""
    header = read_header(data)
    if header is not None and header.simple:
        _check_size(header.height, header.width, key)
        return header.height, header.width
    with _open_pillow(data, key) as image:
        try:
            if image.format == "TIFF":  # whose size Pillow has turned already, or not: it depends on its version
                upright = ImageOps.exif_transpose(image)
                return upright.height, upright.width
            sideways = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
        except Exception as error:  # as below
            raise DecodeError(key, _reason(error)) from error
        return (image.width, image.height) if sideways else (image.height, image.width)


def read_header(data: bytes) -> Header | None:
    """Size and kind from the first bytes of a JPEG or PNG; None where it takes Pillow to read them."""
    try:
        if data[:3] == b"\xff\xd8\xff":
            return _jpeg_header(data)
        return _png_header(data) if data[:8] == b"\x89PNG\r\n\x1a\n" else None
    except (IndexError, struct.error):  # cut off inside its header
        return None


def _jpeg_header(data: bytes) -> Header | None:
    position = 2
    simple = True
    while data[position] == 0xFF and data[position + 1] not in (0xD9, 0xDA):  # before the pixels
        marker = data[position + 1]
        if marker == 0xFF:  # a fill byte
            position += 1
            continue
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:  # no payload
            position += 2
            continue
        (length,) = struct.unpack_from(">H", data, position + 2)
        if marker == 0xE1 and data[position + 4 : position + 8] == b"Exif":
            simple = False  # may be rotated
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            precision, height, width, channels = struct.unpack_from(">BHHB", data, position + 4)
            return Header(height, width, simple and precision == 8 and channels in (1, 3))
        position += 2 + length
    return None


def _png_header(data: bytes) -> Header:
    width, height, depth, color = struct.unpack_from(">IIBB", data, 16)
    simple = depth == 8 and color in (0, 2)
    # Transparent color, orientation and animation live in chunks of their own. A chance match inside the
    # compressed pixels only means the slower way.
    simple = simple and not any(chunk in data for chunk in (b"tRNS", b"eXIf", b"acTL"))
    return Header(height, width, simple)


def _is_complete(data: bytes) -> bool:
    """Whether the file's end is there. If not, Pillow says what is wrong, where OpenCV prints to stderr on its own."""
    return data.rstrip(b"\0")[-2:] == b"\xff\xd9" if data[:2] == b"\xff\xd8" else b"IEND" in data[-16:]


def _decode_opencv(data: bytes, header: Header | None, flags: int) -> Pixels | None:
    """None for what OpenCV does not decode as well as Pillow does."""
    if header is None or not header.simple or not _is_complete(data):
        return None
    try:
        # Orientation is ours to apply: which formats OpenCV rotates on its own differs between its versions.
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:
        return None
    return None if pixels is None else np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB, dst=pixels), np.uint8)


def _decode_pillow(data: bytes, key: str, reduction: int = 1) -> Pixels:
    with _open_pillow(data, key) as image:
        try:
            if reduction > 1:
                image.draft(None, (image.width // reduction, image.height // reduction))
            return np.ascontiguousarray(to_rgb(ImageOps.exif_transpose(image)), dtype=np.uint8)
        except Exception as error:  # Pillow raises nearly anything on damaged files
            raise DecodeError(key, _reason(error)) from error


def to_rgb(image: Image.Image) -> npt.NDArray[np.generic]:
    if image.mode.startswith("I"):  # 16 bits, kept in 32 by some decoders
        gray = np.asarray(image).astype(np.int64) >> 8
    elif image.mode == "F":
        values = np.nan_to_num(np.asarray(image, dtype=np.float64))
        scale = 255.0 if values.size and values.max() <= 1.0 else 1.0  # 0…1, or 0…255
        gray = np.rint(values * scale)
    if image.mode.startswith(("I", "F")):
        return np.repeat(np.clip(gray, 0, 255).astype(np.uint8)[:, :, None], 3, axis=2)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, rgba)
    return np.asarray(image.convert("RGB"))


def _open_pillow(data: bytes, key: str) -> Image.Image:
    try:
        with warnings.catch_warnings():
            # We have our own limit on pixels, and users can't do anything about broken EXIF.
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data))
    except Exception as error:  # as above
        raise DecodeError(key, _reason(error)) from error
    _check_size(image.height, image.width, key)
    return image


def _check_size(height: int, width: int, key: str) -> None:
    if height * width > MAX_PIXELS:
        raise DecodeError(key, f"{width} x {height} pixels are more than the limit of {MAX_PIXELS:,}")
    if height * width == 0:
        raise DecodeError(key, "has no pixels")


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image that OpenCV or Pillow can read"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
