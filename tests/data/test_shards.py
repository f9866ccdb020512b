from __future__ import annotations

import os
import pickle
import re
import resource
import struct
import zlib
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from benchmarks.streaming import stream, write_noise
from patchmix.data import shard_files, shards
from patchmix.data.decode import DecodeError
from patchmix.data.loader import Loader, one_pass
from patchmix.data.shard_files import by_split, expand_braces, find_shards
from patchmix.data.shards import ShardIndex, ShardSource, scan
from patchmix.data.sources import has_split, open_source
from patchmix.data.views import CenterCrop
from patchmix.data.write_shards import write_shards
from patchmix.settings import Shards
from tests.data.test_parquet import png
from tests.data.test_tar import archive

IMAGES = np.random.default_rng(0).integers(0, 256, (60, 6, 5, 3), dtype=np.uint8)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATCHMIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shard_files, "PAUSE", 0.0)
    monkeypatch.setattr(shards, "MAPPED", 0)  # every index is read as a large one is
    return tmp_path / "cache"


def shard(first: int, count: int, *, labels: bool = True) -> bytes:
    members = []
    for i in range(first, first + count):
        members.append((f"{i:04d}.png", png(IMAGES[i])))
        members += [(f"{i:04d}.cls", b"%d" % (i % 3))] if labels else []
    return archive(*members)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six shards of ten, as others write them: no index."""
    (tmp_path / "s").mkdir()
    for number in range(6):
        (tmp_path / "s" / f"part-{number:03d}.tar").write_bytes(shard(number * 10, 10))
    return tmp_path / "s"


def opened(data: str | Path, **options: object) -> ShardSource:
    source = open_source(data, cache_bytes=0, **options)  # type: ignore[arg-type]
    assert isinstance(source, ShardSource)
    return source


class TestReading:
    def test_by_position(self, folder: Path) -> None:
        source = opened(folder)
        assert len(source) == 60
        for index in (59, 0, 9, 10, 31):
            np.testing.assert_array_equal(source.load(index), IMAGES[index])
        assert source.key(31) == "part-003.tar/0031.png"
        assert source.labels is not None
        np.testing.assert_array_equal(source.labels, np.arange(60) % 3)
        assert source.groups.starts.tolist() == [0, 10, 20, 30, 40, 50]
        copy = pickle.loads(pickle.dumps(source))
        np.testing.assert_array_equal(copy.load(7), IMAGES[7])
        with pytest.raises(IndexError):
            source.load(60)

    def test_a_second_start_scans_nothing(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = opened(folder)

        def refuse(*_: object) -> None:
            raise AssertionError("scanned again")

        with monkeypatch.context() as patch:
            patch.setattr(shards, "scan", refuse)
            assert opened(folder).fingerprint() == first.fingerprint()
        (folder / "part-002.tar").write_bytes(shard(20, 9))  # a changed one is
        assert len(opened(folder)) == 59

    def test_an_index_is_used_unless_it_is_wrong(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_shards(Shards("shapes:40", tmp_path / "w", split="train", per_shard=10))
        with monkeypatch.context() as patch:
            patch.setattr(shards, "scan", None)
            source = opened(tmp_path / "w")
        assert source.classes is not None
        np.testing.assert_array_equal(opened(tmp_path / "w" / "train-000002.tar").load(3), source.load(23))
        some = opened(tmp_path / "w" / "train-00000{0,2,3,1}.tar")  # parts of the index, joined
        for place, whole in ((0, 0), (9, 9), (10, 20), (29, 39), (30, 10), (39, 19)):
            assert some.key(place) == source.key(whole)
            np.testing.assert_array_equal(some.load(place), source.load(whole))
        index, content = tmp_path / "w" / "train-index.safetensors", source.fingerprint()
        index.write_bytes(index.read_bytes()[:-9])
        scanned = opened(tmp_path / "w")
        assert "train-index.safetensors" in capsys.readouterr().err
        assert scanned.fingerprint() == content

    def test_the_fingerprint_is_of_the_content_not_of_the_place(self, folder: Path, tmp_path: Path) -> None:
        first = opened(folder).fingerprint()
        folder.rename(tmp_path / "moved")
        assert opened(tmp_path / "moved").fingerprint() == first
        (tmp_path / "moved" / "part-005.tar").write_bytes(shard(50, 9))
        assert opened(tmp_path / "moved").fingerprint() != first

    def test_some_without_labels_make_it_unlabeled(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "part-001.tar").write_bytes(shard(10, 10, labels=False))
        assert opened(folder).labels is None
        assert "10 of 60 samples" in capsys.readouterr().err

    def test_knn_data_is_that_of_the_original(self, tmp_path: Path) -> None:
        write_shards(Shards("shapes:64", tmp_path / "w", split="train", per_shard=10))
        shards, original = opened(tmp_path / "w"), open_source("shapes:64")
        order = [int(shards.key(i).rpartition("/")[2][:9]) for i in range(64)]
        (a,) = one_pass(shards, CenterCrop(32), batch_size=64)
        (b,) = one_pass(original, CenterCrop(32), batch_size=64)
        assert bool((a.views[0] == b.views[0][order]).all())
        assert a.labels is not None and b.labels is not None
        assert bool((a.labels == b.labels[order]).all())


class TestDamage:
    def test_a_truncated_shard_keeps_the_rest_and_is_named(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = folder / "part-003.tar"
        path.write_bytes(path.read_bytes()[: 5 * 2048 + 540])
        source = opened(folder)
        assert len(source) == 55
        assert source.labels is not None
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert "part-003.tar: skipped 1 cut off; its other 5 samples are used" in lines[0]
        np.testing.assert_array_equal(source.load(35), IMAGES[40])

    def test_a_flipped_bit_in_an_image_is_replaced(self, folder: Path) -> None:
        path = folder / "part-000.tar"
        data = bytearray(path.read_bytes())
        for place in range(512 + 16, 512 + 40):
            data[place] ^= 0xFF
        path.write_bytes(data)
        source = opened(folder)
        with pytest.raises(DecodeError, match=r"part-000\.tar/0000\.png: "):
            source.load(0)
        batches = list(islice(Loader(source, CenterCrop(4), batch_size=10, seed=0).batches(), 6))
        assert sum(len(batch.bad) for batch in batches) >= 1
        assert all(0 not in batch.indices.tolist() for batch in batches)

    def test_a_shard_that_shrinks_later(self, folder: Path) -> None:
        source = opened(folder)
        os.truncate(folder / "part-005.tar", 1000)
        with pytest.raises(DecodeError, match=r"part-005\.tar/0059\.png: its shard ends before it does"):
            source.load(59)

    def test_a_shard_that_vanishes_is_tried_again_and_named(self, folder: Path, tmp_path: Path) -> None:
        source = opened(folder)
        (folder / "part-004.tar").rename(tmp_path / "aside.tar")
        with pytest.raises(ValueError, match=r"part-004\.tar' cannot be read \(No such file.*; 4 tries\)") as caught:
            source.load(41)
        assert not isinstance(caught.value, DecodeError)
        (tmp_path / "aside.tar").rename(folder / "part-004.tar")
        np.testing.assert_array_equal(source.load(41), IMAGES[41])

    def test_a_missing_shard_of_a_pattern_is_named(self, folder: Path) -> None:
        with pytest.raises(ValueError, match=r"part-006\.tar' is missing"):
            opened(f"{folder}/part-{{000..006}}.tar")
        with pytest.raises(ValueError, match="no shard matches"):
            opened(f"{folder}/nothing-*.tar")

    def test_without_images(self, tmp_path: Path) -> None:
        (tmp_path / "x.tar").write_bytes(archive(("a.txt", b"hello")))
        with pytest.raises(ValueError, match="no images in the 1 shards"):
            opened(tmp_path / "x.tar")

    def test_a_decompression_bomb_costs_no_memory(self, tmp_path: Path) -> None:
        side = 30_000

        def chunk(kind: bytes, data: bytes) -> bytes:
            return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

        packer = zlib.compressobj()
        pixels = b"".join(packer.compress(bytes(side * 3 + 1)) for _ in range(2000)) + packer.flush()
        bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        bomb += chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
        (tmp_path / "x.tar").write_bytes(archive(("a.png", bomb), ("b.png", png(IMAGES[0]))))
        source = opened(tmp_path / "x.tar")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(DecodeError, match=r"a\.png: its pixels are more than the limit of 100,000,000"):
            source.load(0)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB; the pixels are 2.7 GB

    @given(place=st.integers(0, 3999), bit=st.integers(0, 7))
    @settings(max_examples=60)
    def test_an_index_with_any_flipped_bit_is_safe(self, place: int, bit: int) -> None:
        import tempfile

        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "i.safetensors"
            (Path(name) / "a.tar").write_bytes(shard(0, 10))
            with (Path(name) / "a.tar").open("rb") as file:
                scan(file, "a.tar").save(path)
            data = bytearray(path.read_bytes())
            data[place % len(data)] ^= 1 << bit
            path.write_bytes(data)
            try:
                index = ShardIndex.load(path)
            except ValueError:
                return
            assert index.counts.tolist() == [len(index.offsets)] and len(index.name_ends) == len(index.sizes)
            assert all(0 < start <= start + size <= room for start, size, room in _places(index))

    @pytest.mark.parametrize(
        ("array", "value"),
        [
            ("offsets", -512),
            ("offsets", 0),  # inside the first header
            ("offsets", 1 << 40),
            ("offsets", (1 << 63) - 1),  # with its size beyond what fits into 64 bits
            ("sizes", -1),
            ("sizes", 1 << 20),  # beyond the shard's end
            ("sizes", 1 << 40),
            ("counts", 9),
            ("counts", -10),
            ("shard_bytes", 700),
            ("shard_bytes", 1 << 62),
            ("name_ends", -1),
            ("name_ends", 1 << 40),
        ],
    )
    def test_an_index_that_points_outside_is_refused(self, array: str, value: int, tmp_path: Path) -> None:
        (tmp_path / "a.tar").write_bytes(shard(0, 10))
        with (tmp_path / "a.tar").open("rb") as file:
            index = scan(file, "a.tar")
        index.save(tmp_path / "right")
        assert len(ShardIndex.load(tmp_path / "right").offsets) == 10
        if array == "name_ends":
            with safe_open(tmp_path / "right", framework="numpy") as file:
                arrays, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
            arrays["name_ends"][-1] = value
            save_file(arrays, tmp_path / "wrong", metadata)
        else:
            getattr(index, array)[-1] = value
            index.save(tmp_path / "wrong")
        with pytest.raises(ValueError, match="is not an index of shards, or a damaged one"):
            ShardIndex.load(tmp_path / "wrong")


def _places(index: ShardIndex) -> list[tuple[int, int, int]]:
    """Offset, size and the shard's size of every sample, as plain numbers: they can't overflow."""
    return list(zip(index.offsets.tolist(), index.sizes.tolist(), index.shard_bytes.tolist() * 10, strict=True))


class TestOrder:
    def test_resume_mid_epoch_is_exact(self, folder: Path) -> None:
        def order(start: int, count: int, **options: int) -> list[list[int]]:
            batches = Loader(opened(folder), CenterCrop(4), batch_size=8, seed=1, **options).batches(start)
            taken = [batch.indices.tolist() for batch in islice(batches, count)]
            batches.close()  # type: ignore[attr-defined]
            return taken

        whole = order(0, 14)
        assert order(3, 11) == whole[3:]
        assert order(9, 5, workers=2) == whole[9:]
        ranks = [order(0, 7, workers=2, rank=rank, world_size=2) for rank in range(2)]
        assert [a + b for a, b in zip(*ranks, strict=True)] == whole[:7]
        assert len({i for batch in whole[:7] for i in batch}) == 56


class TestNames:
    def test_braces_are_those_of_a_shell(self) -> None:
        assert expand_braces("a{08..11}b") == ["a08b", "a09b", "a10b", "a11b"]
        assert expand_braces("{x,y}-{1..2}") == ["x-1", "x-2", "y-1", "y-2"]
        for wrong in ("a{3..1}", "a{1..9999999}", "a{b}", "{0..99999}{0..9}"):
            with pytest.raises(ValueError):
                expand_braces(wrong)

    def test_splits_come_from_files_or_folders(self, tmp_path: Path) -> None:
        assert by_split(["d/train-0.tar", "d/val-0.tar", "d/test-0.tar"]) == {
            "train": ["d/train-0.tar"],
            "test": ["d/val-0.tar"],
        }
        assert by_split(["s3://b/train/0.tar", "s3://b/validation/0.tar"])["test"] == ["s3://b/validation/0.tar"]
        for name, first in (("train/a.tar", 0), ("val/a.tar", 10)):
            (tmp_path / "t" / name).parent.mkdir(parents=True)
            (tmp_path / "t" / name).write_bytes(shard(first, 10))
        assert has_split(tmp_path / "t", "test")
        np.testing.assert_array_equal(open_source(tmp_path / "t", "test").load(0), IMAGES[10])

    def test_words_of_splits_are_whole_words(self) -> None:
        assert by_split(["training-0.tar", "valid/0.tar"]) == {"train": ["training-0.tar"], "test": ["valid/0.tar"]}
        names = ["validated-0.tar", "trainer-0.tar", "testimony/0.tar"]
        assert by_split(names) == {"train": names}
        assert by_split(["part-0.tar", "part-1.tar", "test2-0.tar"]) == {
            "train": ["part-0.tar", "part-1.tar"],
            "test": ["test2-0.tar"],
        }

    @pytest.mark.parametrize(
        ("train", "test"),
        [
            ("imagenet1k-train-0000.tar", "imagenet1k-validation-00.tar"),
            ("imagenet-train-0.tar", "imagenet-val-0.tar"),
            ("Train-0.tar", "Val-0.tar"),
        ],
    )
    def test_they_may_stand_anywhere_in_a_name(self, train: str, test: str) -> None:
        assert by_split([f"d/{train}", f"d/{test}"]) == {"train": [f"d/{train}"], "test": [f"d/{test}"]}

    def test_one_file_is_for_training_however_its_path_is_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "val-0.tar").write_bytes(shard(0, 2))
        assert find_shards("./val-0.tar") == find_shards("val-0.tar") == {"train": ["val-0.tar"]}

    def test_the_common_folder_of_a_pattern_or_url_does_not_count(self, folder: Path) -> None:
        folder = folder.rename(folder.parent / "val")
        for data in (f"{folder}/part-{{000..005}}.tar", f"{folder}/*.tar", folder.as_uri(), str(folder)):
            assert len(opened(data)) == 60

    def test_files_beside_those_named_train_are_left_out_with_one_warning(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "part-000.tar").rename(folder / "train-0.tar")
        assert len(opened(folder)) == 10
        assert not has_split(folder, "test")
        assert capsys.readouterr().err == (
            f"patchmix: warning: left out: {', '.join(f'{folder}/part-00{i}.tar' for i in range(1, 6))}, "
            "because other files are named train; rename or move them\n"
        )

    def test_globs_braces_and_single_files(self, folder: Path) -> None:
        assert len(opened(f"{folder}/part-00[0-2].tar")) == 30
        assert len(opened(f"{folder}/part-{{001..002}}.tar")) == 20
        assert len(opened(folder / "part-001.tar")) == 10
        assert not has_split(f"{folder}/part-*.tar", "test")

    def test_a_tar_among_images_is_not_taken_for_the_data(self, folder: Path) -> None:
        (folder / "photo.png").write_bytes(png(IMAGES[0]))
        assert len(open_source(folder)) == 1

    def test_an_archive_beside_train_is_not_taken_for_the_data(self, folder: Path) -> None:
        for split in ("train", "val"):
            (folder / split / "cat").mkdir(parents=True)
            (folder / split / "cat" / "photo.png").write_bytes(png(IMAGES[0]))
        assert len(open_source(folder)) == len(open_source(folder, "test")) == 1

    def test_images_that_shards_displace_are_named(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "assets").mkdir()
        (folder / "assets" / "logo.png").write_bytes(png(IMAGES[0]))
        assert len(open_source(folder)) > 1
        assert re.search("left out: the images, such as .*logo.png, because there are .tar", capsys.readouterr().err)


@pytest.mark.parametrize("kind", ["shards", "parquet"])
def test_memory_stays_flat_while_streaming(tmp_path: Path, kind: str) -> None:
    """An epoch that is more than a hundred times what may be kept decoded."""
    write_noise(tmp_path, 2000, 96, kind)
    source = open_source(tmp_path / kind, cache_bytes=500_000)  # of 55 MB
    held = [megabytes for _, megabytes, _ in stream(source, workers=0)]
    assert len(held) == 10
    assert max(held[1:]) - held[0] < 25
