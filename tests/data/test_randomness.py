from __future__ import annotations

import math
import tracemalloc
from itertools import islice

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from patchmix.data import randomness
from patchmix.data.contract import Groups
from patchmix.data.decode import DecodeError
from patchmix.data.loader import Loader
from patchmix.data.randomness import Order, hash_words, lanes_for, permutation, uniforms


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
@settings(max_examples=50)
def test_a_row_does_not_depend_on_the_others(seed: int, index: int, others: list[int]) -> None:
    alone = uniforms(5, seed, 0, np.array([index]))
    among = uniforms(5, seed, 0, np.array([*others, index]))
    np.testing.assert_array_equal(alone[0], among[-1])


def test_the_numbers_stay_the_same_between_versions() -> None:
    # Runs resume after an upgrade: changing these changes every run's data order.
    assert int(hash_words(1, 2, 3)[0]) == 0xB370C541063CB805
    assert permutation(8, 0, 0).tolist() == [6, 0, 4, 5, 2, 7, 1, 3]


@given(length=st.integers(0, 300), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
@settings(max_examples=50)
def test_permutation_has_everything_once(length: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(length, seed, epoch).tolist()) == list(range(length))


@given(length=st.integers(2, 70), cut=st.integers(0, 70), epoch=st.integers(0, 1000))
@settings(max_examples=30)
def test_a_long_permutation_is_computed_in_parts(length: int, cut: int, epoch: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(randomness, "SORTED", 1)
        whole = permutation(length, 5, epoch)
        assert sorted(whole.tolist()) == list(range(length))
        parts = [permutation(length, 5, epoch, stop=cut), permutation(length, 5, epoch, first=cut)]
        assert np.concatenate(parts).tolist() == whole.tolist()
        order = Order(length, 2, 5)
        assert order.line(epoch).tolist() == whole.tolist()
        assert order.batch(epoch, length // 2 - 1).tolist() == whole[: length // 2 * 2][-2:].tolist()


def test_a_long_permutation_is_random_and_takes_little_memory() -> None:
    billion = 10**9
    tracemalloc.start()
    few = Groups(np.arange(0, billion, 2500), 32)  # 400,000 shards
    drawn = [Order(billion, 4096, 7, groups).batch(3, 200_000) for groups in (None, few)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6
    assert all(len(set(batch.tolist())) == 4096 for batch in drawn)
    places = permutation(billion, 7, 3, first=10**6, stop=10**6 + 65_536)
    assert not np.array_equal(places, permutation(billion, 7, 4, first=10**6, stop=10**6 + 65_536))
    chi_square = [((np.bincount(p) - 1024) ** 2 / 1024).sum() for p in (places * 64 // billion, places % 64)]
    assert max(chi_square) < 120  # 63 degrees of freedom
    steps = (places[1:] - places[:-1]) % billion * 64 // billion
    assert ((np.bincount(steps) - 1024) ** 2 / 1024).sum() < 120
    # Runs resume after an upgrade.
    assert permutation(billion, 0, 0, stop=3).tolist() == [70859558, 647358739, 383658279]


def test_permutations_of_epochs_differ() -> None:
    assert len({tuple(permutation(50, 0, epoch).tolist()) for epoch in range(20)}) == 20


# The order of an epoch.


class Grouped:
    """Tiny images in groups of given sizes; its labels are the positions."""

    name, classes = "grouped", None

    def __init__(self, counts: list[int], window: int, bad: tuple[int, ...] = ()) -> None:
        self.groups = Groups(np.cumsum([0, *counts[:-1]]), window)
        self.labels = np.arange(sum(counts))
        self.bad = bad

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, index: int) -> np.ndarray:
        if index in self.bad:
            raise DecodeError(self.key(index), "broken")
        return np.full((2, 2, 3), index % 256, np.uint8)

    def key(self, index: int) -> str:
        return f"g#{index}"

    def fingerprint(self) -> str:
        return "0"


class Stack:
    def __call__(self, images: list[np.ndarray], *, epoch: int, indices: np.ndarray) -> list[np.ndarray]:
        return [np.stack(images)]


def made(source: Grouped, batch_size: int, **options: int) -> Loader:
    return Loader(source, Stack(), batch_size=batch_size, seed=3, **options)


def indices(loader: Loader, count: int, start: int = 0) -> list[list[int]]:
    batches = loader.batches(start)
    taken = [batch.indices.tolist() for batch in islice(batches, count)]
    batches.close()  # type: ignore[attr-defined]
    return taken


def flat(parts: list[list[int]]) -> list[int]:
    return [index for part in parts for index in part]


def slow_line(source: Grouped, window: int, seed: int, epoch: int) -> list[int]:
    """What the docstring of Order says, written down plainly."""
    starts = [*source.groups.starts.tolist(), len(source)]
    shuffled = permutation(len(starts) - 1, seed, epoch, 0).tolist()
    line: list[int] = []
    for number, first in enumerate(range(0, len(shuffled), window)):
        samples = [s for g in shuffled[first : first + window] for s in range(starts[g], starts[g + 1])]
        line += [samples[i] for i in permutation(len(samples), seed, epoch, 1 + number)]
    return line


counts_of_groups = st.lists(st.integers(0, 9), min_size=2, max_size=12).filter(lambda counts: sum(counts) >= 4)


@given(counts=counts_of_groups, window=st.integers(1, 16), batch=st.integers(1, 16), epoch=st.integers(0, 3))
def test_the_order_is_the_one_described(counts: list[int], window: int, batch: int, epoch: int) -> None:
    source = Grouped(counts, window)
    steps = len(source) // batch
    order = Order(len(source), batch, 7, source.groups)
    lanes = lanes_for(batch, window)
    line = np.array(slow_line(source, max(1, window // lanes), 7, epoch)[: steps * batch])
    expected = line.reshape(lanes, steps, batch // lanes).transpose(1, 0, 2).reshape(steps, batch)
    found = [order.batch(epoch, step).tolist() for step in range(steps)]
    assert found == expected.tolist()
    assert len(set(flat(found))) == steps * batch  # each image once, up to the last incomplete batch
    for step in reversed(range(steps)):  # any step by itself, whatever was computed before
        order.batch(epoch + 1, 0)
        assert order.batch(epoch, step).tolist() == found[step]


def test_a_source_without_groups_keeps_its_order() -> None:
    source = Grouped([50], 4)
    assert Order(50, 8, 3, source.groups).line(1).tolist() == Order(50, 8, 3).line(1).tolist()
    whole = permutation(50, 3, 1)
    assert flat(indices(made(source, 8), 6, 6)) == whole[:48].tolist()


@given(start=st.integers(0, 20), world=st.sampled_from([1, 2, 4]), accumulate=st.sampled_from([1, 2]))
@settings(max_examples=20)
def test_resume_is_exact(start: int, world: int, accumulate: int) -> None:
    loader = made(Grouped([7, 13, 5, 9, 11, 3, 8], 4), 8, rank=world - 1, world_size=world, accumulate=accumulate)
    whole = indices(loader, 24 * accumulate)
    assert indices(loader, (24 - start) * accumulate, start) == whole[start * accumulate :]


@given(
    before=st.sampled_from([1, 2, 3, 8, 32]),
    after=st.sampled_from([1, 2, 4, 6]),
    size=st.integers(2, 6),
    cut=st.integers(0, 5),
    grouped=st.booleans(),
)
@example(before=512, after=256, size=3, cut=1, grouped=True)
@settings(max_examples=25)
def test_ranks_are_disjoint_and_complete_also_when_their_number_changes(
    before: int, after: int, size: int, cut: int, grouped: bool
) -> None:
    batch = math.lcm(before, after)
    source = Grouped([-(-size * batch // 7)] * 7 + [batch // 2] if grouped else [size * batch], 4)
    steps = len(source) // batch
    cut = min(cut, steps)
    seen: list[int] = []
    for world, first, stop in ((before, 0, cut), (after, cut, steps)):
        for rank in range(world):
            requests = made(source, batch, rank=rank, world_size=world)._requests(first)
            parts = [part for _, part in islice(requests, stop - first)]
            assert all(len(part) == batch // world for part in parts)  # as many on every rank
            seen += flat([part.tolist() for part in parts])
    assert len(seen) == len(set(seen)) == steps * batch


def test_two_ranks_of_two_workers_see_each_image_once() -> None:
    source = Grouped([16] * 8, 4)
    seen = [flat(indices(made(source, 16, rank=rank, world_size=2, workers=2), 8)) for rank in range(2)]
    assert sorted(seen[0] + seen[1]) == list(range(128))
    again = [flat(indices(made(source, 16, rank=rank, world_size=2), 8)) for rank in range(2)]
    assert seen == again


def test_epochs_and_seeds_differ_and_groups_are_mixed() -> None:
    order = Order(2000, 64, 1, Grouped([100] * 20, 8).groups)
    first, second = (np.concatenate([order.batch(epoch, s) for s in range(31)]) for epoch in (0, 1))
    other = Order(2000, 64, 2, Grouped([100] * 20, 8).groups).batch(0, 0)
    assert (first != second).mean() > 0.9
    assert (first[:64] != other).mean() > 0.9
    batch_groups = [len(set((order.batch(0, s) // 100).tolist())) for s in range(31)]
    assert min(batch_groups) >= 6  # about 8 groups in each batch, as the window says


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_a_process_reads_few_groups_at_a_time(world: int) -> None:
    source = Grouped([32] * 64, 16)
    most = 0
    for rank in range(world):
        seen = indices(made(source, 64, rank=rank, world_size=world), 32)
        most = max(most, max(len({i // 32 for i in flat(seen[s : s + 2])}) for s in range(0, 32, 2)))
    assert most <= 2 * 16 // world  # two windows of each of its lanes, while they change


def test_lanes_divide_the_batch_and_the_window() -> None:
    assert [lanes_for(b, w) for b, w in ((64, 64), (64, 4), (12, 64), (7, 64), (64, 1))] == [8, 4, 4, 1, 1]


def test_a_bad_image_is_replaced_from_its_own_group_and_else_from_anywhere() -> None:
    source = Grouped([20] * 5, 2, bad=(3, 8, 25, 31, 66, 67, 85, 99, *range(40, 60)))
    ideal = flat(indices(made(Grouped([20] * 5, 2), 20), 5))
    used = flat(indices(made(source, 20), 5))
    replaced = {a: u for a, u in zip(ideal, used, strict=True) if a != u}
    assert set(replaced) == set(source.bad)
    near = {a: u for a, u in replaced.items() if a // 20 != 2}
    assert len(near) == 8 and all(a // 20 == u // 20 for a, u in near.items())  # by chance: 1 in 5**8
    assert not {u // 20 for u in replaced.values()} & {2}
