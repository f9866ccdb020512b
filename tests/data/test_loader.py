from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.plain_views import two_views
from patchmix.data.decode import DecodeError
from patchmix.data.loader import Batch, Loader, one_pass
from patchmix.data.memory import InMemorySource, from_array
from patchmix.data.views import CenterCrop, Views


def numbered(length: int, *, bad: tuple[int, ...] = ()) -> InMemorySource:
    """Small random images with their own number as label."""
    images = np.random.default_rng(length).integers(0, 256, (length, 10, 8, 3), dtype=np.uint8)
    source = from_array(images, np.arange(length), None, name="numbers", prefix="numbers", fingerprint="0")
    source.bad = dict.fromkeys(bad, "broken")
    return source


class Plain:
    """A transform that only stacks; a class, because workers may have to pickle it."""

    def __call__(self, images: list[np.ndarray], *, epoch: int, indices: np.ndarray) -> list[np.ndarray]:
        return [np.stack(images) if images else np.empty((0, 10, 8, 3), np.uint8)]


class Slow(Plain):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, images: list[np.ndarray], *, epoch: int, indices: np.ndarray) -> list[np.ndarray]:
        time.sleep(self.seconds)
        return super().__call__(images, epoch=epoch, indices=indices)


def loader(length: int = 50, batch_size: int = 12, **options: object) -> Loader:
    arguments = {"source": numbered(length), "transform": Plain(), "seed": 3, **options}
    return Loader(batch_size=batch_size, **arguments)  # type: ignore[arg-type]


def take(batches: Iterator[Batch], count: int) -> list[Batch]:
    taken = list(islice(batches, count))
    batches.close()  # type: ignore[attr-defined]
    return taken


def order(batches: list[Batch]) -> list[list[int]]:
    return [batch.indices.tolist() for batch in batches]


def flat(parts: list[list[int]]) -> list[int]:
    return [index for part in parts for index in part]


def same(one: list[Batch], other: list[Batch]) -> None:
    assert order(one) == order(other)
    for a, b in zip(one, other, strict=True):
        assert a.epoch == b.epoch
        assert a.bad == b.bad
        for view, twin in zip(a.views, b.views, strict=True):
            assert torch.equal(view, twin)


def wait_for_the_end_of_workers() -> None:
    deadline = time.monotonic() + 20
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not multiprocessing.active_children()


class TestOrder:
    def test_an_epoch_has_nothing_twice_and_epochs_differ(self) -> None:
        made = loader()
        assert made.steps_per_epoch == 4
        batches = take(made.batches(), 8)
        assert [batch.epoch for batch in batches] == [0] * 4 + [1] * 4
        first, second = (flat(order(part)) for part in (batches[:4], batches[4:]))
        assert len(set(first)) == len(set(second)) == 48
        assert first != second
        assert order(take(loader(seed=4).batches(), 4)) != order(batches[:4])

    def test_images_and_labels_belong_to_the_indices(self) -> None:
        source = numbered(50)
        for batch in take(loader(source=source).batches(), 5):
            assert batch.labels is not None
            assert batch.labels.tolist() == batch.indices.tolist()
            assert batch.indices.dtype == batch.labels.dtype == torch.int64
            assert batch.views[0].dtype == torch.uint8
            for image, index in zip(batch.views[0], batch.indices.tolist(), strict=True):
                np.testing.assert_array_equal(image.numpy(), source.load(index))

    @given(start=st.integers(0, 13), world=st.sampled_from([1, 2, 3]), accumulate=st.sampled_from([1, 2]))
    @settings(max_examples=30)
    def test_start_step_resumes_exactly(self, start: int, world: int, accumulate: int) -> None:
        made = loader(rank=world - 1, world_size=world, accumulate=accumulate)
        whole = take(made.batches(), 16 * accumulate)
        same(whole[start * accumulate :], take(made.batches(start), (16 - start) * accumulate))

    @given(world=st.sampled_from([1, 2, 3, 6]), accumulate=st.sampled_from([1, 2]))
    @settings(max_examples=20)
    def test_any_number_of_processes_sees_the_same_global_batches(self, world: int, accumulate: int) -> None:
        whole = order(take(loader().batches(), 6))
        ranks = [
            order(take(loader(rank=rank, world_size=world, accumulate=accumulate).batches(), 6 * accumulate))
            for rank in range(world)
        ]
        for step, batch in enumerate(whole):
            pieces = [ranks[rank][step * accumulate + j] for j in range(accumulate) for rank in range(world)]
            assert flat(pieces) == batch


class TestWorkers:
    @pytest.mark.parametrize("workers", [1, 2])
    def test_any_number_of_workers_gives_the_same(self, workers: int) -> None:
        options = {"source": numbered(50, bad=(3, 30)), "transform": Views(two_views(8), seed=5)}
        same(take(loader(**options).batches(2), 11), take(loader(workers=workers, **options).batches(2), 11))

    def test_they_end_when_the_consumer_stops(self) -> None:
        batches = loader(workers=2).batches()
        next(batches)
        assert len(multiprocessing.active_children()) == 2
        batches.close()  # type: ignore[attr-defined]
        assert not multiprocessing.active_children()

    def test_they_end_when_the_consumer_forgets(self) -> None:
        for _ in loader(workers=2).batches():
            break
        wait_for_the_end_of_workers()

    def test_they_leave_ctrl_c_to_the_main_process(self) -> None:
        batches = loader(workers=1).batches()
        next(batches)
        (worker,) = multiprocessing.active_children()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGINT)
        assert len(take(batches, 20)) == 20

    def test_an_error_in_a_worker_arrives(self) -> None:
        broken = numbered(24, bad=tuple(range(24)))
        with pytest.raises(ValueError, match="100 random images of numbers in a row cannot be decoded") as caught:
            next(loader(source=broken, workers=1).batches())
        assert "\n" not in str(caught.value)
        assert not multiprocessing.active_children()

    def test_a_bug_in_a_worker_arrives_with_its_traceback(self) -> None:
        with pytest.raises(TypeError, match="in DataLoader worker process"):
            next(loader(transform=None, workers=1).batches())
        assert not multiprocessing.active_children()

    def test_one_that_hangs_is_not_waited_for_without_end(self) -> None:
        with pytest.raises(ValueError, match=r"no worker has prepared a batch within 0\.02 min"):
            next(loader(workers=1, timeout_minutes=0.02, transform=Slow(seconds=1000)).batches())
        wait_for_the_end_of_workers()

    def test_one_that_is_slow_is_waited_for(self) -> None:
        """For several of the looks that the time-out consists of."""
        assert len(take(loader(workers=1, timeout_minutes=0.1, transform=Slow(seconds=1.5)).batches(), 3)) == 3

    @pytest.mark.slow  # each worker imports torch anew
    def test_spawned_ones_end_in_peace(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            "import multiprocessing\n"
            "from patchmix.data.loader import Loader\n"
            "from patchmix.data.sources import open_source\n"
            "from patchmix.data.views import View, Views\n"
            "if __name__ == '__main__':\n"
            "    multiprocessing.set_start_method('spawn')\n"
            "    views = Views([View(128), View(128)], seed=0)\n"
            "    loader = Loader(open_source('shapes:256'), views, batch_size=64, seed=0, workers=2)\n"
            "    for _ in range(2):\n"
            "        batches = loader.batches()\n"
            "        assert next(batches).views[0].shape == (64, 128, 128, 3)\n"
            "        batches.close()\n"
        )
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.parametrize("end", ["exit", "interrupt", "kill"])
    def test_nothing_is_left_behind(self, end: str, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            "import multiprocessing, signal, time\n"
            "from patchmix.data.loader import Loader\n"
            "from patchmix.data.sources import open_source\n"
            "from patchmix.data.views import CenterCrop\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
            "batches = Loader(open_source('shapes:64'), CenterCrop(32), batch_size=8, seed=0, workers=2).batches()\n"
            "next(batches)\n"
            "print(*[child.pid for child in multiprocessing.active_children()], flush=True)\n"
            + ("" if end == "exit" else "for _ in batches: time.sleep(0.01)\n")
        )
        process = subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        workers = [int(number) for number in process.stdout.readline().split()]
        assert len(workers) == 2
        if end == "interrupt":
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: everybody gets it
        elif end == "kill":
            process.kill()
        _, errors = process.communicate(timeout=60)
        if end == "interrupt":
            assert errors.count("Traceback") == 1, errors  # the main process's own
        deadline = time.monotonic() + 30
        while any(_is_running(worker) for worker in workers):
            assert time.monotonic() < deadline, "workers outlived their parent"
            time.sleep(0.1)


def _is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


class TestBadSamples:
    def test_are_replaced_and_named(self) -> None:
        source = numbered(48, bad=(5, 17, 40))
        batches = take(loader(source=source).batches(), 8)
        wanted = take(loader(source=numbered(48)).batches(), 8)
        named = []
        for batch, ideal in zip(batches, wanted, strict=True):
            for used, right in zip(batch.indices.tolist(), ideal.indices.tolist(), strict=True):
                assert used not in source.bad
                assert used == right or right in source.bad
            assert len(batch.views[0]) == 12
            named += [entry for entry in batch.bad if not entry.startswith("numbers#") or "broken" not in entry]
            assert {f"numbers#{i}: broken" for i in ideal.indices.tolist() if i in source.bad} <= set(batch.bad)
        assert not named
        replacements = [
            flat(order(part))[flat(order(ideal)).index(5)]
            for part, ideal in ((batches[:4], wanted[:4]), (batches[4:], wanted[4:]))
        ]
        same(batches, take(loader(source=source).batches(), 8))
        assert replacements[0] != replacements[1]  # another one in another epoch

    def test_are_left_out_of_one_pass(self) -> None:
        source = numbered(20, bad=(0, 1, 2, 7))
        batches = list(one_pass(source, Plain(), batch_size=3))
        assert flat(order(batches)) == [i for i in range(20) if i not in source.bad]
        assert sum((batch.bad for batch in batches), ()) == tuple(f"numbers#{i}: broken" for i in (0, 1, 2, 7))
        assert batches[0].views[0].shape == (0, 10, 8, 3)
        assert all(len(batch.views[0]) == len(batch.indices) for batch in batches)

    def test_other_errors_are_not_hidden(self) -> None:
        class Wrong(InMemorySource):
            def load(self, index: int) -> np.ndarray:
                raise RuntimeError("a bug")

        source = numbered(20)
        source.__class__ = Wrong
        with pytest.raises(RuntimeError, match="a bug"):
            next(one_pass(source, Plain(), batch_size=3))
        assert not issubclass(RuntimeError, DecodeError)


class TestOnePass:
    @given(length=st.integers(1, 40), batch_size=st.integers(1, 12), world=st.integers(1, 5))
    @settings(max_examples=30)
    def test_every_sample_once_in_order(self, length: int, batch_size: int, world: int) -> None:
        source = numbered(length)
        seen = []
        for rank in range(world):
            for batch in one_pass(source, Plain(), batch_size=batch_size, rank=rank, world_size=world):
                assert 1 <= len(batch.indices) <= batch_size
                seen += batch.indices.tolist()
        assert seen == list(range(length))

    def test_workers_give_the_same(self) -> None:
        source = numbered(33)
        same(
            list(one_pass(source, CenterCrop(8), batch_size=5)),
            list(one_pass(source, CenterCrop(8), batch_size=5, workers=2)),
        )
        assert not multiprocessing.active_children()


class TestMistakes:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"batch_size": 10, "world_size": 4}, r"batch size 10 must be a multiple of 4 .*--batch-size 8"),
            ({"batch_size": 10, "accumulate": 3}, r"multiple of 3 .*--batch-size 9"),
            ({"batch_size": 0}, "batch size 0"),
            ({"batch_size": 64}, r"numbers has 50 images, fewer than the batch size 64; use --batch-size 50"),
        ],
    )
    def test_are_reported_in_one_line(self, options: dict[str, int], message: str) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            loader(**options)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def test_a_batch_moves_as_a_whole() -> None:
    batch = take(loader(transform=Views(two_views(8), seed=0)).batches(), 1)[0]
    moved = batch.to("meta")
    assert [view.device.type for view in moved.views] == ["meta", "meta"]
    assert moved.indices.device.type == "cpu"  # they number samples, on the host
    assert moved.labels is not None
    assert moved.labels.device.type == "meta"
    assert moved.epoch == batch.epoch
