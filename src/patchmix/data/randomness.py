"""Random numbers as a pure function of what they are for: no state, no order, the same on every machine.

A number is the hash of its address, for example (seed, epoch, index, view, draw). So a sample's augmentation does not
depend on which worker makes it, on its neighbours in the batch, or on the versions of NumPy and torch.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


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
