from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchmix.data import shards
from patchmix.data.shards import ShardIndex, scan


def archive(*members: tuple[str, bytes], form: int = tarfile.USTAR_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as file:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            file.addfile(header, io.BytesIO(content))
    return buffer.getvalue()


def scanned(data: bytes, folder: Path) -> ShardIndex:
    path = folder / "x.tar"
    path.write_bytes(data)
    with path.open("rb") as file:
        return scan(file, "x.tar")


def held(data: bytes, index: ShardIndex) -> list[tuple[str, bytes, int]]:
    places = zip(index.offsets.tolist(), index.sizes.tolist(), index.labels.tolist(), strict=True)
    return [
        (index.name(number).decode(), data[offset : offset + size], label)
        for number, (offset, size, label) in enumerate(places)
    ]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_are_grouped_up_to_the_first_dot(tmp_path: Path, form: int) -> None:
    long = "folder/" * 12 + "n" * 60 if form == tarfile.USTAR_FORMAT else "folder/" * 40 + "ü" * 120
    data = archive(
        ("a.b/1.cls", b"7"),
        ("a.b/1.txt", b"words"),
        ("a.b/1.JPG", b"one"),
        ("2.left.png", b"left"),
        ("2.png", b"two"),
        ("2.json", b'{"caption": "x", "label": 3}'),
        ("readme.md", b"no image"),
        (f"{long}.webp", b"three"),
        (f"{long}.cls", b"12\n"),
        form=form,
    )
    result = scanned(data, tmp_path)
    assert held(data, result) == [("a.b/1.JPG", b"one", 7), ("2.png", b"two", 3), (f"{long}.webp", b"three", 12)]
    assert result.skipped == ("1 further image of a sample",)


@pytest.mark.parametrize(
    ("name", "content"),
    [("1.cls", b"dog"), ("1.cls", b"-1"), ("1.cls", b"1.5"), ("1.json", b"[" * 10_000), ("1.json", b'{"label": true}')],
)
def test_what_is_no_label_is_none(tmp_path: Path, name: str, content: bytes) -> None:
    assert scanned(archive(("1.png", b"x"), (name, content)), tmp_path).labels.tolist() == [-1]


def test_hidden_members_are_left_out(tmp_path: Path) -> None:
    members = [("./a/._1.png", b"Mac"), ("./a/1.png", b"x"), ("./a/._1.cls", b"Mac"), ("./a/1.cls", b"7")]
    data = archive(*members, (".hidden.png", b"y"))
    result = scanned(data, tmp_path)
    assert held(data, result) == [("./a/1.png", b"x", 7)]
    assert result.skipped == ("",)


def test_hostile_members_are_skipped_and_counted(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for name in ("../1.png", "/etc/2.png", "a/../3.png", "..\\4.png", "esc\x1b[2J.png", "good.png"):
            header = tarfile.TarInfo(name)
            header.size = 3
            file.addfile(header, io.BytesIO(b"abc"))
        for name, kind in (("5.png", tarfile.SYMTYPE), ("6.png", tarfile.LNKTYPE), ("7.png", tarfile.CHRTYPE)):
            header = tarfile.TarInfo(name)
            header.type, header.linkname = kind, "/etc/passwd"
            file.addfile(header)
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        file.addfile(folder)
    result = scanned(buffer.getvalue(), tmp_path)
    assert held(buffer.getvalue(), result) == [("good.png", b"abc", -1)]
    assert result.skipped == ("3 link, device or sparse file, 5 unsafe name",)
    assert [path.name for path in tmp_path.iterdir()] == ["x.tar"]  # nothing was unpacked


def test_a_member_that_is_too_large_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MAX_MEMBER", 10)
    data = archive(("1.png", b"x" * 11), ("2.png", b"x" * 10))
    result = scanned(data, tmp_path)
    assert held(data, result) == [("2.png", b"x" * 10, -1)]
    assert result.skipped == ("1 larger than 0 MB",)


MEMBERS = [part for i in range(6) for part in ((f"{i}.png", bytes([i]) * (300 * i + 1)), (f"{i}.cls", b"%d" % i))]


def test_every_truncation_keeps_what_is_whole(tmp_path: Path) -> None:
    data = archive(*MEMBERS)
    whole = held(data, scanned(data, tmp_path))
    assert len(whole) == 6
    labels = [i for i, (name, _) in enumerate(MEMBERS) if name.endswith(".cls")]
    starts = [data.index(name.encode() + b"\0") for name, _ in MEMBERS]
    for cut in range(starts[2], len(data.rstrip(b"\0")), 256):
        result = scanned(data[:cut], tmp_path)
        assert any(damage in result.skipped[0] for damage in ("1 cut off", "1 damaged header"))
        # A sample is whole when its label is: one byte after the label's header.
        assert held(data, result) == whole[: sum(starts[i] + 513 <= cut for i in labels)]


def test_a_truncation_without_labels(tmp_path: Path) -> None:
    data = archive(*[(name, content) for name, content in MEMBERS if name.endswith(".png")])
    whole = held(data, scanned(data, tmp_path))
    index = scanned(data, tmp_path)
    ends = (index.offsets + index.sizes).tolist()
    for cut in range(0, ends[-1], 100):
        result = scanned(data[:cut], tmp_path)
        assert held(data, result) == whole[: sum(end <= cut for end in ends)]
        assert result.skipped[0] in ("1 cut off", "1 damaged header")


def test_samples_before_a_damaged_header_are_used(tmp_path: Path) -> None:
    data = bytearray(archive(*MEMBERS))
    third = int(scanned(bytes(data), tmp_path).offsets[2])
    data[third - 512 + 10] ^= 0x40  # in its name: the checksum no longer fits
    result = scanned(bytes(data), tmp_path)
    assert result.labels.tolist() == [0, 1]
    assert result.skipped == ("1 damaged header",)
    data[third - 512 : third] = bytes(512)  # one empty block is not the end
    result = scanned(bytes(data), tmp_path)
    assert result.labels.tolist() == [0, 1]
    assert result.skipped == ("1 damaged header",)


@given(flips=st.lists(st.integers(0, 8 * 9000), max_size=20), junk=st.binary(max_size=600))
@settings(max_examples=200)
def test_any_damage_ends_in_samples_inside_the_file(flips: list[int], junk: bytes) -> None:
    import tempfile

    data = bytearray(archive(*MEMBERS, form=tarfile.PAX_FORMAT))
    for flip in flips:
        data[flip // 8 % len(data)] ^= 1 << flip % 8
    with tempfile.TemporaryFile() as file:
        file.write(data[: len(data) // 2] + junk + data[len(data) // 2 :])
        file.flush()
        index = scan(file, "x.tar")
        for offset, size, label in zip(
            index.offsets.tolist(), index.sizes.tolist(), index.labels.tolist(), strict=True
        ):
            assert 512 <= offset <= offset + size <= len(data) + len(junk)
            assert label >= -1
