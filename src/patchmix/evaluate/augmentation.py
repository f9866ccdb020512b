"""timm's augmentation of supervised training, with randomness that is a pure function of (seed, epoch, index).

timm draws from the global generators of Python, NumPy and torch. Here they are seeded for each image and put back
afterwards, so that an image's augmentation depends neither on the worker that makes it nor on where a run was resumed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import create_transform
from torch import Tensor

from patchmix.data.decode import Pixels
from patchmix.data.randomness import hash_words

CROP_AREA = (0.08, 1.0)
_PIXELS, _ERASING = 0, 1  # streams of random numbers


class TimmAugmentation:
    """A loader's transform: random resized crop, flip and RandAugment, all by timm."""

    def __init__(self, size: int, *, rand_augment: str, mean: Sequence[float], seed: int) -> None:
        """`rand_augment` in timm's notation; `mean` is the colour of what a rotation uncovers."""
        self.size = size
        self.seed = seed
        self._transform = create_transform(
            size,
            is_training=True,
            scale=CROP_AREA,
            auto_augment=rand_augment,
            interpolation="bicubic",
            mean=tuple(mean),
            use_prefetcher=True,  # uint8 comes out; normalisation and erasing follow on the device
        )
        for step in self._transform.transforms:
            for operation in getattr(step, "ops", ()):
                if operation.name.startswith("Posterize"):
                    operation.aug_fn = _posterize

    def __call__(
        self, images: Sequence[Pixels], *, epoch: int, indices: npt.NDArray[np.int64]
    ) -> list[npt.NDArray[np.uint8]]:
        out = np.empty((len(images), self.size, self.size, 3), np.uint8)
        words = hash_words(self.seed, epoch, indices, _PIXELS).tolist()
        with global_randomness():
            for image, word, place in zip(images, words, out, strict=True):
                seed_globally(word)
                planes: Tensor = self._transform(Image.fromarray(image))  # (3, h, w)
                place[:] = planes.numpy().transpose(1, 2, 0)
        return [out]


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """timm asks for 0 bits at its largest magnitude, which Pillow refuses since version 13; before, that was black."""
    return image if bits >= 8 else ImageOps.posterize(image, max(1, bits))


class Erasing:
    """timm's random erasing of a batch of normalised images: a rectangle of noise in some of them."""

    def __init__(self, probability: float, *, seed: int) -> None:
        self.seed = seed
        # Noise is drawn on the CPU, wherever the images are: the same on every device.
        self._erase = RandomErasing(probability, mode="pixel", max_count=1, device="cpu")  # type: ignore[no-untyped-call]

    def __call__(self, images: Tensor, *, epoch: int, indices: Tensor) -> Tensor:
        """Changes images (N, C, H, W) in place and returns them."""
        words = hash_words(self.seed, epoch, indices.cpu().numpy(), _ERASING).tolist()
        with global_randomness():
            for image, word in zip(images, words, strict=True):
                seed_globally(word)
                self._erase(image)
        return images


def seed_globally(word: int) -> None:
    """Python's, NumPy's and torch's CPU generators. Not the GPUs': nothing that timm does here draws from those."""
    random.seed(word)
    np.random.seed(word % 2**32)  # noqa: NPY002 (timm draws from it)
    torch.default_generator.manual_seed(word % 2**63)


@contextmanager
def global_randomness() -> Iterator[None]:
    """What happens inside leaves the global generators as they were."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.default_generator.set_state(states[2])
