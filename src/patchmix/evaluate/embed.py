"""Feature vectors of a set of images, written to a file."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from patchmix import distributed
from patchmix.data.contract import Source
from patchmix.data.sources import open_source
from patchmix.device import resolve_device
from patchmix.evaluate.features import Features, Pool
from patchmix.evaluate.stored import Reader
from patchmix.files import writing
from patchmix.interop.backbone import Backbone


def embed(
    backbone: Backbone,
    data: str | Path,
    out: Path,
    *,
    split: Literal["train", "test"] = "train",
    pool: Pool = "token",
    resize: int | None = None,
    device: str = "auto",
    workers: int = 0,
    batch_size: int = 256,
) -> list[Path]:
    """Writes path, label where there is one, and vector of every image of `data`; returns the files written.

    out: a .parquet with these three columns, or a .npy with the vectors (N, D) and a .csv beside it with the rest.
    Images that can't be decoded are left out. Under torchrun the work is split and the main process writes.
    """
    if out.suffix not in (".parquet", ".npy"):
        raise ValueError(f"{out} must end in .parquet or .npy")
    target = resolve_device(device)
    with distributed.process_group(target):
        source = _open(data, split)
        reader = Reader(backbone, device=target, pool=pool, resize=resize, workers=workers, batch_size=batch_size)
        features = reader.read(source)
        if not distributed.is_main():
            return []
        return _write_parquet(features, source, out) if out.suffix == ".parquet" else _write_npy(features, source, out)


def _open(data: str | Path, split: Literal["train", "test"]) -> Source:
    """Sub-folders are labels where all images lie in one; embedding needs none."""
    try:
        return open_source(data, split, class_folders=True)
    except ValueError:
        return open_source(data, split)


def _write_parquet(features: Features, source: Source, out: Path) -> list[Path]:
    vectors = features.vectors.numpy()
    columns: dict[str, pa.Array] = {"path": pa.array(_paths(features, source))}
    if features.labels is not None:
        columns["label"] = pa.array(features.labels.numpy())
    columns["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    with writing(out) as file:
        pq.write_table(pa.table(columns), file)
    return [out]


def _write_npy(features: Features, source: Source, out: Path) -> list[Path]:
    with writing(out) as file:
        np.save(file, features.vectors.numpy())
    text = io.StringIO()
    rows = csv.writer(text)
    labels = None if features.labels is None else features.labels.tolist()
    rows.writerow(["path"] if labels is None else ["path", "label"])
    for i, path in enumerate(_paths(features, source)):
        rows.writerow([path] if labels is None else [path, labels[i]])
    table = out.with_suffix(".csv")
    with writing(table) as file:
        file.write(text.getvalue().encode("utf-8", "surrogateescape"))
    return [out, table]


def _paths(features: Features, source: Source) -> list[str]:
    return [source.key(int(i)) for i in features.indices]
