"""Random numbers and orders as pure functions of what they are for: no state, the same on every machine.

A number is the hash of its address, for example (seed, epoch, index, view, draw). So a sample's augmentation does not
depend on which worker makes it, on its neighbors in the batch, or on the versions of NumPy and torch. Likewise the
order of an epoch: any step's batch is found without the ones before.

Legend: N samples in G groups (contiguous runs that are cheap to read together: a shard, a row group), B the global
batch, L lanes.
"""

from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from patchmix.data.contract import Groups, Indices, Source, groups_of

UInt64s = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MOST_LANES = 8  # so many processes can read from groups of their own


def _scramble(state: UInt64s) -> UInt64s:
    """SplitMix64's output function (Steele et al. 2014), a bijection of 64-bit words; any shape."""
    state = state ^ (state >> np.uint64(30))
    state = state * _MIX_1
    state ^= state >> np.uint64(27)
    state *= _MIX_2
    state ^= state >> np.uint64(31)
    return state


def hash_words(*address: Any) -> UInt64s:
    """Hash integers and integer arrays, broadcast against each other, to 64-bit words of the broadcast shape."""
    state = np.zeros((1,), np.uint64)
    for part in address:
        # int64 first: a negative number wraps instead of raising.
        word = np.atleast_1d(np.asarray(part, dtype=np.int64)).astype(np.uint64)
        state = _scramble(state * _MIX_1 + word + _GAMMA)
    return state


def uniforms(draws: int, *address: Any) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1): (N, draws), one row per address; the address parts broadcast to (N,)."""
    key = hash_words(*address)
    counters = np.arange(1, draws + 1, dtype=np.uint64) * _GAMMA
    words = _scramble(key[:, None] + counters[None, :])
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(length: int, *address: int) -> npt.NDArray[np.int64]:
    """A random order of 0 … length-1 for this address: (length,)."""
    words = hash_words(*address, np.arange(length))
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


class FullOrder:
    """A random order of all samples: (seed, epoch, step) → (B,) positions."""

    def __init__(self, length: int, batch_size: int, seed: int) -> None:
        self._length, self._batch_size, self._seed = length, batch_size, seed
        self._epoch = -1
        self._order: Indices = np.empty(0, np.int64)

    def batch(self, epoch: int, step: int) -> Indices:
        if epoch != self._epoch:
            self._order, self._epoch = permutation(self._length, self._seed, epoch), epoch
        return self._order[step * self._batch_size : (step + 1) * self._batch_size]


class GroupedOrder:
    """A random order that reads few groups at a time: (seed, epoch, step) → (B,) positions.

    The groups are shuffled and laid end to end. Every `window` groups of this line, their samples are shuffled among
    each other. The line's first steps · B samples are cut into L lanes of equal length; a batch takes the next B / L
    samples of each lane. So a process that has a slice of each batch reads from a few lanes, and a lane from one window
    at a time. Nothing here depends on the number of processes or workers.
    """

    def __init__(self, groups: Groups, length: int, batch_size: int, seed: int) -> None:
        counts = np.diff(groups.starts, append=length)
        assert len(counts) and groups.starts[0] == 0 and bool((counts >= 0).all()), "groups cover the source in order"
        self.lanes = lanes_for(batch_size, groups.window)
        self.window = max(1, groups.window // self.lanes)  # groups of one window
        self._starts, self._counts = groups.starts, counts
        self._batch_size, self._seed = batch_size, seed
        self._lane_length = length // batch_size * batch_size // self.lanes
        self._epoch = -1
        self._line: Indices = np.empty(0, np.int64)  # (G,) groups in the order of the epoch
        self._ends: Indices = np.empty(0, np.int64)  # (windows,) where each window ends on the line
        self._shuffled: OrderedDict[int, Indices] = OrderedDict()  # windows in use

    def batch(self, epoch: int, step: int) -> Indices:
        if epoch != self._epoch:
            self._start(epoch)
        share = self._batch_size // self.lanes
        first = np.arange(self.lanes) * self._lane_length + step * share
        return np.concatenate([self._between(begin, begin + share) for begin in first.tolist()])

    def line(self, epoch: int) -> Indices:
        """All samples, one after the other: (N,)."""
        self._start(epoch)
        return self._between(0, int(self._counts.sum()))

    def _start(self, epoch: int) -> None:
        self._epoch = epoch
        self._line = permutation(len(self._starts), self._seed, epoch, 0)
        ends = np.cumsum(self._counts[self._line])
        last = np.arange(self.window - 1, len(ends) + self.window - 1, self.window)
        self._ends = ends[np.minimum(last, len(ends) - 1)]
        self._shuffled.clear()

    def _between(self, begin: int, end: int) -> Indices:
        """The samples at places begin … end - 1 of the epoch's line."""
        parts = []
        number = int(np.searchsorted(self._ends, begin, side="right"))
        while begin < end:
            start = int(self._ends[number - 1]) if number else 0
            stop = min(end, int(self._ends[number]))
            if stop > begin:
                parts.append(self._samples(number)[begin - start : stop - start])
            begin, number = stop, number + 1
        return np.concatenate(parts)

    def _samples(self, window: int) -> Indices:
        """All samples of a window, shuffled; the last windows of each lane are kept."""
        if window in self._shuffled:
            self._shuffled.move_to_end(window)
            return self._shuffled[window]
        groups = self._line[window * self.window : (window + 1) * self.window].tolist()
        runs = [np.arange(self._starts[g], self._starts[g] + self._counts[g]) for g in groups]
        samples = np.concatenate(runs)
        self._shuffled[window] = samples[permutation(len(samples), self._seed, self._epoch, 1 + window)]
        while len(self._shuffled) > 2 * self.lanes:
            self._shuffled.popitem(last=False)
        return self._shuffled[window]


def order_of(source: Source, batch_size: int, seed: int) -> FullOrder | GroupedOrder:
    """The order that fits a source: by groups where it has some, else of all samples."""
    groups = groups_of(source)
    if groups is None or len(groups.starts) < 2:
        return FullOrder(len(source), batch_size, seed)
    return GroupedOrder(groups, len(source), batch_size, seed)


def lanes_for(batch_size: int, window: int) -> int:
    """The largest power of two up to 8 that divides the batch and leaves each lane a group of the window."""
    lanes = 1
    while lanes < _MOST_LANES and lanes * 2 <= window and batch_size % (lanes * 2) == 0:
        lanes *= 2
    return lanes
