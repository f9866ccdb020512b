"""Images in tar shards of the webdataset layout, by position: each is read at its offset, nothing is unpacked.

The index of some shards has for each sample its shard, offset, size, name and label. On disk it is a safetensors file:
int64 `offsets`, `sizes` and `labels` (N,), `name_ends` (N,) into the uint8 text `names`, and, under "index" in the
metadata, JSON with the shards' names, bytes and numbers of samples, and the classes. `patchmix shards` writes one per
split beside the shards, train-index.safetensors; without it, shards are scanned once.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from patchmix.data import shard_files
from patchmix.data.contract import Groups, Indices, Labels
from patchmix.data.decode import DecodeError, Pixels, decode
from patchmix.data.folder import PathList
from patchmix.data.shard_files import BLOCK, MAX_MEMBER, TRIES, is_remote, open_remote, read_remote
from patchmix.files import cache_folder, writing
from patchmix.progress import progress_bar

_VERSION = 1  # of the index
_OPEN_FILES = 16  # in each process
_MOST_SHARDS = 64  # in use at a time
_WINDOW_BYTES = 8 << 30  # of shards in use at a time; less than the cache of remote ones holds
_NAMED = 5  # damaged shards that get a line of their own
_PER_SHARD = ("shard_bytes", "counts")
_PER_SAMPLE = ("offsets", "sizes", "labels")


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
        arrays = {name: getattr(self, name) for name in _PER_SAMPLE}
        arrays |= {"name_ends": self.names.ends, "names": self.names.text}
        with writing(path) as file:
            file.write(save(arrays, {"index": json.dumps(described)}))

    @classmethod
    def load(cls, path: Path) -> "ShardIndex":
        """Raises ValueError where the file is no index, or a damaged one."""
        return cls.parse(path.read_bytes(), str(path))

    @classmethod
    def parse(cls, data: bytes, name: str) -> "ShardIndex":
        """From the bytes of a file with this name; raises as `load` does."""
        try:
            arrays = load(data)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            described = json.loads(header["__metadata__"]["index"])
            index = cls(
                shards=tuple(map(str, described["shards"])),
                shard_bytes=np.array(described["bytes"], np.int64),
                counts=np.array(described["counts"], np.int64),
                names=PathList.packed(arrays["names"], arrays["name_ends"]),
                classes=None if described["classes"] is None else tuple(map(str, described["classes"])),
                skipped=tuple(map(str, described["skipped"])),
                **{name: arrays[name] for name in _PER_SAMPLE},
            )
            if described["version"] == _VERSION and index.is_sound():
                return index
            reason = ""
        except (SafetensorError, KeyError, TypeError, ValueError, OverflowError) as error:
            reason = f" ({' '.join(str(error).split())})"
        raise ValueError(f"{name!r} is not an index of shards, or a damaged one{reason}; remove it")

    def is_sound(self) -> bool:
        """An index may come from anywhere: every sample must lie inside its shard, every name inside the text."""
        samples, shards = len(self.offsets), len(self.shards)
        ends, text = self.names.ends, self.names.text
        sized = [(getattr(self, name), shards) for name in _PER_SHARD]
        sized += [(array, samples) for array in (self.offsets, self.sizes, self.labels, ends)]
        if any(array.dtype != np.int64 or array.shape != (length,) for array, length in sized):
            return False
        if text.dtype != np.uint8 or text.ndim != 1 or (np.diff(ends, prepend=0, append=len(text)) < 0).any():
            return False
        if len(self.skipped) != shards or (self.counts < 0).any() or int(self.counts.sum()) != samples:
            return False
        rooms = np.repeat(self.shard_bytes, self.counts)
        return bool(
            ((self.offsets >= BLOCK) & (self.offsets <= rooms) & (rooms < 1 << 60)).all()
            and ((self.sizes >= 0) & (self.sizes <= MAX_MEMBER) & (self.offsets + self.sizes <= rooms)).all()
        )

    def one(self, number: int) -> "ShardIndex":
        """The part that is about one shard."""
        stop = int(self.counts[: number + 1].sum())
        shard, samples = slice(number, number + 1), slice(stop - int(self.counts[number]), stop)
        parts: dict[str, Any] = {name: getattr(self, name)[shard] for name in ("shards", "skipped", *_PER_SHARD)}
        parts |= {name: getattr(self, name)[samples] for name in _PER_SAMPLE}
        return replace(self, names=self.names.part(samples.start, samples.stop), **parts)


def join(parts: Sequence[ShardIndex]) -> ShardIndex:
    """One index for all, in the order given."""
    return ShardIndex(
        shards=tuple(name for part in parts for name in part.shards),
        names=PathList.joined([part.names for part in parts]),
        classes=next((part.classes for part in parts if part.classes is not None), None),
        skipped=tuple(text for part in parts for text in part.skipped),
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in (*_PER_SHARD, *_PER_SAMPLE)},
    )


def scanned(file: IO[bytes], name: str) -> ShardIndex:
    """The index of one shard, from its headers. Raises OSError."""
    found = shard_files.scan(file)
    samples = found.samples
    return ShardIndex(
        shards=(name,),
        shard_bytes=np.array([os.fstat(file.fileno()).st_size], np.int64),
        counts=np.array([len(samples)], np.int64),
        offsets=np.array([sample.image.offset for sample in samples], np.int64),
        sizes=np.array([sample.image.size for sample in samples], np.int64),
        labels=np.array([sample.label for sample in samples], np.int64),
        names=PathList(sample.image.name.encode("utf-8", "backslashreplace") for sample in samples),
        skipped=(", ".join(f"{count} {reason}" for reason, count in sorted(found.skipped.items())),),
    )


class ShardSource:
    """The samples of some shards, in the order of the shards."""

    def __init__(self, shards: Sequence[str], index: ShardIndex, *, name: str) -> None:
        self.name = name
        self.classes = index.classes
        self._shards = tuple(shards)
        self._index = index
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(index.counts)[:-1]])
        mean = max(1, int(index.shard_bytes.mean()))
        self.groups = Groups(self._starts, max(1, min(_MOST_SHARDS, _WINDOW_BYTES // mean)))
        self.labels: Labels | None = index.labels if len(index.labels) and index.labels.min() >= 0 else None
        self.release()

    def release(self) -> None:
        """Close the shards; they are opened again when they are needed."""
        # A file that is dropped is closed when its last reader is done. Forked processes may share them, because
        # reading at an offset moves no position.
        self._open = lru_cache(_OPEN_FILES)(_open)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_open"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.release()

    def __len__(self) -> int:
        return len(self._index.offsets)

    def load(self, index: int) -> Pixels:
        return decode(self.encoded(index), self.key(index))

    def key(self, index: int) -> str:
        name = self._index.names[index].decode("utf-8", "backslashreplace")
        return f"{self._index.shards[self._shard_of(index)]}/{name}"

    def fingerprint(self) -> str:
        kept = self._index
        digest = hashlib.sha256(b"shards\0" + "\0".join(kept.shards).encode("utf-8", "backslashreplace"))
        for array in (kept.counts, kept.shard_bytes, kept.offsets, kept.sizes, kept.labels, kept.names.text):
            digest.update(array.tobytes())
        return digest.hexdigest()[:32]

    def encoded(self, index: int) -> bytes:
        """The image file's bytes, as they are. Raises DecodeError."""
        shard, size = self._shard_of(index), int(self._index.sizes[index])
        data = self._read(shard, size, int(self._index.offsets[index]))
        if len(data) < size:
            raise DecodeError(self.key(index), "its shard ends before it does")
        return data

    def _shard_of(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is outside {self.name}, which has {len(self)} samples")
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def _read(self, shard: int, size: int, offset: int) -> bytes:
        """Bytes of a shard; a few tries, because network file systems fail now and then."""
        for attempt in range(TRIES):
            try:
                file = self._open(self._shards[shard], int(self._index.shard_bytes[shard]))
                return os.pread(file.fileno(), size, offset)
            except OSError as error:
                self.release()
                if attempt == TRIES - 1:
                    raise ValueError(
                        f"shard {self._shards[shard]!r} cannot be read ({error.strerror or error}; {TRIES} tries); "
                        "restore it and continue with --resume auto"
                    ) from error
                time.sleep(shard_files.PAUSE * 2**attempt)
        raise AssertionError("the last try returns or raises")


def open_shards(shards: Sequence[str], *, name: str, progress: bool = True) -> ShardSource:
    """A source from local or remote shards; those that no index describes are scanned once."""
    indices = _written_indices(shards)
    parts = [_part_of(indices.get(_index_beside(shard)), shard) for shard in shards]
    unknown = [number for number, part in enumerate(parts) if part is None]

    def find(number: int) -> None:
        parts[number] = _scan_once(shards[number])

    with ThreadPoolExecutor(8) as pool, progress_bar(f"indexing {name}", len(unknown), progress, "shards") as advance:
        for _ in pool.map(find, unknown):
            advance(1)
    index = join([part for part in parts if part is not None])
    _warn_of_losses(index, name)
    if not len(index.offsets):
        raise ValueError(f"no images in the {len(shards)} shards of {name}; members such as 0001.jpg are taken")
    return ShardSource(shards, index, name=name)


def _open(shard: str, expected: int | None = None) -> IO[bytes]:
    return open_remote(shard, expected) if is_remote(shard) else Path(shard).open("rb", buffering=0)


def _split(shard: str) -> tuple[str, str]:
    """A shard's folder, with the slash, and its name, without a URL's query."""
    folder, slash, base = (shard.partition("?")[0] if is_remote(shard) else shard).rpartition("/")
    return folder + slash, base


def _index_beside(shard: str) -> str:
    """Where `patchmix shards` would have written this shard's index."""
    folder, base = _split(shard)
    return f"{folder}{base.removesuffix('.tar').rstrip('0123456789').rstrip('-_')}-index.safetensors"


def _written_indices(shards: Sequence[str]) -> dict[str, ShardIndex]:
    """The indices that lie beside the shards, by their place."""
    found = {}
    for place in {_index_beside(shard) for shard in shards}:
        try:
            data = read_remote(place) if is_remote(place) else Path(place).read_bytes()
            if data is not None:
                found[place] = ShardIndex.parse(data, place)
        except OSError:
            continue
        except ValueError as error:
            _warn(f"{error}; the shards are scanned instead")
    return found


def _part_of(index: ShardIndex | None, shard: str) -> ShardIndex | None:
    base = _split(shard)[1]
    if index is None or base not in index.shards:
        return None
    part = index.one(index.shards.index(base))
    if not is_remote(shard) and Path(shard).stat().st_size != int(part.shard_bytes[0]):
        _warn(f"{shard} is not the file that its index describes; it is scanned instead")
        return None
    return part


def _scan_once(shard: str) -> ShardIndex:
    """The index of one shard, from the last time or by reading its headers."""
    try:
        identity = shard
        if not is_remote(shard):
            path = Path(shard).resolve()
            identity = f"{path}\0{path.stat().st_size}\0{path.stat().st_mtime_ns}"
        kept = cache_folder("shards") / "index" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.safetensors"
        try:
            return ShardIndex.load(kept)
        except (ValueError, OSError):  # not scanned before
            with _open(shard) as file:
                index = scanned(file, _split(shard)[1])
    except OSError as error:
        raise ValueError(f"shard {shard!r} cannot be read ({error.strerror or error}); restore it") from error
    with suppress(OSError):  # a full or read-only home only means scanning again
        index.save(kept)
    return index


def _warn_of_losses(index: ShardIndex, name: str) -> None:
    damaged = [number for number, text in enumerate(index.skipped) if text]
    for number in damaged[:_NAMED]:
        left = int(index.counts[number])
        _warn(f"{index.shards[number]}: skipped {index.skipped[number]}; its other {left} samples are used")
    if len(damaged) > _NAMED:
        _warn(f"{len(damaged) - _NAMED} more shards of {name} have members that were skipped")
    missing = int((index.labels < 0).sum())
    if 0 < missing < len(index.labels):
        _warn(f"{missing} of {len(index.labels)} samples of {name} have no label; it counts as unlabeled")


def _warn(text: str) -> None:
    print(f"patchmix: warning: {' '.join(text.split())}", file=sys.stderr, flush=True)
