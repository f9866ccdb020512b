from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from patchmix.data.randomness import hash_words, permutation, uniforms


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    draw = uniforms(20, 7, 3, np.arange(20_000))
    assert draw.shape == (20_000, 20)
    assert draw.min() >= 0
    assert draw.max() < 1
    counts = np.stack([np.histogram(column, 16, (0, 1))[0] for column in draw.T])
    chi_square = ((counts - 1250) ** 2 / 1250).sum(axis=1)  # 15 degrees of freedom
    assert chi_square.max() < 45
    correlation = np.corrcoef(draw.T) - np.eye(20)
    assert np.abs(correlation).max() < 0.03
    # From one index to the next, too.
    assert abs(np.corrcoef(draw[:-1, 0], draw[1:, 0])[0, 1]) < 0.03


def test_every_part_of_an_address_counts_and_so_does_its_place() -> None:
    addresses = [(s, e, i, v) for s in (0, 1, -1) for e in (0, 1, 2) for i in (0, 1, 2) for v in (0, 1)]
    words = {int(hash_words(*address)[0]) for address in addresses}
    assert len(words) == len(addresses)


@given(seed=st.integers(-(2**63), 2**63 - 1), index=st.integers(0, 2**40), others=st.lists(st.integers(0, 2**40)))
@settings(deadline=None, max_examples=50)
def test_a_row_does_not_depend_on_the_others(seed: int, index: int, others: list[int]) -> None:
    alone = uniforms(5, seed, 0, np.array([index]))
    among = uniforms(5, seed, 0, np.array([*others, index]))
    np.testing.assert_array_equal(alone[0], among[-1])


def test_the_numbers_stay_the_same_between_versions() -> None:
    # Runs resume after an upgrade: changing these changes every run's data order.
    assert int(hash_words(1, 2, 3)[0]) == 0xB370C541063CB805
    assert permutation(8, 0, 0).tolist() == [6, 0, 4, 5, 2, 7, 1, 3]


@given(length=st.integers(0, 300), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
@settings(deadline=None, max_examples=50)
def test_permutation_has_everything_once(length: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(length, seed, epoch).tolist()) == list(range(length))


def test_permutations_of_epochs_differ() -> None:
    assert len({tuple(permutation(50, 0, epoch).tolist()) for epoch in range(20)}) == 20
