"""Images for the tests of data: real ones where they are, generated ones everywhere."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchmix.data.decode import decode
from patchmix.data.shapes import draw_shapes

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def small_images() -> np.ndarray:
    """uint8 (1000, 32, 32, 3): CIFAR-10's first test images, or shapes."""
    if not (SHARED / "cifar10" / "test.parquet").is_file():
        return draw_shapes("test", 1000)
    from patchmix.data.parquet import ParquetSource

    source = ParquetSource([SHARED / "cifar10" / "test.parquet"], name="cifar10")
    return np.stack([source.load(index) for index in range(1000)])


@pytest.fixture(scope="session")
def photos() -> list[np.ndarray]:
    """Photos of different sizes, short side 128; or shapes made larger."""
    if not (SHARED / "clothing.tar").is_file():
        shapes = draw_shapes("test", 24)
        sizes = [(160 - i, 128 + 2 * i) for i in range(24)]
        return [np.asarray(Image.fromarray(s).resize(z)) for s, z in zip(shapes, sizes, strict=True)]
    found = []
    with tarfile.open(SHARED / "clothing.tar") as archive:
        for member in archive:
            if member.name.endswith(".jpg"):
                file = archive.extractfile(member)
                assert file is not None
                found.append(decode(file.read(), member.name))
            if len(found) == 24:
                break
    return found


@pytest.fixture
def write_image() -> Callable[..., Path]:
    """Write an array, or a plain image of a color, to a file whose ending says the format."""

    def write(
        path: Path, image: np.ndarray | tuple[int, int, int] = (200, 50, 10), size: tuple[int, int] = (12, 8)
    ) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(image) if isinstance(image, np.ndarray) else Image.new("RGB", size, image)
        buffer = io.BytesIO()
        formats = {".jpg": "JPEG", ".jpeg": "JPEG", ".tif": "TIFF"}
        kind = formats.get(path.suffix.lower(), path.suffix[1:].upper())
        picture.save(buffer, kind, **({"quality": 95} if kind == "JPEG" else {}))
        path.write_bytes(buffer.getvalue())
        return path

    return write
