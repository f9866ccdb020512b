"""Orders and indexes of 1.28 million and of one billion samples, without the samples.

Samples have 100 KB, shards 2,500 of them. The large index is a sparse file: zeros in place of sizes, labels and names
take no room, offsets do (8 GB), so opening it costs what it would cost with a file that the system has in its cache.
"""

from __future__ import annotations

import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.result import Result
from patchmix.data.contract import Groups
from patchmix.data.randomness import SORTED, Order, permutation
from patchmix.data.shards import ShardIndex, ShardSource
from patchmix.study.bench import Spread

PER_SHARD, SAMPLE_BYTES, BATCH, BINS = 2500, 100_000, 4096, 64
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
T = TypeVar("T")


def run(quick: bool = False) -> list[Result]:
    results = []
    for count, title in ((1_281_167, "1.28 M"), (10**8 if quick else 10**9, "100 M" if quick else "1 billion")):
        with tempfile.TemporaryDirectory() as folder:
            source, found = index(Path(folder), count)
        found |= order("shards", count, source.groups, 8 if quick else 64)
        found |= order("no shards", count, None, 8 if quick else 64)
        for name, values in found.items():
            limit = 0.0 if "most − fewest" in name else None
            results.append(Result(f"{title}, {name}", Spread.of(values), at_most=limit))
    return results


def index(folder: Path, count: int) -> tuple[ShardSource, dict[str, list[float]]]:
    """Written, then opened as a run does it."""
    path = folder / "train-index.safetensors"
    write_index(path, count)
    (loaded, seconds), own = timed(lambda: ShardIndex.load(path)), peak_mb(lambda: ShardIndex.load(path))
    source = ShardSource(loaded.shards, loaded, name="simulated")
    assert len(source) == count
    return source, {"index: MB": [path.stat().st_size / 1e6], "index: CPU s to open": [seconds], "index: own MB": [own]}


def write_index(path: Path, count: int) -> None:
    """As `ShardIndex.save` does it, block by block; see above for what is left out."""
    counts = [min(PER_SHARD, count - first) for first in range(0, count, PER_SHARD)]
    described = {
        "version": 1,
        "shards": [f"train-{number:06d}.tar" for number in range(len(counts))],
        "bytes": [PER_SHARD * (SAMPLE_BYTES + 1024)] * len(counts),
        "counts": counts,
        "classes": None,
        "skipped": [""] * len(counts),
    }
    arrays = {"offsets": ("I64", count), "sizes": ("I64", count), "labels": ("I64", count)}
    arrays |= {"name_ends": ("I64", count), "names": ("U8", 13 * count)}  # 000000000.jpg
    header, end = {"__metadata__": {"index": json.dumps(described)}}, 0
    for name, (kind, length) in arrays.items():
        size = length * (8 if kind == "I64" else 1)
        header[name] = {"dtype": kind, "shape": [length], "data_offsets": [end, end + size]}  # type: ignore[assignment]
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = 512 + np.arange(PER_SHARD, dtype=np.int64) * (SAMPLE_BYTES + 512)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for length in counts:
            file.write(block[:length])  # type: ignore[arg-type]
        file.truncate(8 + len(text) + end)
        file.seek(8 + len(text) + 32 * count - 8)
        file.write((13 * count).to_bytes(8, "little"))  # the last name holds all the text


def order(name: str, count: int, groups: Groups | None, steps: int) -> dict[str, list[float]]:
    """A run that goes on in the middle of its fourth epoch."""
    first = count // BATCH // 2
    made = Order(count, BATCH, 0, groups)
    _, start = timed(lambda: made.batch(3, first))
    drawn, seconds = timed(lambda: [made.batch(3, first + step) for step in range(steps)])
    own = peak_mb(lambda: Order(count, BATCH, 0, groups).batch(3, first))
    found = {
        "CPU s to the first batch": [start],
        "own MB": [own],
        "CPU ms per batch": [1000 * seconds / steps],
        f"χ² ÷ degrees of freedom, batch over {BINS} parts": [chi_square(batch * BINS // count) for batch in drawn],
        "shards in a batch": [float(len(np.unique(batch // PER_SHARD))) for batch in drawn],
    }
    if groups and count <= SORTED:  # shards of samples in a random order, as `patchmix shards` writes them
        place = permutation(count, 0)
        found["χ² likewise, shards written shuffled"] = [chi_square(place[batch] * BINS // count) for batch in drawn]
    differences = []
    for world in RANKS:
        ranks = np.stack(drawn).reshape(steps, world, -1)  # as the loader cuts a batch
        seen = [np.unique(ranks[:, rank]) for rank in range(world)]
        assert len(np.unique(np.concatenate(seen))) == steps * BATCH, "each sample once"
        differences.append(float(max(map(len, seen)) - min(map(len, seen))))
        if groups and world in (1, 8, 512):
            read = [float(len(np.unique(own // PER_SHARD))) for own in seen]
            found[f"shards that each of {world} ranks reads in {steps} steps"] = read
    found[f"samples of a rank, most − fewest, {RANKS[0]} … {RANKS[-1]} ranks"] = differences
    return {f"{name}: {key}": value for key, value in found.items()}


def chi_square(bins: np.ndarray) -> float:
    expected = len(bins) / BINS
    return float(((np.bincount(bins, minlength=BINS) - expected) ** 2 / expected).sum() / (BINS - 1))


def timed(action: Callable[[], T]) -> tuple[T, float]:
    began = time.process_time()
    value = action()
    return value, time.process_time() - began


def peak_mb(action: Callable[[], object]) -> float:
    """What it allocates at most; mapped files are not counted."""
    tracemalloc.start()
    action()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6
