from __future__ import annotations

import errno
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

import patchmix
from patchmix.data import shards
from patchmix.data import write_shards as module
from patchmix.data.contract import Source
from patchmix.data.memory import check_decodable
from patchmix.data.sources import has_split, open_source
from patchmix.data.write_shards import write_shards
from patchmix.settings import Shards
from tests.data.test_parquet import write as write_parquet

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATCHMIX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path, write_image: Write) -> Path:
    rng = np.random.default_rng(0)
    for i in range(23):
        image = rng.integers(0, 256, (8 + i, 9, 3), dtype=np.uint8)
        kind = ("png", "jpg", "webp", "bmp", "tif", "gif")[i % 6]
        write_image(tmp_path / "d" / ("train" if i < 18 else "val") / "abc"[i % 3] / f"{i}.{kind}", image)
    return tmp_path / "d"


def by_number(source: Source) -> dict[int, int]:
    """Position in the original → position in the shards."""
    return {int(source.key(i).rpartition("/")[2][:9]): i for i in range(len(source))}


def assert_same(original: Source, shards: Source) -> None:
    assert len(original) == len(shards)
    places = by_number(shards)
    assert original.classes == shards.classes
    for i in range(len(original)):
        np.testing.assert_array_equal(original.load(i), shards.load(places[i]))
        if original.labels is not None:
            assert shards.labels is not None
            assert original.labels[i] == shards.labels[places[i]]


def test_a_round_trip_keeps_bytes_labels_and_splits(folder: Path, tmp_path: Path) -> None:
    train, test = write_shards(Shards(folder, tmp_path / "out", per_shard=5))
    assert (train.shards, train.samples, test.samples) == (4, 18, 5)
    original = open_source(folder, cache_bytes=0)
    shards = open_source(tmp_path / "out", cache_bytes=0)
    assert_same(original, shards)
    assert shards.classes == ("a", "b", "c")
    places = by_number(shards)
    for i in range(18):
        assert original.encoded(i) == shards.encoded(places[i])  # type: ignore[attr-defined]
    assert [places[i] for i in range(18)] != sorted(places.values())  # shuffled
    assert_same(open_source(folder, "test"), open_source(tmp_path / "out", "test"))
    assert_same(open_source(folder), open_source(tmp_path / "out"))  # decoded into memory
    with tarfile.open(tmp_path / "out" / "train-000003.tar") as tar:  # what others can read
        assert len([name for name in tar.getnames() if name.endswith(".cls")]) == 3


def test_parquet_shards_and_generated_images(tmp_path: Path) -> None:
    write_parquet(tmp_path / "p" / "train.parquet", names=["x", "y", "z"])
    write_shards(Shards(tmp_path / "p", tmp_path / "one", per_shard=4))
    assert_same(open_source(tmp_path / "p"), open_source(tmp_path / "one"))
    write_shards(Shards(tmp_path / "one", tmp_path / "two", per_shard=9))
    first, second = open_source(tmp_path / "one"), open_source(tmp_path / "two")
    for i, place in by_number(second).items():
        np.testing.assert_array_equal(first.load(i), second.load(place))
    write_shards(Shards("shapes:20", tmp_path / "three", split="train", per_shard=7, shuffle=False))
    assert_same(open_source("shapes:20"), open_source(tmp_path / "three"))
    assert by_number(open_source(tmp_path / "three")) == {i: i for i in range(20)}
    assert not has_split(tmp_path / "three", "test")


def test_real_photos(shared: Path, tmp_path: Path) -> None:
    with tarfile.open(shared / "data" / "clothing.tar") as tar:
        chosen = [m for m in tar if m.name.startswith("clothing/val/") and m.isfile()]
        for member in chosen:
            file = tar.extractfile(member)
            assert file is not None
            path = tmp_path / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.read())
    (tmp_path / "clothing" / "val").rename(tmp_path / "clothing" / "train")
    (done,) = write_shards(Shards(tmp_path / "clothing", tmp_path / "out", shard_mb=0.4))
    assert done.samples == len(chosen) > 300
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.tar")]
    assert len(sizes) >= 4
    assert max(sizes) < 600_000
    assert_same(open_source(tmp_path / "clothing"), open_source(tmp_path / "out"))


def test_a_call_that_was_interrupted_does_the_rest(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = module._add_sample, []

    def failing(*args: object) -> None:
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_add_sample", failing)
    with pytest.raises(KeyboardInterrupt):
        write_shards(Shards(folder, tmp_path / "out", per_shard=5, workers=1))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        ".lock",
        "train-000000.tar",
        "train-000001.tar",
        "train-job.json",
    ]
    kept = (tmp_path / "out" / "train-000000.tar").stat().st_mtime_ns
    (tmp_path / "out" / ".train-000002.tar.1.unfinished").write_bytes(b"killed while writing")
    monkeypatch.setattr(module, "_add_sample", real)
    write_shards(Shards(folder, tmp_path / "out", per_shard=5, workers=1))
    assert (tmp_path / "out" / "train-000000.tar").stat().st_mtime_ns == kept
    write_shards(Shards(folder, tmp_path / "again", per_shard=5, workers=3))
    for path in (tmp_path / "again").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name
    assert len(list((tmp_path / "out").iterdir())) == len(list((tmp_path / "again").iterdir()))


def test_another_job_or_a_used_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_shards(Shards(folder, out, split="train", per_shard=5))
    write_shards(Shards(folder, out, split="train", per_shard=5))  # the same again is fine
    write_shards(Shards(folder, out, split="test", per_shard=5))  # so is the other split
    with pytest.raises(ValueError, match=r"holds 'train-000000\.tar', which belongs to another job"):
        write_shards(Shards(folder, out, split="train", per_shard=6))
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds 'thesis\.txt'"):
        write_shards(Shards(folder, tmp_path / "used"))


def test_a_second_call_at_the_same_time_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would remove the unfinished shards of the first."""
    real, out, refused = module._add_sample, tmp_path / "out", []

    def interrupted(*args: object) -> None:
        if not refused:
            refused.append(True)
            with pytest.raises(
                ValueError, match=r"out is in use by process \d+ on .*; wait for it, stop it, or choose another --out"
            ):
                write_shards(Shards(folder, out, split="train", per_shard=5))
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_add_sample", interrupted)
    assert write_shards(Shards(folder, out, split="train", per_shard=5, workers=1))[0].samples == 18
    assert refused


def test_what_cannot_be_read_is_left_out_and_named(folder: Path, tmp_path: Path) -> None:
    (folder / "train" / "a" / "0.png").write_bytes(b"no image")
    for _ in ("written", "repeated"):
        done = write_shards(Shards(folder, tmp_path / "out", split="train", per_shard=5))[0]
        assert done.samples == 17
        assert [text.split(":")[0] for text in done.left_out] == ["a/0.png"]
    assert len(open_source(tmp_path / "out")) == 17


def test_a_file_that_readers_would_skip_is_left_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {path.relative_to(folder / "train").as_posix(): path.stat().st_size for path in folder.glob("train/*/*")}
    largest = max(sizes, key=lambda name: sizes[name])
    for part in (module, shards):
        monkeypatch.setattr(part, "MAX_MEMBER", sizes[largest] - 1)
    done = write_shards(Shards(folder, tmp_path / "out", split="train", per_shard=5))[0]
    assert done.samples == 17 and [text.split(":")[0] for text in done.left_out] == [largest]


def test_damage_is_found_at_the_end(folder: Path, tmp_path: Path) -> None:
    write_shards(Shards(folder, tmp_path / "out", split="train", per_shard=5))
    shard = tmp_path / "out" / "train-000001.tar"
    shard.write_bytes(shard.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"do not hold what was written \(train-000001\.tar"):
        write_shards(Shards(folder, tmp_path / "out", split="train", per_shard=5))


def test_quality_makes_jpegs(folder: Path, tmp_path: Path) -> None:
    write_shards(Shards(folder, tmp_path / "out", split="train", quality=95))
    shards = open_source(tmp_path / "out", cache_bytes=0)
    assert all(shards.encoded(i)[:2] == b"\xff\xd8" for i in range(18))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_shard": 0}, "per_shard is 0; it must be"),
        ({"shard_mb": "big"}, "shard_mb is 'big'; it must be"),
        ({"quality": 101}, "quality is 101; it must be"),
        ({"workers": 0}, "workers is 0; it must be"),
    ],
)
def test_mistakes_are_reported_in_one_line(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        patchmix.shards("shapes:20", out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_moved_set_can_go_on(folder: Path, tmp_path: Path) -> None:
    write_shards(Shards(folder, tmp_path / "out", split="train", per_shard=5))
    shutil.move(folder, tmp_path / "elsewhere")
    assert write_shards(Shards(tmp_path / "elsewhere", tmp_path / "out", split="train", per_shard=5))


def test_a_first_look_reads_from_few_groups(tmp_path: Path) -> None:
    """Weighing or checking a set in many shards must not fetch all of them."""
    write_shards(Shards("shapes:200", tmp_path / "out", split="train", per_shard=2))
    source = open_source(tmp_path / "out", cache_bytes=0)
    looked_at: set[int] = set()
    real = source.encoded  # type: ignore[attr-defined]
    source.encoded = lambda index: looked_at.add(index // 2) or real(index)  # type: ignore[attr-defined]
    assert check_decodable(source) == ()
    assert module._mean_bytes(source, None) > 1024
    assert 1 < len(looked_at) <= 8


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoLocks(FileLock):
        def _acquire(self) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("patchmix.files.FileLock", NoLocks)
    (done,) = write_shards(Shards("shapes:20", tmp_path / "out", split="train"))
    assert done.samples == 20
