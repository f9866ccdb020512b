from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from patchmix.data.decode import DecodeError
from patchmix.data.folder import FolderSource
from patchmix.data.memory import InMemorySource, check_decodable, from_array, in_memory

Write = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path, write_image: Write) -> Path:
    """Thirty files of different sizes, two of them broken: one in its header, one behind it."""
    for number in range(30):
        image = np.random.default_rng(number).integers(0, 256, (5 + number, 40 - number, 3), dtype=np.uint8)
        write_image(tmp_path / f"{number:02d}.png", image)
    (tmp_path / "07.png").write_bytes(b"nothing")
    whole = (tmp_path / "11.png").read_bytes()
    (tmp_path / "11.png").write_bytes(whole[: len(whole) // 2])
    return tmp_path


def test_holds_the_same_as_the_source(folder: Path) -> None:
    source = FolderSource(folder, name="x")
    kept = in_memory(source, 1 << 20)
    assert isinstance(kept, InMemorySource)
    assert len(kept) == 30
    assert kept.fingerprint() == source.fingerprint()
    assert kept.name == source.name
    for index in range(30):
        assert kept.key(index) == source.key(index)
        if index not in (7, 11):
            np.testing.assert_array_equal(kept.load(index), source.load(index))
    # Really in memory: the files are no longer needed.
    (folder / "03.png").unlink()
    assert kept.load(3).shape == (8, 37, 3)


def test_threads_that_decode_never_end(folder: Path) -> None:
    """As one that has used OpenCV ends, it holds a lock that a worker forked at that moment would never get."""
    source = FolderSource(folder, name="x")
    before = set(threading.enumerate())
    in_memory(source, 1 << 20)
    check_decodable(source, limit=1.0)
    decoding = {thread for thread in threading.enumerate() if thread.name.startswith("decode")}
    assert decoding and set(threading.enumerate()) - before <= decoding
    in_memory(source, 1 << 20)
    assert all(thread.is_alive() for thread in decoding)


def test_a_forked_process_has_threads_of_its_own(folder: Path) -> None:
    source = FolderSource(folder, name="x")
    in_memory(source, 1 << 20)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(_bad_in_memory, (source,)).get(timeout=60) == [7, 11]


def _bad_in_memory(source: FolderSource) -> list[int]:
    kept = in_memory(source, 1 << 20)
    assert isinstance(kept, InMemorySource)
    return list(kept.bad)


def test_remembers_what_is_bad(folder: Path) -> None:
    kept = in_memory(FolderSource(folder, name="x"), 1 << 20)
    assert isinstance(kept, InMemorySource)
    assert list(kept.bad) == [7, 11]
    with pytest.raises(DecodeError, match=r"07\.png: not an image"):
        kept.load(7)
    with pytest.raises(DecodeError, match=r"11\.png: .*trunc"):
        kept.load(11)


def test_a_large_set_stays_where_it_is(folder: Path) -> None:
    source = FolderSource(folder, name="x")
    needed = sum(source.load(index).size for index in range(30) if index not in (7, 11))
    needed += 16 * 29 * 3  # 11.png counts: only its header is read
    assert in_memory(source, needed - 1) is source
    assert in_memory(source, needed) is not source


def _sum_in_another_process(source: InMemorySource, answer: multiprocessing.SimpleQueue[int]) -> None:
    source.load(1)[:] = 9  # seen by the parent only if nothing was copied
    answer.put(int(source.load(0).sum()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_all_processes_share_one_block(method: str) -> None:
    images = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    source = from_array(images, None, None, name="x", prefix="x", fingerprint="0")
    context = torch.multiprocessing.get_context(method)
    answer = context.SimpleQueue()
    process = context.Process(target=_sum_in_another_process, args=(source, answer))
    process.start()
    assert answer.get() == images[0].sum()
    process.join(60)
    assert (source.load(1) == 9).all()


@pytest.mark.parametrize(("rank", "line"), [("0", "decoding x: 30 images\n"), ("1", "")])
def test_only_the_first_process_shows_progress(
    rank: str, line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("patchmix.progress._QUIET_SECONDS", -1.0)
    monkeypatch.setattr("patchmix.data.memory._CHUNK", 10)
    source = FolderSource(folder, name="x")
    capsys.readouterr()  # of listing
    in_memory(source, 1 << 20)
    assert capsys.readouterr().err == line


class TestCheckDecodable:
    def test_names_count_share_and_files(self, folder: Path) -> None:
        for source in (
            FolderSource(folder, name="photos"),
            in_memory(FolderSource(folder, name="photos"), 1 << 20),
        ):
            with pytest.raises(
                ValueError, match=r"2 of 30 images of photos \(6\.7%\).*more than 1%.*07\.png: not an image"
            ):
                check_decodable(source)
            bad = check_decodable(source, limit=0.1)
            assert sorted(entry[:6] for entry in bad) == ["07.png", "11.png"]

    def test_takes_a_sample_of_a_large_set(self, folder: Path) -> None:
        class Counting(FolderSource):
            seen: set[int] = set()  # noqa: RUF012

            def load(self, index: int) -> np.ndarray:
                self.seen.add(index)
                return super().load(index)

        source = Counting(folder, name="x")
        check_decodable(source, sample=10, limit=1.0)
        first = set(source.seen)
        assert len(first) == 10
        assert first != set(range(10))
        check_decodable(source, sample=10, limit=1.0)
        assert source.seen == first  # the same ones each time

    def test_a_good_set_passes(self, tmp_path: Path, write_image: Write) -> None:
        write_image(tmp_path / "a.png")
        assert check_decodable(FolderSource(tmp_path, name="x")) == ()
