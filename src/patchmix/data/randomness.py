"""Random numbers and orders as pure functions of what they are for: no state, the same on every machine.

A number is the hash of its address, for example (seed, epoch, index, view, draw). So a sample's augmentation does not
depend on which worker makes it, on its neighbors in the batch, or on the versions of NumPy and torch. Likewise the
order of an epoch: any step's batch is found without the ones before.

Legend: N samples in G groups (contiguous runs that are cheap to read together: a shard, a row group), B the global
batch, L lanes.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from patchmix.data.contract import Groups, Indices

UInt64s = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MOST_LANES = 8  # processes that can read from groups of their own


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


class Order:
    """The order of an epoch: (epoch, step) → (B,) positions. Without groups, all samples are shuffled.

    Groups are shuffled and laid end to end. Every `window` groups of this line, their samples are shuffled among
    each other. The line's first steps · B samples are cut into L lanes of equal length; a batch takes the next B / L
    samples of each lane. So a process that has a slice of each batch reads from a few lanes, and a lane from one window
    at a time. Nothing here depends on the number of processes or workers.
    """

    def __init__(self, length: int, batch_size: int, seed: int, groups: Groups | None = None) -> None:
        self._length, self._batch_size, self._seed = length, batch_size, seed
        self._bounds: Indices | None = None  # (G + 1,)
        self.lanes = 1
        if groups is not None and len(groups.starts) > 1:
            self._bounds = groups.bounds(length)
            assert self._bounds[0] == 0 and bool((np.diff(self._bounds) >= 0).all()), "groups cover the source in order"
            self.lanes = lanes_for(batch_size, groups.window)
            self.window = max(1, groups.window // self.lanes)  # groups of one window
        self._epoch = -1
        self._batches: Indices = np.empty((0, batch_size), np.int64)  # (steps, B), of this epoch

    def line(self, epoch: int) -> Indices:
        """All samples, one after the other: (N,)."""
        if self._bounds is None:
            return permutation(self._length, self._seed, epoch)
        groups = permutation(len(self._bounds) - 1, self._seed, epoch, 0)
        parts = []
        for number, first in enumerate(range(0, len(groups), self.window)):
            window = groups[first : first + self.window].tolist()
            samples = np.concatenate([np.arange(self._bounds[g], self._bounds[g + 1]) for g in window])
            parts.append(samples[permutation(len(samples), self._seed, epoch, 1 + number)])
        return np.concatenate(parts)

    def batch(self, epoch: int, step: int) -> Indices:
        if epoch != self._epoch:
            steps = self._length // self._batch_size
            lanes = self.line(epoch)[: steps * self._batch_size].reshape(self.lanes, steps, -1)
            self._batches, self._epoch = lanes.swapaxes(0, 1).reshape(steps, self._batch_size), epoch
        batch: Indices = self._batches[step]
        return batch


def lanes_for(batch_size: int, window: int) -> int:
    """The largest power of two up to 8 that divides the batch and leaves each lane a group of the window."""
    return math.gcd(batch_size, 1 << min(_MOST_LANES, window).bit_length() - 1)
