"""Memory while an epoch of shards streams by that is much larger than what may be kept in memory.

python benchmarks/streaming.py [--megabytes 2000] [--cache-gb 0.001] [--workers 0] [--folder shards]

Writes shards of noise once, of so many decoded megabytes, then loads one epoch of them and prints, ten times on the
way, how much memory this process and its workers hold. Page cache is not counted: it is the system's to give away.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from patchmix.data.contract import Source
from patchmix.data.loader import Loader
from patchmix.data.sources import open_source
from patchmix.data.views import CenterCrop
from patchmix.data.write_shards import write_shards
from patchmix.settings import Shards


def resident_mb() -> float:
    """Memory of this process and its workers that is not shared with files: MB."""
    total = 0
    for process in ["self", *(str(child.pid) for child in multiprocessing.active_children())]:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                total += int(line.split()[1])
    return total / 1024


def write_noise(folder: Path, count: int, side: int, kind: str) -> None:
    """A parquet file of JPEGs of noise, in row groups of 100, and from it the shards."""
    table = folder / "parquet" / "train.parquet"
    table.parent.mkdir(parents=True)
    rng = np.random.default_rng(0)
    images = []
    for _ in range(min(200, count)):
        done, data = cv2.imencode(".jpg", rng.integers(0, 256, (side, side, 3), dtype=np.uint8))
        assert done
        images.append(data.tobytes())
    schema = pa.schema({"image": pa.binary(), "label": pa.int64()})
    with pq.ParquetWriter(table, schema) as writer:
        for first in range(0, count, 100):
            rows = range(first, min(first + 100, count))
            columns = [pa.array([images[i % len(images)] for i in rows], pa.binary()), pa.array([i % 10 for i in rows])]
            writer.write_table(pa.table(columns, schema=schema))
    if kind == "shards":
        write_shards(Shards(table.parent, folder / "shards", shard_mb=max(1, count // 20000)))


def stream(source: Source, workers: int) -> Iterator[tuple[int, float, float]]:
    """Load an epoch; at each tenth of it: images so far, memory (MB), seconds."""
    loader = Loader(source, CenterCrop(32), batch_size=32, seed=0, workers=workers)
    steps, start = loader.steps_per_epoch, time.monotonic()
    marks = {max(1, round(steps * tenth / 10)) for tenth in range(1, 11)}
    batches = loader.batches()
    for step, _ in enumerate(islice(batches, steps), start=1):
        if step in marks:
            yield step * 32, resident_mb(), time.monotonic() - start
    batches.close()  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2000, help="of decoded images in the epoch")
    parser.add_argument("--cache-gb", type=float, default=0.0005, help="the setting data.cache_gb")
    parser.add_argument("--side", type=int, default=160)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--kind", choices=("shards", "parquet"), default="shards")
    parser.add_argument("--folder", type=Path, default=None)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp())
    count = given.megabytes * 10**6 // (given.side**2 * 3)
    if not (folder / given.kind).exists():  # a second call measures without the memory that writing left behind
        write_noise(folder, count, given.side, given.kind)
    source = open_source(folder / given.kind, cache_bytes=int(given.cache_gb * 2**30))
    ratio = given.megabytes / (given.cache_gb * 1024)
    print(f"{len(source)} images, {given.megabytes} MB decoded, {ratio:.0f} x data.cache_gb, {given.workers} workers")
    print("images  RSS (MB)  seconds")
    for images, megabytes, seconds in stream(source, given.workers):
        print(f"{images:6d}  {megabytes:8.1f}  {seconds:7.1f}", flush=True)


if __name__ == "__main__":
    main()
