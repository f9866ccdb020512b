"""Features of a set of images: the encoder in evaluation mode, one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchmix.data.contract import Labels, Source
from patchmix.data.decode import Pixels
from patchmix.data.loader import one_pass
from patchmix.data.views import CentreCrop, to_float


@dataclass(frozen=True)
class Features:
    """What an encoder makes of a source, in the source's order."""

    vectors: Tensor  # (N, D), float32, on the CPU
    labels: Tensor | None  # (N,)
    indices: Tensor  # (N,), positions in the source


class Subset:
    """Some of a source's samples, spread evenly over it and always the same ones."""

    def __init__(self, source: Source, limit: int) -> None:
        count = min(limit, len(source))
        self._source = source
        self.positions = np.linspace(0, len(source) - 1, count).round().astype(np.int64)
        self.name = source.name
        self.labels: Labels | None = None if source.labels is None else source.labels[self.positions]
        self.classes = source.classes

    def __len__(self) -> int:
        return len(self.positions)

    def load(self, index: int) -> Pixels:
        return self._source.load(int(self.positions[index]))

    def key(self, index: int) -> str:
        return self._source.key(int(self.positions[index]))

    def fingerprint(self) -> str:
        return f"{self._source.fingerprint()}-{len(self)}"


@torch.inference_mode()
def extract(
    encoder: nn.Module,
    source: Source,
    *,
    image_size: int,
    resize: int | None = None,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
    pool: str = "token",
    batch_size: int = 256,
    workers: int = 0,
) -> Features:
    """One pass over the source; images resized on their shorter side to `resize` and centre-cropped."""
    transform = CentreCrop(image_size, resize=resize)
    vectors, labels, indices = [], [], []
    for batch in one_pass(source, transform, batch_size=batch_size, workers=workers):
        images = to_float(batch.views[0].to(device, non_blocking=True), mean, std)
        vectors.append(pooled(encoder, images, pool).float().cpu())
        indices.append(batch.indices)
        if batch.labels is not None:
            labels.append(batch.labels)
    if not vectors:
        raise ValueError(f"{source.name} has no image that can be decoded")
    return Features(torch.cat(vectors), torch.cat(labels) if labels else None, torch.cat(indices))


def pooled(encoder: nn.Module, images: Tensor, pool: str) -> Tensor:
    """(N, D): the class token as the encoder gives it, or the mean over patch tokens."""
    if pool == "token":
        features: Tensor = encoder(images)
        return features
    if pool == "mean":
        assert isinstance(encoder, VisionTransformer)
        tokens: Tensor = encoder.forward_features(images)
        return tokens[:, encoder.num_prefix_tokens :].mean(dim=1)
    raise ValueError(f"pool is {pool!r}; it must be token or mean")
