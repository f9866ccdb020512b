"""Whatever a caller has as images → batches of the encoder's size. N: images, S: the encoder's side in pixels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

AnyImage = Image.Image | str | Path | npt.NDArray[np.uint8]
Images = Tensor | npt.NDArray[np.uint8] | Sequence[AnyImage] | str | Path


def image_batches(images: Images, *, size: int, batch_size: int) -> Iterator[Tensor]:
    """Batches (n, 3, S, S) of float32 in [0, 1], in order; shorter side → S, then the central S × S.

    `images` is a float tensor (N, 3, H, W) in [0, 1], a uint8 array or tensor (N, H, W, 3), or a list of PIL images,
    files and uint8 arrays (H, W, 3), which may differ in size.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    if isinstance(images, str | Path):
        images = [images]
    if len(images) == 0:
        raise ValueError("there are no images to embed; give at least one")
    for start in range(0, len(images), batch_size):
        part: Any = images[start : start + batch_size]
        if isinstance(part, Tensor | np.ndarray):
            yield _fit(_planes(part), size)
        else:
            yield torch.cat([_fit(_planes(_pixels(one)[None]), size) for one in part])


def _planes(images: Tensor | npt.NDArray[Any]) -> Tensor:
    """uint8 (n, 3, H, W), or float32 (n, 3, H, W) in [0, 1]."""
    tensor = images if isinstance(images, Tensor) else torch.from_numpy(np.array(images))  # a copy: may be read-only
    shape = tuple(tensor.shape)
    if tensor.dtype == torch.uint8:
        if tensor.ndim != 4 or shape[3] != 3:
            raise ValueError(f"uint8 images have shape {shape}; expected (N, H, W, 3)")
        return tensor.permute(0, 3, 1, 2)
    if not tensor.is_floating_point():
        raise ValueError(f"images are {str(tensor.dtype)[6:]}; expected floats in [0, 1] or uint8")
    if tensor.ndim != 4 or shape[1] != 3:
        raise ValueError(f"float images have shape {shape}; expected (N, 3, H, W)")
    low, high = tensor.min().item(), tensor.max().item()
    if not (low >= 0 and high <= 1):  # so that NaN fails too
        raise ValueError(f"float images span {low:.3g} to {high:.3g}; expected [0, 1], before any normalisation")
    return tensor.detach().float()


def _pixels(image: AnyImage) -> npt.NDArray[np.uint8]:
    """uint8 (H, W, 3), upright."""
    if isinstance(image, np.ndarray):
        return image
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"))
    if not isinstance(image, str | Path):
        raise ValueError(f"an image is a {type(image).__name__}; expected a PIL image, a file or a uint8 array")
    try:
        with Image.open(image) as file:
            return np.asarray(ImageOps.exif_transpose(file).convert("RGB"))
    except FileNotFoundError:
        raise ValueError(f"{image} does not exist; give the path of an image") from None
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"{image} can't be decoded as an image; is it complete?") from error


def _fit(images: Tensor, size: int) -> Tensor:
    """(n, 3, H, W) → (n, 3, S, S), float32 in [0, 1]; bicubic with antialiasing, as evaluation does it."""
    height, width = images.shape[2:]
    shorter = min(height, width)
    if shorter == 0:
        raise ValueError(f"images are {height} × {width} px; they must have at least one pixel")
    if shorter != size:
        new = (int(size * height / shorter), int(size * width / shorter))
        images = F.interpolate(images, size=new, mode="bicubic", antialias=True)
    top, left = round((images.shape[2] - size) / 2.0), round((images.shape[3] - size) / 2.0)
    images = images[:, :, top : top + size, left : left + size]
    if images.dtype == torch.uint8:
        return images.float() / 255
    return images.clamp(0, 1)  # cubic interpolation overshoots at edges
