"""Sets that fit into memory are decoded once, into one block that all workers share."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchmix.data.contract import EncodedSource, Indices, Labels, Source, groups_of
from patchmix.data.decode import DecodeError, Pixels, shape_of, to_unit
from patchmix.data.randomness import permutation
from patchmix.progress import progress_bar

_CHUNK = 128  # samples that a thread takes at once
_TRIED_GROUPS = 8  # shards or row groups that a first check reads from
_DTYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.float32}  # by their bytes


@dataclass(eq=False)
class InMemorySource:
    """Decoded images, one after the other in one block of bytes; knows which ones could not be decoded."""

    pixels: Tensor  # uint8 (bytes,)
    shapes: Indices  # (len, 4): height, width, channels, bytes per value; 0 for a bad one
    name: str
    labels: Labels | None
    classes: tuple[str, ...] | None
    key: Callable[[int], str]
    digest: str  # the fingerprint
    bad: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stops = self.shapes.prod(axis=1).cumsum()

    def __len__(self) -> int:
        return len(self.shapes)

    def load(self, index: int) -> Pixels:
        if index in self.bad:
            raise DecodeError(self.key(index), self.bad[index])
        *shape, width = self.shapes[index].tolist()
        stop, size = int(self._stops[index]), int(self.shapes[index].prod())
        pixels: Pixels = self.pixels.numpy()  # made here: in a pickle, an array would be a second copy
        image: Pixels = pixels[stop - size : stop].view(_DTYPES[width]).reshape(shape)
        return image

    def fingerprint(self) -> str:
        return self.digest


def from_array(
    images: Pixels, labels: Labels | None, classes: tuple[str, ...] | None, *, name: str, prefix: str, fingerprint: str
) -> InMemorySource:
    """A source from (N, H, W, C) that is in memory anyway."""
    pixels = _shared_block(images.nbytes)
    pixels.numpy()[:] = images.reshape(-1).view(np.uint8)
    shapes = np.tile(np.array([*images.shape[1:], images.itemsize], np.int64), (len(images), 1))
    return InMemorySource(pixels, shapes, name, labels, classes, partial("{}#{}".format, prefix), fingerprint)


def in_memory(source: Source, cache_bytes: int) -> Source:
    """Decode `source` once into shared memory; returned unchanged when its pixels need more than `cache_bytes`."""
    if isinstance(source, InMemorySource) or cache_bytes < 3 * len(source):  # the least that images have
        return source
    shapes = np.zeros((len(source), 4), np.int64)
    bad: dict[int, str] = {}

    def measure(index: int) -> None:
        if isinstance(source, EncodedSource):
            shapes[index] = shape_of(source.encoded(index), source.key(index), source.channels)
        else:
            image = source.load(index)
            shapes[index] = *image.shape, image.itemsize

    def fill(index: int) -> None:
        image = source.load(index)
        if (*image.shape, image.itemsize) != tuple(shapes[index]):
            raise DecodeError(source.key(index), "its header says another size")
        kept.load(index)[:] = image

    def run(action: Callable[[int], None], chunk: range) -> range:
        for index in chunk:
            try:
                if index not in bad:
                    action(index)
            except DecodeError as error:
                bad[index] = error.reason
        return chunk

    pool = _decoding_threads()
    chunks = [range(start, min(start + _CHUNK, len(source))) for start in range(0, len(source), _CHUNK)]
    lanes, total = (os.cpu_count() or 1) * 2, 0
    for first in range(0, len(chunks), lanes):  # a few at a time, because a large set must be given up early
        for chunk in pool.map(partial(run, measure), chunks[first : first + lanes]):
            total += int(shapes[chunk.start : chunk.stop].prod(axis=1).sum())
        if total > cache_bytes:
            return source
    about = source.name, source.labels, source.classes, source.key, source.fingerprint()
    kept = InMemorySource(_shared_block(total), shapes, *about)
    with progress_bar(f"decoding {source.name}", len(source)) as advance:
        for chunk in pool.map(partial(run, fill), chunks):
            advance(len(chunk))
    kept.bad = dict(sorted(bad.items()))
    getattr(source, "release", lambda: None)()  # open files and row groups; from here on only its keys are used
    return kept


@lru_cache(maxsize=1)
def _decoding_threads() -> ThreadPoolExecutor:
    """Never ended: a thread that has used OpenCV takes a lock of the whole process as it ends, and a loader's worker
    that is forked at that moment would wait for that lock forever."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="decode")


os.register_at_fork(after_in_child=_decoding_threads.cache_clear)


def check_decodable(source: Source, *, sample: int = 1000, limit: float = 0.01) -> tuple[str, ...]:
    """Try to decode a random sample (a set in memory: everything) before a run starts.

    Returns "key: reason" of the bad ones; raises ValueError when their share is above `limit`.
    """
    if len(source) == 0:
        raise ValueError(f"{source.name} has no images; give other data")
    if isinstance(source, InMemorySource):
        tried = len(source)
        bad = [f"{source.key(index)}: {reason}" for index, reason in source.bad.items()]
    else:
        positions = some_positions(source, sample).tolist()
        tried = len(positions)
        bad = [reason for reason in _decoding_threads().map(partial(_why_bad, source), positions) if reason]
    if len(bad) > limit * tried:
        raise ValueError(
            f"{len(bad)} of {tried} images of {source.name} ({len(bad) / tried:.1%}) cannot be decoded, more than "
            f"{limit:.0%}; repair or remove them, first: {'; '.join(bad[:3])}"
        )
    return tuple(bad)


def mean_and_std(source: Source, *, sample: int = 2000) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of each channel over all pixels of a random sample (of fewer images: of all), in units of white; 6 digits."""
    positions = some_positions(source, sample).tolist()
    sums: Any = 0.0  # (3, C): pixels, their sum, the sum of their squares
    with progress_bar(f"mean and std of {source.name}", len(positions)) as advance:
        for found in _decoding_threads().map(partial(_sums, source), positions):
            sums = sums + found
            advance(1)
    if np.ndim(sums) == 0:
        raise ValueError(f"{source.name} has no image that can be decoded; give other data")
    count, total, squares = sums
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    if (constant := np.flatnonzero(std <= 1e-6 * np.abs(mean))).size:
        raise ValueError(
            f"channel {constant[0]} of {source.name} has the same value everywhere; remove it, or give --mean and --std"
        )
    return tuple(float(f"{x:.6g}") for x in mean), tuple(float(f"{x:.6g}") for x in std)


def _sums(source: Source, index: int) -> Any:
    try:
        values = to_unit(source.load(index)).astype(np.float64)
    except DecodeError:
        return 0.0
    pixels = values.reshape(-1, values.shape[2])
    return np.stack([np.full(pixels.shape[1], len(pixels)), pixels.sum(axis=0), np.square(pixels).sum(axis=0)])


def some_positions(source: Source, sample: int) -> Indices:
    """Random positions: (at most sample,); of a few groups only, where reading from many costs a lot."""
    groups = groups_of(source)
    if groups is None:
        return permutation(len(source), 0, stop=sample)
    bounds = groups.bounds(len(source))
    few = permutation(len(groups.starts), 0)[: min(groups.window, _TRIED_GROUPS)].tolist()
    runs = [np.arange(bounds[g], bounds[g + 1]) for g in few]
    return np.concatenate([run[np.sort(permutation(len(run), 0)[: -(-sample // len(few))])] for run in runs])


def _why_bad(source: Source, index: int) -> str | None:
    try:
        source.load(index)
    except DecodeError as error:
        return str(error)
    return None


def _shared_block(size: int) -> Tensor:
    """uint8 (size,), shared between processes where the system's shared memory has room for it."""
    block = torch.empty(size, dtype=torch.uint8)
    try:
        room = shutil.disk_usage("/dev/shm").free
    except OSError:  # not Linux: its shared memory is not a file system of limited size
        room = size * 2
    # Writing past the room kills the process (containers often have 64 MB). Forked workers share plain memory too.
    if 0 < size < 0.8 * room:
        block.share_memory_()  # type: ignore[no-untyped-call]
    return block
