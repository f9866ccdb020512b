"""Random numbers and orders as pure functions of what they are for: no state, the same on every machine.

A number is the hash of its address, for example (seed, epoch, index, view, draw). So a sample's augmentation does not
depend on which worker makes it, on its neighbors in the batch, or on the versions of NumPy and torch. Likewise the
order of an epoch: any step's batch is found without the ones before.

Legend: N samples in G groups (contiguous runs that are cheap to read together: a shard, a row group), B the global
batch, L lanes.
"""

import math
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from patchmix.data.contract import Groups, Indices

UInt64s = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MOST_LANES = 8  # processes that can read from groups of their own
SORTED = 1 << 24  # a permutation of more is not built as a whole, which would take 24 bytes per sample
_ROUNDS = 6  # of the Feistel network that computes single places of it


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


def permutation(length: int, *address: int, first: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
    """A random order of 0 … length-1 for this address, or its places first … stop-1: (stop - first,).

    Above `SORTED` only the places asked for are computed, in memory of their number: a Feistel network permutes the
    next power of 4, and what falls outside of the order goes through it again (Black and Rogaway 2002).
    """
    if length <= SORTED:
        words = hash_words(*address, np.arange(length))
        return np.argsort(words, kind="stable").astype(np.int64, copy=False)[first:stop]
    bits = np.uint64(((length - 1).bit_length() + 1) // 2)
    mask = (np.uint64(1) << bits) - np.uint64(1)
    order = np.arange(first, length if stop is None else min(stop, length), dtype=np.uint64)
    outside = np.arange(len(order))
    while len(outside):
        left, right = order[outside] >> bits, order[outside] & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (hash_words(*address, number, right) & mask)
        order[outside] = left << bits | right
        outside = outside[order[outside] >= np.uint64(length)]
    return order.astype(np.int64)


class Order:
    """The order of an epoch: (epoch, step) → (B,) positions. Without groups, all samples are shuffled.

    Groups are shuffled and laid end to end. Every `window` groups of this line, their samples are shuffled among
    each other. The line's first steps · B samples are cut into L lanes of equal length; a batch takes the next B / L
    samples of each lane. So a process that has a slice of each batch reads from a few lanes, and a lane from one window
    at a time. Nothing here depends on the number of processes or workers. Only the windows in use are computed.
    """

    def __init__(self, length: int, batch_size: int, seed: int, groups: Groups | None = None) -> None:
        self._length, self._batch_size, self._seed = length, batch_size, seed
        self._bounds: Indices = np.empty(0, np.int64)  # (G + 1,), with groups
        self.lanes = 1
        if groups is not None and len(groups.starts) > 1:
            self._bounds = groups.bounds(length)
            assert self._bounds[0] == 0 and bool((np.diff(self._bounds) >= 0).all()), "groups cover the source in order"
            self.lanes = lanes_for(batch_size, groups.window)
            self.window = max(1, groups.window // self.lanes)  # groups of one window
        self._whole = lru_cache(1)(partial(permutation, length, seed))
        self._windows = lru_cache(1)(self._cut)
        self._samples = lru_cache(2 * self.lanes)(self._shuffled)  # a batch may end one window and begin the next

    def _cut(self, epoch: int) -> tuple[Indices, Indices]:
        """The groups in the order of the epoch: (G,), and where each window begins, with the end of the last one."""
        groups = permutation(len(self._bounds) - 1, self._seed, epoch, 0)
        starts = np.append(0, np.cumsum(np.diff(self._bounds)[groups]))
        return groups, np.append(starts[: -1 : self.window], self._length)

    def _shuffled(self, epoch: int, number: int) -> Indices:
        """The samples of a window."""
        groups, _ = self._windows(epoch)
        window = groups[number * self.window : (number + 1) * self.window].tolist()
        samples = np.concatenate([np.arange(self._bounds[g], self._bounds[g + 1]) for g in window])
        return samples[permutation(len(samples), self._seed, epoch, 1 + number)]

    def line(self, epoch: int, first: int = 0, stop: int | None = None) -> Indices:
        """All samples one after the other, or those from `first` to `stop`: (stop - first,)."""
        stop = self._length if stop is None else min(stop, self._length)
        if not len(self._bounds):
            few = self._length <= SORTED
            return self._whole(epoch)[first:stop] if few else self._whole(epoch, first=first, stop=stop)
        _, starts = self._windows(epoch)
        windows = range(np.searchsorted(starts, first, side="right") - 1, np.searchsorted(starts, stop))
        return np.concatenate([self._samples(epoch, w)[max(0, first - starts[w]) : stop - starts[w]] for w in windows])

    def batch(self, epoch: int, step: int) -> Indices:
        share = self._batch_size // self.lanes
        begins = np.arange(self.lanes) * (self._length // self._batch_size) * share + step * share
        return np.concatenate([self.line(epoch, begin, begin + share) for begin in begins.tolist()])


def lanes_for(batch_size: int, window: int) -> int:
    """The largest power of two up to 8 that divides the batch and leaves each lane a group of the window."""
    return math.gcd(batch_size, 1 << min(_MOST_LANES, window).bit_length() - 1)
