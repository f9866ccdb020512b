from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from patchmix.data.decode import DecodeError
from patchmix.data.folder import FolderSource, list_images
from patchmix.data.loader import Loader
from patchmix.data.views import CenterCrop

Write = Callable[..., Path]


def test_order_is_that_of_relative_paths(tmp_path: Path, write_image: Write) -> None:
    names = ["b/x.png", "a/z/1.JPG", "c.jpeg", "a/10.webp", "a/9.bmp", "ä/日本.gif", "a.b/q.tif", "B/y.tiff"]
    for name in names:
        write_image(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    for hidden in (".hidden.png", ".thumbs/a.png", "a/._9.bmp.png"):
        write_image(tmp_path / hidden)
    source = FolderSource(tmp_path, name="x")
    assert [source.key(index) for index in range(len(source))] == sorted(names, key=os.fsencode)
    assert source.labels is None
    assert source.classes is None
    for index in range(len(source)):
        assert source.load(index).shape == (8, 12, 3)


def test_a_name_that_is_not_utf8(tmp_path: Path, write_image: Write) -> None:
    plain = write_image(tmp_path / "plain.png")
    try:
        plain.rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.png"))
    except OSError:
        pytest.skip("needs a file system that takes any bytes in names, such as ext4: choose it with --basetemp")
    source = FolderSource(tmp_path, name="x")
    assert source.load(0).shape == (8, 12, 3)
    source.key(0).encode("utf-8")  # printable
    assert len(source.fingerprint()) == 32


def test_links_are_followed_once_and_loops_end(tmp_path: Path, write_image: Write) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    write_image(root / "z" / "1.png")
    write_image(outside / "2.png")
    (root / "a_link").symlink_to(outside)
    (root / "b_same").symlink_to(outside)
    (root / "loop").symlink_to(root)
    (root / "z" / "up").symlink_to(root / "z")
    (outside / "back").symlink_to(root)
    (root / "self").symlink_to(root / "self")
    (root / "self.png").symlink_to(root / "self.png")
    (root / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (root / "file.png").symlink_to(outside / "2.png")
    assert list_images(root) == [b"a_link/2.png", b"file.png", b"z/1.png"]


def test_labels_are_the_first_folder(tmp_path: Path, write_image: Write) -> None:
    for name in ("dog/1.png", "cat/deep/er/2.png", "cat/1.png"):
        write_image(tmp_path / name)
    source = FolderSource(tmp_path, name="x", classes=("ant", "cat", "dog"))
    assert source.labels is not None
    assert source.labels.dtype == np.int64
    assert source.labels.tolist() == [1, 1, 2]
    with pytest.raises(ValueError, match=r"'dog' .* is not one of the 1 class folders"):
        FolderSource(tmp_path, name="x", classes=("cat",))


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no images in '.*'; files ending in \.jpg"):
        FolderSource(tmp_path, name="x")


def test_the_fingerprint_is_of_names_and_sizes_not_of_the_place(tmp_path: Path, write_image: Write) -> None:
    write_image(tmp_path / "one" / "a.png")
    write_image(tmp_path / "one" / "b.png", size=(30, 30))

    def fingerprint(name: str) -> str:
        return FolderSource(tmp_path / name, name=name).fingerprint()

    first = fingerprint("one")
    assert first == fingerprint("one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert fingerprint("two") == first
    (tmp_path / "two" / "a.png").rename(tmp_path / "two" / "c.png")
    renamed = fingerprint("two")
    write_image(tmp_path / "one" / "b.png", size=(31, 31))
    assert len({first, renamed, fingerprint("one")}) == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_vanishes_while_training_is_replaced_and_named(
    tmp_path: Path, write_image: Write, workers: int
) -> None:
    for i in range(16):
        write_image(tmp_path / f"{i:02d}.png", (10 * i, 0, 0))
    batches = Loader(FolderSource(tmp_path, name="x"), CenterCrop(8), batch_size=4, seed=0, workers=workers).batches()
    next(batches)
    (tmp_path / "05.png").unlink()
    (tmp_path / "11.png").unlink()
    taken = list(islice(batches, 19))  # the prefetched ones, and more than two epochs after them
    batches.close()  # type: ignore[attr-defined]
    named = {text for batch in taken for text in batch.bad}
    assert named == {f"{name}.png: No such file or directory" for name in ("05", "11")}
    assert all(len(batch.indices) == 4 for batch in taken)
    assert not {5, 11} & {int(i) for batch in taken[-8:] for i in batch.indices}


def test_bad_files_are_named(tmp_path: Path, write_image: Write) -> None:
    write_image(tmp_path / "a.png")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.jpg").write_bytes(b"")
    source = FolderSource(tmp_path, name="x")
    with pytest.raises(DecodeError, match=r"sub/b\.jpg: "):
        source.load(1)
    (tmp_path / "a.png").unlink()
    with pytest.raises(DecodeError, match=r"a\.png: No such file"):
        source.load(0)


def test_photos_that_cannot_be_read_are_counted(
    tmp_path: Path, write_image: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("1.png", "2.ppm", "3.jpg"):
        write_image(tmp_path / name)
    (tmp_path / "3.jpg").rename(tmp_path / "3.JFIF")
    for name in ("4.HEIC", "5.avif"):
        (tmp_path / name).touch()
    source = FolderSource(tmp_path, name="x")
    assert [source.load(index).shape for index in range(len(source))] == [(8, 12, 3)] * 3
    assert "2 files in" in (error := capsys.readouterr().err) and "cannot be read" in error


@pytest.mark.parametrize("ending", [".npy", ".bmp"])
def test_the_fingerprint_is_also_of_pixels_where_all_files_have_one_size(
    ending: str, tmp_path: Path, write_image: Write
) -> None:
    found = []
    for value in (0, 200):
        pixels = np.full((8, 12, 3), value, np.uint8)
        for name in ("1", "2"):
            np.save(tmp_path / name, pixels) if ending == ".npy" else write_image(tmp_path / f"{name}.bmp", pixels)
        found.append(FolderSource(tmp_path, name="x").fingerprint())
    assert found[0] != found[1]
