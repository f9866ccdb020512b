"""Images in tar shards of the webdataset layout, by position: each is read at its offset, nothing is unpacked.

The index of some shards has for each sample its shard, offset, size, name and label. On disk it is a safetensors file:
int64 `offsets`, `sizes` and `labels` (N,), `name_ends` (N,) into the uint8 text `names`, and, under "index" in the
metadata, JSON with the shards' names, bytes and numbers of samples, and the classes. `patchmix shards` writes one per
split next to the shards, train-index.safetensors; without it, shards are scanned once.
"""

import hashlib
import itertools
import json
import mmap
import os
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from patchmix.data.contract import EncodedSource, Groups, Indices, Labels
from patchmix.data.decode import EXTENSIONS, DecodeError
from patchmix.data.shard_files import is_remote, open_remote, read_remote, retry
from patchmix.files import cache_folder, writing
from patchmix.progress import progress_bar, warn

_VERSION = 1  # of the index
_BLOCK = 512  # bytes of a tar's header
MAX_MEMBER = 256 << 20  # bytes of one image file
_MAX_LABEL = 1 << 20  # bytes of a .cls or .json
_LABEL_FIELDS = ("cls", "label", "class")  # of a .json
# What tarfile raises on damaged headers.
_DAMAGES = (tarfile.TarError, ValueError, LookupError, OverflowError, MemoryError, RecursionError)
MAPPED = 64 << 20  # bytes; a mapped file stays open, so there must not be thousands
_OPEN_FILES = 16  # in each process
_MOST_SHARDS = 64  # in use at a time
_WINDOW_BYTES = 8 << 30  # of shards in use at a time; less than the cache of remote ones holds
_NAMED = 5  # damaged shards that get a line of their own
_DTYPES = {"I64": np.int64, "U8": np.uint8}  # by their names in safetensors
_PER_SHARD = ("shard_bytes", "counts")
_PER_SAMPLE = ("offsets", "sizes", "labels")


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """N samples in S shards."""

    shards: tuple[str, ...]  # file names
    shard_bytes: Indices  # (S,)
    counts: Indices  # (S,) samples of each shard
    offsets: Indices  # (N,)
    sizes: Indices  # (N,)
    labels: Indices  # (N,), -1 where there is none
    name_ends: Indices  # (N,), in the text of all member names
    names: npt.NDArray[np.uint8]
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
        arrays = {name: getattr(self, name) for name in (*_PER_SAMPLE, "name_ends", "names")}
        with writing(path) as file:
            file.write(save(arrays, {"index": json.dumps(described)}))

    @classmethod
    def load(cls, place: str | Path) -> "ShardIndex":
        """Raises OSError where there is no such file, ValueError where it is no index, or a damaged one."""
        data = read_remote(str(place)) if is_remote(str(place)) else _bytes(Path(place))
        try:
            start = 8 + int.from_bytes(data[:8], "little")
            header = json.loads(data[8:start])
            described = json.loads(header.pop("__metadata__")["index"])
            arrays: dict[str, Any] = {}
            for name, entry in header.items():
                first, end = entry["data_offsets"]
                arrays[name] = np.frombuffer(memoryview(data)[start + first : start + end], _DTYPES[entry["dtype"]])
            index = cls(
                shards=tuple(map(str, described["shards"])),
                shard_bytes=np.array(described["bytes"], np.int64),
                counts=np.array(described["counts"], np.int64),
                classes=None if described["classes"] is None else tuple(map(str, described["classes"])),
                skipped=tuple(map(str, described["skipped"])),
                **arrays,
            )
            if described["version"] == _VERSION and index.is_sound():
                return index
            reason = ""
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            reason = f" ({' '.join(str(error).split())})"
        raise ValueError(f"{str(place)!r} is not an index of shards, or a damaged one{reason}; remove it")

    def is_sound(self) -> bool:
        """An index may come from anywhere: every sample must lie inside its shard, every name inside the names."""
        samples, shards = len(self.offsets), len(self.shards)
        sized = dict.fromkeys(_PER_SHARD, shards) | dict.fromkeys((*_PER_SAMPLE, "name_ends"), samples)
        arrays = [(getattr(self, name), length) for name, length in sized.items()]
        if any(array.dtype != np.int64 or array.shape != (length,) for array, length in arrays):
            return False
        if len(self.skipped) != shards or (self.counts < 0).any() or int(self.counts.sum()) != samples:
            return False
        if self.names.dtype != np.uint8 or len(self.names) != (self.name_ends[-1] if samples else 0):
            return False
        start = before = 0
        for count, room in zip(self.counts.tolist(), self.shard_bytes.tolist(), strict=True):
            offsets, sizes, ends = (a[start : start + count] for a in (self.offsets, self.sizes, self.name_ends))
            inside = (offsets >= _BLOCK) & (sizes >= 0) & (sizes <= MAX_MEMBER) & (offsets <= room - sizes)
            if room >= 1 << 60 or not inside.all() or (np.diff(ends, prepend=before) < 0).any():
                return False
            start, before = start + count, int(ends[-1]) if count else before
        return True

    def name(self, number: int) -> bytes:
        """Of a sample's image in its tar."""
        start = int(self.name_ends[number - 1]) if number else 0
        return self.names[start : int(self.name_ends[number])].tobytes()

    def part(self, number: int) -> "ShardIndex":
        """What is about one of the shards."""
        start = int(self.counts[:number].sum())
        end = start + int(self.counts[number])
        before, after = (int(self.name_ends[i - 1]) if i else 0 for i in (start, end))
        parts = {name: getattr(self, name)[number : number + 1] for name in ("shards", "skipped", *_PER_SHARD)}
        parts |= {name: getattr(self, name)[start:end] for name in _PER_SAMPLE}
        return replace(self, **parts, name_ends=self.name_ends[start:end] - before, names=self.names[before:after])


def _bytes(path: Path) -> Any:
    """A file's bytes; those of a large one are mapped, so that the processes of a machine share them."""
    if path.stat().st_size < MAPPED:
        return path.read_bytes()
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def join(parts: Sequence[ShardIndex]) -> ShardIndex:
    """One index for all, in the order given."""
    shifts = np.cumsum([0, *(len(part.names) for part in parts[:-1])]).tolist()
    return ShardIndex(
        shards=tuple(name for part in parts for name in part.shards),
        name_ends=np.concatenate([part.name_ends + shift for part, shift in zip(parts, shifts, strict=True)]),
        names=np.concatenate([part.names for part in parts]),
        classes=next((part.classes for part in parts if part.classes is not None), None),
        skipped=tuple(text for part in parts for text in part.skipped),
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in (*_PER_SHARD, *_PER_SAMPLE)},
    )


def scan(file: IO[bytes], name: str) -> ShardIndex:
    """The index of one shard, from its headers, up to its end or its first damage. Raises OSError.

    Members belong to one sample as long as their names agree up to the first dot after the last slash, as in
    webdataset: `a/0001.jpg` and `a/0001.cls`.
    """
    skipped: Counter[str] = Counter()
    samples: list[tuple[bytes, int, int, int]] = []  # name, offset, size, label
    for _, group in itertools.groupby(_members(file, skipped), lambda member: _split_name(member.name)[0]):
        members = {_split_name(member.name)[1]: member for member in group}
        images = [extension for extension in members if extension.endswith(EXTENSIONS)]
        if not images:
            continue
        image = members[min(images, key=lambda extension: extension not in EXTENSIONS)]  # 1.jpg before 1.left.jpg
        skipped["further image of a sample"] += len(images) - 1
        if image.size > MAX_MEMBER:
            skipped[f"larger than {MAX_MEMBER >> 20} MB"] += 1
            continue
        labels = (_read_label(file.fileno(), members[kind]) for kind in (".cls", ".json") if kind in members)
        label = next((label for label in labels if label >= 0), -1)
        samples.append((image.name.encode("utf-8", "backslashreplace"), image.offset_data, image.size, label))
    labeled = [sample for sample in samples if sample[3] >= 0]
    if labeled and (skipped["cut off"] or skipped["damaged header"]):
        skipped["label lost"] = len(samples) - len(labeled)
        samples = labeled
    numbers = np.array([sample[1:] for sample in samples], np.int64).reshape(-1, 3)
    return ShardIndex(
        shards=(name,),
        shard_bytes=np.array([os.fstat(file.fileno()).st_size], np.int64),
        counts=np.array([len(samples)], np.int64),
        **dict(zip(_PER_SAMPLE, np.ascontiguousarray(numbers.T), strict=True)),
        name_ends=np.cumsum([len(sample[0]) for sample in samples], dtype=np.int64),
        names=np.frombuffer(b"".join(sample[0] for sample in samples), np.uint8),
        skipped=(", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()) if count),),
    )


def _members(file: IO[bytes], skipped: Counter[str]) -> Iterator[tarfile.TarInfo]:
    """The plain files with safe names, in order; everything else is counted in `skipped`."""
    handle = file.fileno()
    end = os.fstat(handle).st_size
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="backslashreplace") as tar:
            while (header := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # or it would keep them all
                parts = header.name.replace("\\", "/").split("/")
                if header.size < 0 or header.offset_data + header.size > end:
                    damage = "cut off"
                    break
                if header.isdir():
                    continue
                if not header.isreg() or header.issparse():
                    skipped["link, device or sparse file"] += 1
                elif parts[0] == "" or ".." in parts or any(ord(letter) < 32 for letter in header.name):
                    skipped["unsafe name"] += 1
                elif not parts[-1].startswith("."):  # as in folders: hidden, such as ._0001.jpg, which a Mac adds
                    yield header
            else:
                tail = os.pread(handle, 2 * _BLOCK, tar.offset)
                if len(tail) >= _BLOCK and not tail.strip(b"\0"):
                    return  # two empty blocks: the end
                damage = "cut off" if len(tail) < _BLOCK else "damaged header"
    except _DAMAGES:
        damage = "damaged header"
    skipped[damage] += 1


def _split_name(name: str) -> tuple[str, str]:
    """ "a/0001.left.JPG" → "a/0001", ".left.jpg"."""
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    return folder + slash + stem, dot + extension.lower()


def _read_label(handle: int, member: tarfile.TarInfo) -> int:
    """The class in a .cls, or in a .json under cls, label or class; -1 where there is none."""
    if member.size > _MAX_LABEL:
        return -1
    try:
        value = json.loads(os.pread(handle, member.size, member.offset_data))
    except (ValueError, RecursionError):
        return -1
    if isinstance(value, dict):
        value = next((value[key] for key in _LABEL_FIELDS if key in value), None)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else -1


class ShardSource(EncodedSource):
    """The samples of some shards, in the order of the shards."""

    def __init__(self, shards: Sequence[str], index: ShardIndex, *, name: str) -> None:
        self.name, self.classes = name, index.classes
        self._shards, self._index = tuple(shards), index
        mean = max(1, int(index.shard_bytes.mean()))
        self.groups = Groups(np.cumsum(index.counts) - index.counts, max(1, min(_MOST_SHARDS, _WINDOW_BYTES // mean)))
        self.labels: Labels | None = index.labels if len(index.labels) and index.labels.min() >= 0 else None
        self.release()

    def release(self) -> None:
        """Close the shards; they are opened again when they are needed."""
        _kept_open.cache_clear()

    def __len__(self) -> int:
        return len(self._index.offsets)

    def key(self, index: int) -> str:
        shard = self._index.shards[self.groups.of(index)]
        return f"{shard}/{str(self._index.name(index), 'utf-8', 'backslashreplace')}"

    def fingerprint(self) -> str:
        kept = self._index
        digest = hashlib.sha256(b"shards\0" + "\0".join(kept.shards).encode("utf-8", "backslashreplace"))
        for array in (kept.counts, kept.shard_bytes, kept.offsets, kept.sizes, kept.labels, kept.names):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:32]

    def encoded(self, index: int) -> bytes:
        shard, size, offset = self.groups.of(index), int(self._index.sizes[index]), int(self._index.offsets[index])
        name = self._shards[shard]

        def read() -> bytes:
            try:
                file = _kept_open(name, int(self._index.shard_bytes[shard]))  # held: it must stay open meanwhile
                return os.pread(file.fileno(), size, offset)
            except OSError:
                self.release()
                raise

        remedy = "restore it, then repeat the call (pretrain and adapt: with --resume auto)"
        data = retry(read, f"shard {name!r} cannot be read", remedy)
        if len(data) < size:
            raise DecodeError(self.key(index), "its shard ends before it does")
        return data


def open_shards(shards: Sequence[str], *, name: str) -> ShardSource:
    """A source from local or remote shards; those that no index describes are scanned once."""
    places = _described(shards)
    unknown = [i for i, place in enumerate(places) if place is None]
    with ThreadPoolExecutor(8) as pool, progress_bar(f"indexing {name}", len(unknown), unit="shards") as advance:
        for i, part in zip(unknown, pool.map(_scan_once, [shards[i] for i in unknown]), strict=True):
            places[i] = part, 0
            advance(1)
    found = [place for place in places if place is not None]
    index = found[0][0]
    if found != [(index, number) for number in range(len(index.shards))]:  # else it stays mapped, as it may be large
        index = join([each.part(number) for each, number in found])
    _warn_of_losses(index, name)
    if not len(index.offsets):
        raise ValueError(f"no images in the {len(shards)} shards of {name}; expected members such as 0001.jpg")
    return ShardSource(shards, index, name=name)


def _open(shard: str, expected: int | None = None) -> IO[bytes]:
    return open_remote(shard, expected) if is_remote(shard) else Path(shard).open("rb", buffering=0)


# The last files used. One that is dropped is closed when its last reader is done. Forked processes may share them,
# because reading at an offset moves no position.
_kept_open = lru_cache(_OPEN_FILES)(_open)


def _split(shard: str) -> tuple[str, str]:
    """A shard's folder, with the slash, and its name, without a URL's query."""
    folder, slash, base = (shard.partition("?")[0] if is_remote(shard) else shard).rpartition("/")
    return folder + slash, base


def _described(shards: Sequence[str]) -> list[tuple[ShardIndex, int] | None]:
    """For each shard the index that `patchmix shards` wrote next to it, and its place there."""
    indices: dict[str, dict[str, tuple[ShardIndex, int]]] = {}
    found: list[tuple[ShardIndex, int] | None] = []
    for shard in shards:
        folder, base = _split(shard)
        place = f"{folder}{base.removesuffix('.tar').rstrip('0123456789').rstrip('-_')}-index.safetensors"
        if place not in indices:
            indices[place] = {}
            try:
                written = ShardIndex.load(place)
                indices[place] = {name: (written, i) for i, name in enumerate(written.shards)}
            except ValueError as error:
                warn(f"{error}; the shards are scanned instead")
            except FileNotFoundError:  # there is none
                pass
            except OSError as error:
                reason = error.strerror or error
                warn(f"{place} cannot be read ({reason}); the shards are scanned instead, remote ones fetched for that")
        known = indices[place].get(base)
        if known and not is_remote(shard) and Path(shard).stat().st_size != int(known[0].shard_bytes[known[1]]):
            warn(f"{shard} is not the file that its index describes; it is scanned instead")
            known = None
        found.append(known)
    return found


def _scan_once(shard: str) -> ShardIndex:
    """The index of one shard, from the last time or by reading its headers."""
    try:
        text = shard
        if not is_remote(shard):
            path = Path(shard).resolve()
            text = f"{path}\0{path.stat().st_size}\0{path.stat().st_mtime_ns}"
        kept = cache_folder("shards") / "index" / f"{hashlib.sha256(os.fsencode(text)).hexdigest()[:32]}.safetensors"
        try:
            return ShardIndex.load(kept)
        except (ValueError, OSError):  # not scanned before
            with _open(shard) as file:
                index = scan(file, _split(shard)[1])
    except OSError as error:
        raise ValueError(f"shard {shard!r} cannot be read ({error.strerror or error}); restore it") from error
    with suppress(OSError):  # a full or read-only home only means scanning again
        index.save(kept)
    return index


def _warn_of_losses(index: ShardIndex, name: str) -> None:
    damaged = [row for row in zip(index.shards, index.skipped, index.counts.tolist(), strict=True) if row[1]]
    for shard, text, left in damaged[:_NAMED]:
        warn(f"{shard}: skipped {text}; its other {left} samples are used")
    if len(damaged) > _NAMED:
        warn(f"{len(damaged) - _NAMED} more shards of {name} have members that were skipped")
    if len(index.labels) and index.labels.min() < 0 <= index.labels.max():
        missing = int((index.labels < 0).sum())
        warn(f"{missing} of {len(index.labels)} samples of {name} have no label; it counts as unlabeled")
