"""Sources + transforms → batches: in which order samples come, which process sees which, what workers do.

The order of an epoch is a pure function of (seed, epoch); see randomness.py. A global batch is cut into micro-batches,
so that any number of processes and accumulation steps sees the same global batches, and a run can continue at any step.
"""

import atexit
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from patchmix.data.contract import EncodedSource, Indices, Source, groups_of
from patchmix.data.decode import DecodeError, Pixels, Reduced, read_reduced
from patchmix.data.randomness import Order, hash_words
from patchmix.data.views import Transform

Request = tuple[int, Indices]  # an epoch, and dataset positions (n,)

_REPLACEMENTS = 100  # tries to replace an undecodable sample before giving up
_NEAR = 10  # of them from the sample's own group, where there are groups
_PREFETCH = 4  # batches that each worker prepares in advance
_TIMEOUT_MINUTES = 10.0  # without a batch from any worker


@dataclass(frozen=True)
class Batch:
    """n samples, each in some views."""

    views: list[Tensor]  # per view: uint8 (n, h, w, 3), or float32 (n, h, w, C) in units of white
    indices: Tensor  # int64 (n,): positions in the source of the samples really used
    labels: Tensor | None  # int64 (n,)
    epoch: int
    bad: tuple[str, ...]  # "key: reason" of the samples that could not be decoded
    colors: Tensor | None = None  # float32 (n, views, 11): what device_views.py still has to do

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        labels = None if self.labels is None else change(self.labels)
        colors = None if self.colors is None else change(self.colors)
        views = [change(view) for view in self.views]
        return replace(self, views=views, labels=labels, colors=colors)

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device; the indices stay on the host, which reads them."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory; torch's DataLoader calls this."""
        return self._map(lambda tensor: tensor.pin_memory())


class Loader:
    """Endless shuffled batches for training.

    `batch_size` is the global batch of one optimizer step; each process gets `accumulate` micro-batches of
    batch_size / (world_size * accumulate) per step. A last incomplete global batch of an epoch is dropped.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform,
        *,
        batch_size: int,
        seed: int,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
        pin_memory: bool = False,
        timeout_minutes: float = _TIMEOUT_MINUTES,
    ) -> None:
        assert accumulate >= 1 and workers >= 0 and 0 <= rank < world_size
        parts = world_size * accumulate
        if batch_size < 1 or batch_size % parts:
            raise ValueError(
                f"batch size {batch_size} must be a multiple of {parts} ({world_size} processes x {accumulate} "
                f"accumulation steps); use --batch-size {max(1, round(batch_size / parts)) * parts}"
            )
        if len(source) < batch_size:
            raise ValueError(
                f"{source.name} has {len(source)} images, fewer than the batch size {batch_size}; "
                f"use --batch-size {max(1, len(source) // parts) * parts} or less, or more images"
            )
        self.steps_per_epoch = len(source) // batch_size
        self._order = Order(len(source), batch_size, seed, groups_of(source))
        self._shape = accumulate, world_size, batch_size // parts  # of a global batch
        self._rank = rank
        samples = _Batches(source, transform, seed)
        self._run = partial(_run, samples, workers=workers, pin_memory=pin_memory, timeout_minutes=timeout_minutes)

    def batches(self, start_step: int = 0) -> Generator[Batch]:
        """Micro-batch after micro-batch without end, from optimizer step `start_step` on."""
        return self._run(self._requests(start_step))

    def _requests(self, start_step: int) -> Iterator[Request]:
        for number in itertools.count(start_step):
            epoch, step = divmod(number, self.steps_per_epoch)
            # Micro-batch j of rank r is a contiguous slice.
            for part in self._order.batch(epoch, step).reshape(self._shape)[:, self._rank]:
                yield epoch, part


def one_pass(
    source: Source, transform: Transform, *, batch_size: int, workers: int = 0, rank: int = 0, world_size: int = 1
) -> Iterator[Batch]:
    """Every sample once over all processes, in order; rank r has the r-th contiguous part, the last batch is smaller.

    Samples that cannot be decoded are left out and named in `bad`.
    """
    positions = np.array_split(np.arange(len(source), dtype=np.int64), world_size)[rank]
    parts = [positions[start : start + batch_size] for start in range(0, len(positions), batch_size)]
    return _run(_Batches(source, transform), iter([(0, part) for part in parts]), workers=workers)


class _Batches(Dataset[Batch | ValueError]):
    """Request → batch. A sample that cannot be decoded is left out, or, with a seed, replaced by another one."""

    def __init__(self, source: Source, transform: Transform, seed: int | None = None) -> None:
        self._source, self._transform, self._seed = source, transform, seed

    def __getitem__(self, request: Request) -> Batch | ValueError:
        try:
            return self._batch(*request)
        except ValueError as error:
            # A mistake in the data is one line; raised here, torch would add the worker's traceback.
            return error

    def _batch(self, epoch: int, positions: Indices) -> Batch:
        images: list[Any] = []  # pixels; reduced ones only for a transform that has `reduction`
        used: list[int] = []
        bad: list[str] = []
        for position in positions.tolist():
            for candidate in self._candidates(epoch, position, bad):
                try:
                    images.append(self._read(epoch, candidate))
                    used.append(candidate)
                    break
                except DecodeError as error:
                    bad.append(str(error))
        indices = np.array(used, np.int64)
        views = self._transform(images, epoch=epoch, indices=indices)
        labels = self._source.labels
        colors = getattr(self._transform, "colors", None)
        return Batch(
            views=[torch.from_numpy(view) for view in views],
            indices=torch.from_numpy(indices),
            labels=None if labels is None else torch.from_numpy(labels[indices]),
            epoch=epoch,
            bad=tuple(bad),
            colors=None if colors is None else torch.from_numpy(colors(epoch=epoch, indices=indices)),
        )

    def _read(self, epoch: int, position: int) -> Pixels | Reduced:
        """The image; from a file only at the scale that its views need, if the transform knows it."""
        reduction = getattr(self._transform, "reduction", None)
        source = self._source
        if reduction is None or not isinstance(source, EncodedSource):
            return source.load(position)
        chosen = partial(reduction, epoch=epoch, index=position)
        return read_reduced(source.encoded(position), source.key(position), source.channels, chosen)

    def _candidates(self, epoch: int, position: int, bad: list[str]) -> Iterator[int]:
        """The sample, then replacements chosen by (seed, epoch, position): first from its group, then from anywhere."""
        yield position
        if self._seed is None:
            return
        groups, anywhere = groups_of(self._source), [0, len(self._source)]
        near = anywhere if groups is None else groups.bounds(anywhere[1])[groups.of(position) :][:2].tolist()
        for attempt in range(_REPLACEMENTS):
            first, end = near if attempt < _NEAR else anywhere
            yield first + int(hash_words(self._seed, epoch, position, attempt)[0]) % (end - first)
        raise ValueError(
            f"{_REPLACEMENTS} random images of {self._source.name} in a row cannot be decoded "
            f"(last: {bad[-1]}); repair or remove them"
        )


def _run(
    samples: Dataset[Batch | ValueError],
    requests: Iterator[Request],
    *,
    workers: int,
    pin_memory: bool = False,
    timeout_minutes: float = _TIMEOUT_MINUTES,
) -> Generator[Batch]:
    """Answer the requests in order, by `workers` processes or, with 0, in this one."""
    loader: DataLoader[Batch | ValueError] = DataLoader(
        samples,
        batch_size=None,  # a request is a whole batch
        sampler=requests,  # an iterator is enough: it is used once
        num_workers=workers,
        pin_memory=pin_memory,
        prefetch_factor=_PREFETCH if workers else None,
        worker_init_fn=_start_worker if workers else None,
        timeout=60.0 * timeout_minutes if workers else 0.0,
    )
    # Ctrl-C waits: workers inherit this, until they have settled what it means to them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        batches: Any = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        for batch in batches:
            if isinstance(batch, ValueError):
                raise batch
            yield batch
    except RuntimeError as error:
        if "DataLoader timed out" not in str(error):
            raise
        raise ValueError(
            f"no worker has prepared a batch within {timeout_minutes:g} min: the data is too slow, or a worker hangs; "
            "repeat the call (pretrain and adapt: with --resume auto; --timeout-minutes sets how long they wait)"
        ) from error
    finally:
        # Ended here, not at some later collection or at exit: when an error's traceback keeps the iterator alive,
        # torch waits 5 s for each worker. The method is private, and absent without workers.
        getattr(batches, "_shutdown_workers", lambda: None)()


def _start_worker(_: int) -> None:
    """One core per worker; Ctrl-C is for the main process, with which the worker ends."""
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sys.excepthook = _print_error  # also called by the thread that sends batches
    # torch's own watchdog takes the parent that it finds when it starts for the right one, though that may be dead.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A spawned worker takes the interpreter down with it, while the thread that sends batches may be inside torch:
    # that aborts the process, and the DataLoader raises. A forked one ends this way in any case.
    atexit.register(os._exit, 0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(0)


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """As usual, but for a parent that hung up because it ends."""
    if not isinstance(error, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)
