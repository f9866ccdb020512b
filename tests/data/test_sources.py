from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torchvision.datasets import cifar

from patchmix.data import sources
from patchmix.data.contract import Source
from patchmix.data.folder import FolderSource
from patchmix.data.memory import InMemorySource
from patchmix.data.sources import has_split, open_source
from patchmix.files import cache_folder
from tests.data.test_parquet import png
from tests.data.test_tar import archive

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No data roots but empty ones, and no network."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("PATCHMIX_DATA", raising=False)
    monkeypatch.chdir(home)

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    return home


def keys(source: Source) -> list[str]:
    return [source.key(index) for index in range(len(source))]


class TestShapes:
    def test_by_name(self) -> None:
        source = open_source("shapes:40")
        assert isinstance(source, Source)
        assert len(source) == 40
        assert source.name == "shapes (train)"
        assert len(open_source("shapes:40", "test")) == 2000
        assert has_split("shapes", "train")
        assert has_split("shapes", "test")

    @pytest.mark.parametrize("name", ["shapes:", "shapes:0", "shapes:-3", "shapes:many"])
    def test_a_wrong_number_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="needs a number of training images"):
            open_source(name)


class TestFolders:
    def test_without_split_is_unlabeled(self, tmp_path: Path, write_image: Write) -> None:
        root = tmp_path / "photos"
        for name in ("cat/1.png", "dog/2.png", "3.png"):
            write_image(root / name)
        source = open_source(root)
        assert keys(source) == ["3.png", "cat/1.png", "dog/2.png"]
        assert source.labels is None
        assert not has_split(root, "test")
        with pytest.raises(ValueError, match=r"photos' has no split 'test'; it has 'train'"):
            open_source(root, "test")
        assert open_source(root, class_folders=True).labels is None  # an image lies outside of the sub-folders
        (root / "3.png").unlink()
        labeled = open_source(root, class_folders=True)
        assert labeled.classes == ("cat", "dog")
        assert labeled.labels is not None
        assert labeled.labels.tolist() == [0, 1]

    @pytest.mark.parametrize("second", ["val", "test", "validation"])
    def test_with_splits_has_labels(self, tmp_path: Path, write_image: Write, second: str) -> None:
        for name in ("train/cat/1.png", "train/dog/2.png", f"{second}/dog/3.png"):
            write_image(tmp_path / "d" / name)
        train, test = open_source(tmp_path / "d"), open_source(tmp_path / "d", "test")
        assert keys(train) == ["cat/1.png", "dog/2.png"]
        assert keys(test) == ["dog/3.png"]
        assert test.classes == train.classes == ("cat", "dog")
        assert test.labels is not None
        assert test.labels.tolist() == [1]  # as in training, though it is the only class here
        assert has_split(tmp_path / "d", "test")

    def test_val_is_taken_before_test(self, tmp_path: Path, write_image: Write) -> None:
        for name in ("train/cat/1.png", "test/2.png", "val/cat/3.png"):
            write_image(tmp_path / "d" / name)
        source = open_source(tmp_path / "d", "test")
        assert keys(source) == ["cat/3.png"] and source.name == f"{tmp_path / 'd'} (val)"

    def test_valid_is_a_name_of_the_test_split(self, tmp_path: Path, write_image: Write) -> None:
        for name in ("train/cat/1.png", "valid/cat/2.png"):
            write_image(tmp_path / "d" / name)
        assert keys(open_source(tmp_path / "d", "test")) == ["cat/2.png"]

    def test_images_beside_the_class_folders_mean_no_labels(self, tmp_path: Path, write_image: Write) -> None:
        for name in ("train/cat/1.png", "train/2.png"):
            write_image(tmp_path / "d" / name)
        assert open_source(tmp_path / "d").labels is None

    def test_an_unknown_class_is_named(self, tmp_path: Path, write_image: Write) -> None:
        for name in ("train/cat/1.png", "val/dgo/2.png"):
            write_image(tmp_path / "d" / name)
        with pytest.raises(ValueError, match="'dgo'"):
            open_source(tmp_path / "d", "test")

    def test_small_ones_are_kept_in_memory(self, tmp_path: Path, write_image: Write) -> None:
        write_image(tmp_path / "d" / "1.png")
        assert isinstance(open_source(tmp_path / "d"), InMemorySource)
        large = open_source(tmp_path / "d", cache_bytes=10)
        assert isinstance(large, FolderSource)
        np.testing.assert_array_equal(large.load(0), open_source(tmp_path / "d").load(0))

    def test_imagenet(self, tmp_path: Path, write_image: Write, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ValueError, match="set PATCHMIX_DATA to the folder that holds imagenet/train"):
            open_source("imagenet")
        write_image(tmp_path / "sets" / "imagenet" / "train" / "n01440764" / "1.JPEG")
        monkeypatch.setenv("PATCHMIX_DATA", str(tmp_path / "sets"))
        assert open_source("imagenet").classes == ("n01440764",)
        assert not has_split("imagenet", "test")


class TestParquet:
    def test_files_are_grouped_by_name(self, tmp_path: Path) -> None:
        from tests.data.test_parquet import IMAGES, write

        write(tmp_path / "data" / "train-00000-of-00002.parquet", IMAGES[:5])
        write(tmp_path / "data" / "train-00001-of-00002.parquet", IMAGES[5:12])
        write(tmp_path / "data" / "validation-00000-of-00001.parquet", IMAGES[12:])
        assert len(open_source(tmp_path)) == 12
        test = open_source(tmp_path, "test")
        np.testing.assert_array_equal(test.load(0), IMAGES[12])
        # One file is a training set, whatever its name.
        assert len(open_source(tmp_path / "data" / "validation-00000-of-00001.parquet")) == 13

    def test_without_split_names_all_are_training(self, tmp_path: Path) -> None:
        from tests.data.test_parquet import write

        for name in ("0000.parquet", "0001.parquet"):
            write(tmp_path / name)
        assert len(open_source(tmp_path)) == 50
        assert not has_split(tmp_path, "test")

    @pytest.mark.parametrize("name", ["metadata.parquet", "train/metadata.parquet"])
    def test_one_that_describes_images_is_not_the_data(self, tmp_path: Path, write_image: Write, name: str) -> None:
        for image in ("train/cat/1.png", "val/cat/2.png"):
            write_image(tmp_path / "d" / image)
        pq.write_table(pa.table({"file_name": ["1.png"]}), tmp_path / "d" / name)
        assert keys(open_source(tmp_path / "d")) == ["cat/1.png"]
        assert keys(open_source(tmp_path / "d", "test")) == ["cat/2.png"]

    def test_tables_beside_parquet_files_with_images_are_not_read(self, tmp_path: Path) -> None:
        from tests.data.test_parquet import write

        for name in ("0000.parquet", "0001.parquet"):
            write(tmp_path / name)
        for name in ("00-annotations.parquet", "metadata.parquet"):
            pq.write_table(pa.table({"file_name": ["1.png"], "label": [7]}), tmp_path / name)
        source = open_source(tmp_path)
        assert len(source) == 50 and source.labels is not None and source.labels.max() < 7

    def test_an_image_beside_parquet_files_with_images_is_not_the_data(
        self, tmp_path: Path, write_image: Write
    ) -> None:
        from tests.data.test_parquet import write

        write(tmp_path / "d" / "train.parquet")
        write_image(tmp_path / "d" / "preview.png")
        assert len(open_source(tmp_path / "d")) == 25

    def test_cifar10_by_name(self, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATCHMIX_DATA", str(shared / "data"))
        source = open_source("cifar10", "test", cache_bytes=0)
        assert len(source) == 10_000
        assert source.name == "cifar10 (test)"


class TestCifar:
    def test_without_copy_and_network_the_remedy_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"'cifar100' is not in .* cannot be downloaded .*cifar-100-python.tar.gz"):
            open_source("cifar100")
        assert cache_folder("data").is_dir()  # where it would have been kept

    def test_a_damaged_copy_is_named(self, tmp_path: Path) -> None:
        (Path("data") / "cifar-10-batches-py").mkdir(parents=True)
        with pytest.raises(ValueError, match="cifar-10-batches-py' is incomplete or damaged"):
            open_source("cifar10")

    @pytest.mark.parametrize("packed", [False, True])
    def test_a_local_copy_is_read(self, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
        images = write_cifar(monkeypatch, packed=packed)
        source = open_source("cifar10")
        assert source.labels is not None
        assert source.labels.tolist() == [3, 1, 0, 2]
        assert source.classes == ("a", "b", "c", "d")
        np.testing.assert_array_equal(source.load(2), images[2])
        np.testing.assert_array_equal(open_source("cifar10", "test").load(1), images[5])

    def test_one_of_several_processes_unpacks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        write_cifar(monkeypatch, packed=True)
        real, calls = cifar.download_and_extract_archive, []

        def slow(*args: Any, **options: Any) -> None:
            calls.append(args)
            time.sleep(1)
            real(*args, **options)

        monkeypatch.setattr(cifar, "download_and_extract_archive", slow)
        with ThreadPoolExecutor(3) as pool:
            assert [len(source) for source in pool.map(open_source, ["cifar10"] * 3)] == [4, 4, 4]
        assert len(calls) == 1


def write_cifar(monkeypatch: pytest.MonkeyPatch, *, packed: bool) -> np.ndarray:
    """Four images for training and two for testing in ./data, as the authors' files have them."""
    images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    folder = Path("data") / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    planes = images.transpose(0, 3, 1, 2).reshape(6, -1)
    contents = {
        "one": {"data": planes[:4], "labels": [3, 1, 0, 2]},
        "two": {"data": planes[4:], "labels": [2, 2]},
        "meta": {"label_names": ["a", "b", "c", "d"]},
    }
    sums = {}
    for name, content in contents.items():
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        sums[name] = hashlib.md5(data).hexdigest()
    monkeypatch.setattr(cifar.CIFAR10, "train_list", [["one", sums["one"]]])
    monkeypatch.setattr(cifar.CIFAR10, "test_list", [["two", sums["two"]]])
    monkeypatch.setattr(cifar.CIFAR10, "meta", {"filename": "meta", "key": "label_names", "md5": sums["meta"]})
    if packed:
        archive = Path("data") / "cifar-10-python.tar.gz"
        with tarfile.open(archive, "w:gz") as file:
            file.add(folder, folder.name)
        shutil.rmtree(folder)
        monkeypatch.setattr(cifar.CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    return images


class TestMistakes:
    @pytest.mark.parametrize(
        ("wrong", "right"), [("cifar-10", "cifar10"), ("shape", "shapes"), ("imagnet", "imagenet")]
    )
    def test_the_nearest_name_is_suggested(self, wrong: str, right: str) -> None:
        with pytest.raises(ValueError, match=f"did you mean '{right}'") as caught:
            open_source(wrong)
        assert "a parquet file or folder" in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_the_nearest_path_is_suggested(self, tmp_path: Path) -> None:
        (tmp_path / "holiday_photos").mkdir()
        with pytest.raises(ValueError, match=r"did you mean '.*holiday_photos'"):
            open_source(str(tmp_path / "holiday_photo"))

    def test_a_file_that_is_no_parquet(self, tmp_path: Path, write_image: Write) -> None:
        with pytest.raises(ValueError, match=r"is a file that is neither parquet nor a \.tar"):
            open_source(write_image(tmp_path / "one.png"))

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(ValueError, match=r"no images in '.*empty'"):
            open_source(tmp_path / "empty")


def test_every_form_is_listed() -> None:
    for name in sources.NAMES:
        assert name in sources.FORMS


@pytest.mark.parametrize("names", [("training", "testing"), ("Training", "Testing"), ("Train", "Val")])
def test_other_names_of_splits_are_no_classes(names: tuple[str, str], tmp_path: Path, write_image: Write) -> None:
    for split in names:
        for name in ("cat", "dog"):
            write_image(tmp_path / "set" / split / name / "1.png")
    assert has_split(tmp_path / "set", "test")
    assert open_source(tmp_path / "set", "train", class_folders=True).classes == ("cat", "dog")


def test_names_of_shards_that_are_not_utf8(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.tar"))
    try:
        path.write_bytes(archive(("1.png", png(np.zeros((8, 12, 3), np.uint8)))))
    except OSError:
        pytest.skip("needs a file system that takes any bytes in names, such as ext4: choose it with --basetemp")
    source = open_source(path, cache_bytes=0)
    assert source.load(0).shape[2] == 3 and len(source.fingerprint()) == 32


def test_a_class_called_train_is_not_taken_for_the_split_in_silence(
    tmp_path: Path, write_image: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("bus", "car", "train"):
        write_image(tmp_path / "vehicles" / name / "1.png")
    (tmp_path / "vehicles" / "notes").mkdir()
    assert not has_split(tmp_path / "vehicles", "test")
    assert len(open_source(tmp_path / "vehicles")) == 1
    warning = capsys.readouterr().err
    assert warning.count("left out") == 1 and "vehicles/bus, " in warning and "vehicles/car, because" in warning
    assert "vehicles/train holds the training images; rename or move them" in warning
    write_image(tmp_path / "vehicles" / "val" / "1.png")
    open_source(tmp_path / "vehicles")
    assert capsys.readouterr().err == ""
