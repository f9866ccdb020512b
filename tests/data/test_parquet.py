from __future__ import annotations

import io
import json
import pickle
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from patchmix.data import parquet
from patchmix.data.decode import DecodeError
from patchmix.data.loader import Loader
from patchmix.data.parquet import ParquetSource
from patchmix.data.views import CenterCrop

IMAGES = np.random.default_rng(0).integers(0, 256, (25, 6, 5, 3), dtype=np.uint8)


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def write(
    path: Path,
    images: np.ndarray = IMAGES,
    *,
    column: str = "image",
    plain: bool = False,
    label: str | None = "label",
    names: list[str] | None = None,
) -> Path:
    data = [png(image) for image in images]
    encoded = pa.array(data, pa.binary()) if plain else pa.array([{"bytes": d, "path": None} for d in data])
    columns: dict[str, object] = {"id": pa.array([f"row {i}" for i in range(len(data))]), column: encoded}
    if label is not None:
        columns[label] = pa.array(np.arange(len(data)) % 3)
    table = pa.table(columns)
    if names is not None:
        info = {"info": {"features": {column: {"_type": "Image"}, label: {"_type": "ClassLabel", "names": names}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=4)
    return path


@pytest.mark.parametrize("column", ["image", "img"])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("label", ["label", "fine_label", None])
def test_the_layouts(tmp_path: Path, column: str, plain: bool, label: str | None) -> None:
    source = ParquetSource([write(tmp_path / "a.parquet", column=column, plain=plain, label=label)], name="x")
    assert len(source) == 25
    for index in (24, 0, 3, 4, 11):
        np.testing.assert_array_equal(source.load(index), IMAGES[index])
    if label is None:
        assert source.labels is None
    else:
        assert source.labels is not None
        np.testing.assert_array_equal(source.labels, np.arange(25) % 3)
    assert source.classes is None


def test_class_names_come_from_the_metadata(tmp_path: Path) -> None:
    source = ParquetSource([write(tmp_path / "a.parquet", names=["ant", "bee", "cat"])], name="x")
    assert source.classes == ("ant", "bee", "cat")


def test_some_files_are_one_after_the_other(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.parquet", IMAGES[:10]), write(tmp_path / "b.parquet", IMAGES[10:])]
    source = ParquetSource(files, name="x")
    assert len(source) == 25
    for index in range(25):
        np.testing.assert_array_equal(source.load(index), IMAGES[index])
    assert [source.key(index) for index in (0, 9, 10, 24)] == [
        "a.parquet#0",
        "a.parquet#9",
        "b.parquet#0",
        "b.parquet#14",
    ]


def test_files_of_different_layouts_are_one_source_without_labels_unless_all_have_them(tmp_path: Path) -> None:
    a = write(tmp_path / "a.parquet")
    b = write(tmp_path / "b.parquet", column="img", plain=True, label=None)
    source = ParquetSource([a, b], name="x")
    np.testing.assert_array_equal(source.load(3), IMAGES[3])
    np.testing.assert_array_equal(source.load(28), IMAGES[3])
    assert source.labels is None


def test_only_some_row_groups_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_CACHED_BYTES", 1500)
    source = ParquetSource([write(tmp_path / "a.parquet")], name="x")
    for index in range(25):
        source.load(index)
    assert 1 <= len(source._groups) < 4


def test_an_epoch_reads_each_row_group_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.zeros((400, 6, 5, 3), np.uint8)
    images[:, 0, 0, 0] = np.arange(400) % 256
    files = [write(tmp_path / "a.parquet", images[:200]), write(tmp_path / "b.parquet", images[200:])]
    monkeypatch.setattr(parquet, "_CACHED_BYTES", 30_000)  # of about 75,000
    source = ParquetSource(files, name="x")
    assert len(source.groups.starts) == 100
    assert 8 <= source.groups.window < 40
    reads = []
    real = parquet._open
    monkeypatch.setattr(parquet, "_open", lambda file: reads.append(file) or real(file))
    loader = Loader(source, CenterCrop(4), batch_size=16, seed=0)
    seen = [index for batch in islice(loader.batches(), 25) for index in batch.indices.tolist()]
    assert sorted(seen) == list(range(400))
    assert len(reads) <= 130  # shuffled over everything, they would be about 400
    assert sum(column.nbytes for column in source._groups.values()) <= 30_000


def test_it_can_be_sent_to_a_worker(tmp_path: Path) -> None:
    source = ParquetSource([write(tmp_path / "a.parquet")], name="x")
    source.load(0)
    copy = pickle.loads(pickle.dumps(source))
    assert len(copy._groups) == 0
    np.testing.assert_array_equal(copy.load(7), IMAGES[7])


def test_the_fingerprint_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    one = ParquetSource([write(tmp_path / "1" / "a.parquet")], name="x").fingerprint()
    two = ParquetSource([write(tmp_path / "2" / "a.parquet")], name="y").fingerprint()
    other = ParquetSource([write(tmp_path / "3" / "a.parquet", IMAGES[:24])], name="x").fingerprint()
    assert one == two != other


def test_withheld_labels_are_none(tmp_path: Path) -> None:
    table = pa.table({"image": pa.array([png(IMAGES[0])]), "label": pa.array([-1])})
    pq.write_table(table, tmp_path / "a.parquet")
    assert ParquetSource([tmp_path / "a.parquet"], name="x").labels is None


def test_images_of_a_damaged_row_group_are_bad_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    page = pq.ParquetFile(path).metadata.row_group(1).column(1)
    data = bytearray(path.read_bytes())
    start = page.dictionary_page_offset or page.data_page_offset
    data[start : start + page.total_compressed_size] = b"\xff" * page.total_compressed_size
    path.write_bytes(data)
    source = ParquetSource([path], name="x")
    with pytest.raises(DecodeError, match=r"a\.parquet#5: .+"):
        source.load(5)
    np.testing.assert_array_equal(source.load(8), IMAGES[8])
    batches = list(islice(Loader(source, CenterCrop(4), batch_size=5, seed=0, workers=1).batches(), 5))
    assert sorted({line.partition(": ")[0] for batch in batches for line in batch.bad}) == [
        f"a.parquet#{row}" for row in (4, 5, 6, 7)
    ]
    assert not set(torch.cat([batch.indices for batch in batches]).tolist()) & {4, 5, 6, 7}


def test_mistakes_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"picture": [b"x"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="has the columns picture; needs 'image' or 'img'"):
        ParquetSource([tmp_path / "a.parquet"], name="x")
    (tmp_path / "b.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(ValueError, match=r"b\.parquet' cannot be read as parquet"):
        ParquetSource([tmp_path / "b.parquet"], name="x")
    pq.write_table(pa.table({"image": pa.array([b"junk", None], pa.binary())}), tmp_path / "c.parquet")
    source = ParquetSource([tmp_path / "c.parquet"], name="x")
    with pytest.raises(DecodeError, match=r"c\.parquet#0: not an image"):
        source.load(0)
    with pytest.raises(DecodeError, match=r"c\.parquet#1: has no bytes"):
        source.load(1)


def test_real_cifar10(shared: Path) -> None:
    source = ParquetSource([shared / "data" / "cifar10" / "test.parquet"], name="cifar10")
    assert len(source) == 10_000
    assert source.classes is not None
    assert source.labels is not None
    # The first test images of CIFAR-10 are well known.
    assert [source.classes[label] for label in source.labels[:4]] == ["cat", "ship", "ship", "airplane"]
    assert np.bincount(source.labels).tolist() == [1000] * 10
    assert source.load(0)[0, 0].tolist() == [158, 112, 49]
