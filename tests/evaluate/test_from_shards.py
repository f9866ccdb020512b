from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from patchmix.data.contract import Groups, groups_of
from patchmix.data.randomness import Order
from patchmix.data.shapes import shapes_source
from patchmix.data.sources import open_source
from patchmix.data.write_shards import write_shards
from patchmix.evaluate.features import extract
from patchmix.evaluate.knn import knn
from patchmix.evaluate.labeled import Part, Subset
from patchmix.interop.backbone import Backbone
from patchmix.settings import Knn, Shards
from tests.evaluate.conftest import write_image


@pytest.fixture
def labeled(tmp_path: Path) -> Path:
    for split, count in (("train", 90), ("val", 40)):
        source = shapes_source("train" if split == "train" else "test", count if split == "train" else None)
        assert source.labels is not None and source.classes is not None
        for i in range(count):
            write_image(tmp_path / "d" / split / source.classes[source.labels[i]] / f"{i}.png", source.load(i))
    return tmp_path / "d"


def test_knn_from_shards_equals_knn_from_the_files(labeled: Path, tmp_path: Path, backbone: Backbone) -> None:
    write_shards(Shards(str(labeled), tmp_path / "shards", per_shard=16))
    files = knn(Knn("", str(labeled), k=(1, 5), device="cpu"), backbone)
    shards = knn(Knn("", str(tmp_path / "shards"), k=(1, 5), device="cpu"), backbone)
    assert files.metrics == shards.metrics
    assert 0 < files.top1 < 1


def test_features_follow_the_images(labeled: Path, tmp_path: Path, backbone: Backbone) -> None:
    write_shards(Shards(str(labeled), tmp_path / "shards", split="train", per_shard=16))
    original, shards = open_source(labeled, cache_bytes=0), open_source(tmp_path / "shards", cache_bytes=0)
    options = {"image_size": 32, "mean": (0.5,) * 3, "std": (0.5,) * 3, "device": torch.device("cpu")}
    a, b = (extract(backbone.encoder(), source, **options) for source in (original, shards))  # type: ignore[arg-type]
    order = [int(shards.key(i).rpartition("/")[2][:9]) for i in range(len(shards))]
    torch.testing.assert_close(b.vectors, a.vectors[order])


class Grouped:
    name, labels, classes = "grouped", None, None
    groups = Groups(np.arange(0, 1000, 10), 4)

    def __len__(self) -> int:
        return 1000

    def key(self, index: int) -> str:
        return str(index)

    def fingerprint(self) -> str:
        return "0"


def test_a_part_of_groups_has_groups_and_a_subset_reads_from_few() -> None:
    positions = np.array([3, 4, 11, 12, 13, 500, 999])
    part = Part(Grouped(), positions)  # type: ignore[arg-type]
    groups = groups_of(part)
    assert groups is not None
    assert groups.starts.tolist() == [0, 2, 5, 6]
    assert sorted(Order(len(part), 2, 0, groups).line(0).tolist()) == list(range(7))
    assert groups_of(Part(Grouped(), positions[::-1])) is None  # type: ignore[arg-type]
    subset = Subset(Grouped(), 20)  # type: ignore[arg-type]
    assert len(subset) == 20
    assert sorted({int(i) // 10 for i in subset.positions}) == [0, 33, 66, 99]
    assert len(Subset(Grouped(), 5000)) == 40  # type: ignore[arg-type]
