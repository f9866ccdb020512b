"""Features of a set of images: the encoder in evaluation mode, one pass over all processes.

Shapes: N images of the source that can be decoded, D = the encoder's width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchmix import distributed
from patchmix.data.contract import Groups, Labels, Source, groups_of
from patchmix.data.decode import Pixels
from patchmix.data.loader import one_pass
from patchmix.data.views import CenterCrop, as_channels, to_float
from patchmix.nn.class_token import class_tokens
from patchmix.progress import progress_bar

Pool = Literal["token", "mean"]
LAYERS: dict[str, str] = {
    "token": "class token after the last norm",
    "mean": "mean of the patch tokens after the last norm",
}
GATHERED_ROWS = 4096  # of each process, sent at a time
SMALL_IMAGES = 64  # up to here images are evaluated whole, above with the usual margin of 8/7 (256 → 224)


@dataclass(frozen=True)
class Features:
    """What an encoder makes of a source, in the source's order."""

    vectors: Tensor  # (N, D), float32, on the CPU
    labels: Tensor | None  # (N,)
    indices: Tensor  # (N,), positions in the source


class Part:
    """Some of a source's samples, by their positions in it."""

    def __init__(self, source: Source, positions: npt.NDArray[np.int64], *, name: str | None = None) -> None:
        self._source = source
        self.positions = positions
        self.name = source.name if name is None else name
        self.labels: Labels | None = None if source.labels is None else source.labels[positions]
        self.classes = source.classes
        self.groups = _groups_at(groups_of(source), positions)

    def __len__(self) -> int:
        return len(self.positions)

    def load(self, index: int) -> Pixels:
        return self._source.load(int(self.positions[index]))

    def key(self, index: int) -> str:
        return self._source.key(int(self.positions[index]))

    def fingerprint(self) -> str:
        """The source's, with a sum over the positions: other positions, another fingerprint."""
        chosen = hashlib.sha256(self.positions.astype("<i8").tobytes()).hexdigest()[:16]
        return f"{self._source.fingerprint()}-{chosen}"


class Subset(Part):
    """At most `limit` of a source's samples, spread evenly over it and always the same ones.

    Where samples lie in groups (shards), they are spread over as many groups as may be in use at a time.
    """

    def __init__(self, source: Source, limit: int) -> None:
        positions = np.arange(len(source), dtype=np.int64)
        groups = groups_of(source)
        if groups is not None and len(groups.starts) > groups.window:
            few = np.linspace(0, len(groups.starts) - 1, groups.window).round().astype(np.int64)
            inside = np.isin(np.searchsorted(groups.starts, positions, side="right") - 1, few)
            positions = positions[inside]
        count = min(limit, len(positions))
        super().__init__(source, positions[np.linspace(0, len(positions) - 1, count).round().astype(np.int64)])


def _groups_at(groups: Groups | None, positions: npt.NDArray[np.int64]) -> Groups | None:
    """The groups of some of a source's samples, if these are in order: (n,) positions."""
    if groups is None or not len(positions) or bool((np.diff(positions) < 0).any()):
        return None
    return Groups(np.unique(np.searchsorted(positions, groups.starts[groups.starts <= positions[-1]])), groups.window)


def usual_resize(image_size: int) -> int:
    """To what the shorter side is resized before the central crop, where nothing else is asked for.

    Small images (CIFAR) are taken whole; larger ones get the margin that is usual on ImageNet, 224 → 256.
    """
    return image_size if image_size <= SMALL_IMAGES else round(image_size * 256 / 224)


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
    progress: bool = False,
) -> Features:
    """One pass over the source; images resized on their shorter side to `resize` and centre-cropped.

    Under torchrun every process must call this: each takes a part, and each gets the features of all, in the source's
    order. `encoder` is on `device`; it computes in evaluation mode and comes back in the mode that it was in.
    Images that can't be decoded are left out; `indices` says which are in.
    """
    if pool not in LAYERS:
        raise ValueError(f"pool is {pool!r}; it must be token (class token) or mean (of the patch tokens)")
    transform = CenterCrop(image_size, resize=resize)
    rank, world_size = distributed.rank(), distributed.world_size()
    part = len(np.array_split(np.arange(len(source)), world_size)[rank])
    vectors, count = torch.empty(0, 0), 0
    indices = torch.empty(part, dtype=torch.int64)
    was_training = encoder.training
    encoder.eval()
    try:
        with progress_bar(f"features of {source.name}", part, progress and distributed.is_main()) as advance:
            for batch in one_pass(
                source, transform, batch_size=batch_size, workers=workers, rank=rank, world_size=world_size
            ):
                found = len(batch.indices)
                if found:
                    images = to_float(batch.views[0].to(device, non_blocking=True), mean, std)
                    output = pooled(encoder, images, pool).float().cpu()
                    if not count:  # one block that is filled, where a list and its concatenation would need two
                        vectors = torch.empty(part, output.shape[1])
                    vectors[count : count + found] = output
                    indices[count : count + found] = batch.indices
                    count += found
                advance(found + len(batch.bad))
    finally:
        encoder.train(was_training)
    vectors, indices = gather_rows(vectors[:count], device), gather_rows(indices[:count], device)
    if not len(indices):
        raise ValueError(f"{source.name} has no image that can be decoded; check its files")
    return Features(vectors, labels_at(source, indices), indices)


def check_finite(vectors: Tensor, whose: str) -> None:
    """A ValueError where a feature is NaN or infinite: its similarities would mean nothing."""
    if bool(torch.isfinite(vectors.sum(dtype=torch.float64))):  # one number that is not would show in the sum
        return
    finite = torch.isfinite(vectors).all(dim=1)
    if not bool(finite.all()):
        rows = finite.logical_not().nonzero().flatten()
        raise ValueError(
            f"{whose}: the features of {len(rows)} of {len(vectors)} images are NaN or infinite (the first: image "
            f"{int(rows[0])}); the encoder's weights are broken, take an earlier checkpoint"
        )


def labels_at(source: Source, indices: Tensor) -> Tensor | None:
    """The labels of some samples: (n,) → (n,), or None where the source has none."""
    return None if source.labels is None else torch.from_numpy(source.labels)[indices]


def pooled(encoder: nn.Module, images: Tensor, pool: str) -> Tensor:
    """(N, 3, H, W) → (N, D): the class token as the encoder gives it, or the mean over patch tokens.

    An encoder of one channel gets the mean of the three.
    """
    if isinstance(encoder, VisionTransformer):
        images = as_channels(images, int(encoder.patch_embed.proj.in_channels))
    if pool == "token":
        return class_tokens(encoder, images)
    assert isinstance(encoder, VisionTransformer), "the mean over patch tokens needs a timm ViT"
    tokens: Tensor = encoder.forward_features(images)
    return tokens[:, encoder.num_prefix_tokens :].mean(dim=1)


@torch.no_grad()
def gather_rows(rows: Tensor, device: torch.device) -> Tensor:
    """Rows of all processes in the order of their ranks, on the CPU; processes may have different numbers of rows.

    rows: (n, …) → (sum of all n, …). Sent in blocks, so that the device holds a few of them only.
    """
    world_size = distributed.world_size()
    if world_size == 1:
        return rows
    shape = torch.tensor([len(rows), *rows.shape[1:]], dtype=torch.int64, device=device)
    shapes = distributed.gather(shape.unsqueeze(0)).cpu()  # (world, dims)
    counts: list[int] = shapes[:, 0].tolist()
    rest = shapes[:, 1:].max(dim=0).values.tolist()  # a process without a single row does not know the width
    out = torch.empty([sum(counts), *rest], dtype=rows.dtype)
    starts = np.cumsum([0, *counts]).tolist()
    for begin in range(0, max(counts), GATHERED_ROWS):
        block = torch.zeros([min(GATHERED_ROWS, max(counts) - begin), *rest], dtype=rows.dtype, device=device)
        own = rows[begin : begin + len(block)]
        if len(own):
            block[: len(own)] = own.to(device)
        blocks = distributed.gather(block).cpu().reshape(world_size, *block.shape)
        for r in range(world_size):
            taken = max(0, min(len(block), counts[r] - begin))
            out[starts[r] + begin : starts[r] + begin + taken] = blocks[r, :taken]
    return out
