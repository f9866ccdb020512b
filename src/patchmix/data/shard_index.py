"""The index of some shards: for each sample its shard, offset, size, name and label, as arrays.

On disk it is a safetensors file: int64 `offsets`, `sizes` and `labels` (N,), `name_ends` (N,) into the uint8 text
`names`, and, under "index" in the metadata, JSON with the shards' names, bytes and numbers of samples, and the classes.
`patchmix shards` writes one per split beside the shards, train-index.safetensors; without it, shards are scanned once.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from patchmix.data.contract import Indices
from patchmix.data.folder import PathList
from patchmix.data.tar import BLOCK, MAX_MEMBER, scan
from patchmix.files import writing

_VERSION = 1


@dataclass(frozen=True)
class ShardIndex:
    """N samples in S shards."""

    shards: tuple[str, ...]  # file names
    shard_bytes: Indices  # (S,)
    counts: Indices  # (S,) samples of each shard
    offsets: Indices  # (N,)
    sizes: Indices  # (N,)
    labels: Indices  # (N,), -1 where there is none
    names: PathList  # N member names
    classes: tuple[str, ...] | None = None
    skipped: tuple[str, ...] = ()  # per shard what was left out, "" where nothing

    def save(self, path: Path) -> None:
        described = {
            "version": _VERSION,
            "shards": self.shards,
            "bytes": self.shard_bytes.tolist(),
            "counts": self.counts.tolist(),
            "classes": self.classes,
            "skipped": self.skipped,
        }
        arrays: dict[str, npt.NDArray[Any]] = {
            "offsets": self.offsets,
            "sizes": self.sizes,
            "labels": self.labels,
            "name_ends": self.names.ends,
            "names": self.names.text,
        }
        with writing(path) as file:
            file.write(save(arrays, {"index": json.dumps(described)}))

    @classmethod
    def load(cls, path: Path) -> "ShardIndex":
        """Raises ValueError where the file is no index, or one that does not add up."""
        try:
            with safe_open(path, framework="numpy") as file:
                described = json.loads(file.metadata()["index"])
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            index = cls(
                shards=tuple(map(str, described["shards"])),
                shard_bytes=np.array(described["bytes"], np.int64),
                counts=np.array(described["counts"], np.int64),
                offsets=arrays["offsets"],
                sizes=arrays["sizes"],
                labels=arrays["labels"],
                names=PathList.packed(arrays["names"], arrays["name_ends"]),
                classes=None if described["classes"] is None else tuple(map(str, described["classes"])),
                skipped=tuple(map(str, described["skipped"])),
            )
            if described["version"] == _VERSION and index.is_sound():
                return index
            reason = ""
        except (SafetensorError, KeyError, TypeError, ValueError, OverflowError) as error:
            reason = f" ({' '.join(str(error).split())})"
        raise ValueError(f"{str(path)!r} is not an index of shards, or a damaged one{reason}; remove it")

    def is_sound(self) -> bool:
        """An index may come from anywhere: every sample must lie inside its shard, every name inside the text."""
        samples, shards = len(self.offsets), len(self.shards)
        ends, text = self.names.ends, self.names.text
        per_shard, per_sample = (self.shard_bytes, self.counts), (self.offsets, self.sizes, self.labels, ends)
        if any(array.dtype != np.int64 or array.shape != (shards,) for array in per_shard):
            return False
        if any(array.dtype != np.int64 or array.shape != (samples,) for array in per_sample):
            return False
        if len(self.skipped) != shards or (self.counts < 0).any() or int(self.counts.sum()) != samples:
            return False
        if (np.diff(ends, prepend=0) < 0).any() or text.dtype != np.uint8 or text.ndim != 1:
            return False
        rooms = np.repeat(self.shard_bytes, self.counts)
        return bool(
            (int(ends[-1]) if samples else 0) == len(text)
            and ((self.offsets >= BLOCK) & (self.offsets <= rooms) & (rooms < 1 << 60)).all()
            and ((self.sizes >= 0) & (self.sizes <= MAX_MEMBER) & (self.offsets + self.sizes <= rooms)).all()
        )

    def one(self, number: int) -> "ShardIndex":
        """The part that is about one shard."""
        stop = int(self.counts[: number + 1].sum())
        part = slice(stop - int(self.counts[number]), stop)
        return ShardIndex(
            shards=(self.shards[number],),
            shard_bytes=self.shard_bytes[number : number + 1],
            counts=self.counts[number : number + 1],
            offsets=self.offsets[part],
            sizes=self.sizes[part],
            labels=self.labels[part],
            names=self.names.part(part.start, part.stop),
            classes=self.classes,
            skipped=(self.skipped[number],),
        )


def join(parts: Sequence[ShardIndex]) -> ShardIndex:
    """One index for all, in the order given."""
    return ShardIndex(
        shards=tuple(name for part in parts for name in part.shards),
        shard_bytes=np.concatenate([part.shard_bytes for part in parts]),
        counts=np.concatenate([part.counts for part in parts]),
        offsets=np.concatenate([part.offsets for part in parts]),
        sizes=np.concatenate([part.sizes for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
        names=PathList.joined([part.names for part in parts]),
        classes=next((part.classes for part in parts if part.classes is not None), None),
        skipped=tuple(text for part in parts for text in part.skipped),
    )


def scanned(file: IO[bytes], name: str) -> ShardIndex:
    """The index of one shard, read off its headers. Raises OSError."""
    found = scan(file)
    samples = found.samples
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(found.skipped.items()))
    return ShardIndex(
        shards=(name,),
        shard_bytes=np.array([os.fstat(file.fileno()).st_size], np.int64),
        counts=np.array([len(samples)], np.int64),
        offsets=np.array([sample.image.offset for sample in samples], np.int64),
        sizes=np.array([sample.image.size for sample in samples], np.int64),
        labels=np.array([sample.label for sample in samples], np.int64),
        names=PathList(sample.image.name.encode("utf-8", "backslashreplace") for sample in samples),
        skipped=(reasons,),
    )


def cache_root() -> Path:
    """Where indices and fetched shards are kept; may be deleted at any time."""
    chosen = os.environ.get("PATCHMIX_CACHE")
    return Path(chosen or "~/.cache/patchmix").expanduser() / "shards"


def remembered(identity: str) -> ShardIndex | None:
    """The kept index of a shard that was scanned before; `identity` names its place and state."""
    try:
        return ShardIndex.load(_kept_at(identity))
    except (ValueError, OSError):
        return None


def remember(identity: str, index: ShardIndex) -> None:
    try:
        index.save(_kept_at(identity))
    except OSError:  # a full or read-only home only means scanning again
        return


def _kept_at(identity: str) -> Path:
    return cache_root() / "index" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.safetensors"
