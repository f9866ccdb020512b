"""Any source → tar shards of the webdataset layout with an index next to them.

A shard is written under another name and gets its own when it is complete, so a call that was interrupted can be run
again and does the rest. A file SPLIT-job.json says what the shards were made from.
"""

import io
import json
import re
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from patchmix.data.contract import EncodedSource, Indices, Source, Split, groups_of
from patchmix.data.decode import DecodeError, Pixels, extension_of, size_of, to_picture
from patchmix.data.memory import some_positions
from patchmix.data.randomness import Order, permutation
from patchmix.data.shards import MAX_MEMBER, ShardIndex, join, scan
from patchmix.data.sources import SPLITS, has_split, open_source
from patchmix.files import LOCK, UNFINISHED, run_lock, write_text, writing
from patchmix.progress import progress_bar
from patchmix.settings import Shards

_SEED = 0  # of the order in which samples are written
_WEIGHED = 256  # samples whose mean size stands for all


@dataclass(frozen=True)
class Written:
    """The shards of one split."""

    split: Split
    shards: int
    samples: int
    left_out: tuple[str, ...]  # "key: reason"
    bytes: int


def write_shards(settings: Shards) -> list[Written]:
    """`patchmix shards`: OUT/train-000000.tar … with train-index.safetensors, and the same for the test split.

    Files keep their bytes; pixels that come without a file become PNG. What was written is checked and printed.
    """
    written = []
    for split in [settings.split] if settings.split else [split for split in SPLITS if has_split(settings.data, split)]:
        source = open_source(settings.data, split, class_folders=True, cache_bytes=0)
        if len(source) and source.key(0).endswith(".npy"):
            raise ValueError(f"{source.name} holds .npy files, shards hold image files; train from the folder itself")
        fitting = round(1e6 * settings.shard_mb / _mean_bytes(source, settings.quality))
        count = settings.per_shard or max(1, min(len(source), fitting))
        with run_lock(settings.out):  # two calls at a time would remove each other's unfinished shards
            done = _write_split(source, split, count, settings)
        written.append(done)
        print(f"{split}: {done.samples:,} images in {done.shards:,} shards, {done.bytes / 1e6:,.1f} MB, checked")
        for text in done.left_out[:5]:
            print(f"  skipped: {text}")
        if len(done.left_out) > 5:
            print(f"  skipped: {len(done.left_out) - 5} more")
    return written


def _write_split(source: Source, split: Split, per_shard: int, settings: Shards) -> Written:
    out, quality = settings.out, settings.quality
    job = {  # what decides every byte of the shards
        "data": str(settings.data),
        "fingerprint": source.fingerprint(),
        "split": split,
        "samples": len(source),
        "per_shard": per_shard,
        "shuffle": settings.shuffle,
        "quality": quality,
        "version": 1,
    }
    _claim(out, split, job)
    order = _order(source, settings.shuffle)
    names = [f"{split}-{number:06d}.tar" for number in range(-(-len(source) // per_shard))]
    with (
        ThreadPoolExecutor(settings.workers) as pool,
        progress_bar(f"writing {source.name} to {out}", len(source)) as advance,
    ):
        for number, name in enumerate(names):
            positions = order[number * per_shard : (number + 1) * per_shard].tolist()
            if not (out / name).exists():  # by an earlier call
                with writing(out / name) as file, tarfile.open(fileobj=file, mode="w") as tar:
                    files = pool.map(partial(_image_file, source, quality), positions)
                    for position, image in zip(positions, files, strict=True):
                        if not isinstance(image, DecodeError):
                            _add_sample(tar, source, position, *image)
            advance(len(positions))
    index, left_out = _index(out, names, source, quality)
    index.save(out / f"{split}-index.safetensors")
    return Written(split, len(names), len(index.offsets), left_out, int(index.shard_bytes.sum()))


def _claim(out: Path, split: Split, job: dict[str, Any]) -> None:
    """Makes `out` this job's; raises ValueError if it holds anything else. Removes what an interrupted call began."""
    record = out / f"{split}-job.json"
    try:
        before = json.loads(record.read_text("utf-8"))
    except (OSError, ValueError):
        before = None
    same = isinstance(before, dict) and {**before, "data": job["data"]} == job  # the data may have moved
    splits = "(train|test)" if same else "test" if split == "train" else "train"
    known = re.compile(rf"{splits}-(\d{{6}}\.tar|index\.safetensors|job\.json)|{re.escape(LOCK)}(\.json|\.soft)?")
    for path in sorted(out.iterdir()):
        if path.name.startswith(f".{split}-") and path.name.endswith(UNFINISHED):
            path.unlink()
        elif not known.fullmatch(path.name):
            raise ValueError(
                f"{str(out)!r} holds {path.name!r}, which belongs to another job; give an empty folder with --out, "
                "or the same data and settings to continue"
            )
    if not same:
        write_text(record, json.dumps(job, indent=2) + "\n")


def _order(source: Source, shuffle: bool) -> Indices:
    """Positions in the order of writing: (N,). Shuffled, because readers mix within a window of shards only."""
    if not shuffle:
        return np.arange(len(source), dtype=np.int64)
    groups = groups_of(source)
    if groups is None or len(groups.starts) < 2:
        return permutation(len(source), _SEED)
    return Order(len(source), 1, _SEED, groups).line(0)


def _mean_bytes(source: Source, quality: int | None) -> float:
    """How much of a shard a sample takes."""
    images = [_image_file(source, quality, position) for position in some_positions(source, _WEIGHED).tolist()]
    blocks = [1 + -(-len(image[0]) // 512) for image in images if not isinstance(image, DecodeError)] or [1]
    return 512 * (sum(blocks) / len(blocks) + (2 if source.labels is not None else 0))


def _add_sample(tar: tarfile.TarFile, source: Source, position: int, data: bytes, extension: str) -> None:
    files = {extension: data}
    if source.labels is not None:
        files["cls"] = str(int(source.labels[position])).encode()
    for ending, content in files.items():
        header = tarfile.TarInfo(f"{position:09d}.{ending}")
        header.size, header.mode = len(content), 0o644
        tar.addfile(header, io.BytesIO(content))


def _image_file(source: Source, quality: int | None, position: int) -> tuple[bytes, str] | DecodeError:
    """An image file's bytes and its extension; an error where even the header cannot be read."""
    try:
        if quality is not None:
            return _encode(to_picture(source.load(position)), ".jpg", cv2.IMWRITE_JPEG_QUALITY, quality), "jpg"
        if not isinstance(source, EncodedSource):
            pixels = source.load(position)
            pixels = pixels if pixels.dtype.kind == "u" else to_picture(pixels)
            return _encode(pixels, ".png", cv2.IMWRITE_PNG_COMPRESSION, 6), "png"
        data = source.encoded(position)
        size_of(data, source.key(position))
        if len(data) > MAX_MEMBER:
            raise DecodeError(source.key(position), f"larger than {MAX_MEMBER >> 20} MB, which readers of shards skip")
    except DecodeError as error:
        return error
    return data, extension_of(data)


def _encode(pixels: Pixels, kind: str, option: int, value: int) -> bytes:
    done, data = cv2.imencode(kind, cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), [option, value])
    assert done, f"OpenCV cannot write {kind}"
    return bytes(data.tobytes())


def _index(out: Path, names: list[str], source: Source, quality: int | None) -> tuple[ShardIndex, tuple[str, ...]]:
    """Reads the shards back, and says which images they lack; raises ValueError where these can be read."""
    parts = []
    with progress_bar(f"checking {out}", len(names), unit="shards") as advance:
        for name in names:
            with (out / name).open("rb", buffering=0) as file:
                parts.append(scan(file, name))
            advance(1)
    index = join(parts)
    damaged = [f"{name} ({text})" for name, text in zip(index.shards, index.skipped, strict=True) if text]
    numbers = np.array([int(index.name(i)[:9]) for i in range(len(index.offsets))], np.int64)
    missing = np.setdiff1d(np.arange(len(source)), numbers).tolist()
    wrong = source.labels is not None and not np.array_equal(index.labels, source.labels[numbers])
    images = [] if damaged else [_image_file(source, quality, position) for position in missing]
    left_out = sorted(str(image) for image in images if isinstance(image, DecodeError))
    if damaged or wrong or len(left_out) < len(missing):
        what = damaged[0] if damaged else f"{len(numbers)} samples, {len(missing)} missing, {len(left_out)} skipped"
        raise ValueError(f"the shards in {str(out)!r} do not hold what was written ({what}); remove them, write again")
    return replace(index, classes=source.classes), tuple(left_out)
