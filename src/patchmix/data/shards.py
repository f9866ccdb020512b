"""Images in tar shards of the webdataset layout, by position: each is read at its offset, nothing is unpacked."""

import hashlib
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np

from patchmix.data import remote
from patchmix.data.contract import Groups, Labels
from patchmix.data.decode import DecodeError, Pixels, decode, size_of
from patchmix.data.shard_index import ShardIndex, cache_root, join, remember, remembered, scanned
from patchmix.progress import progress_bar

_OPEN_FILES = 16  # in each process
_MOST_SHARDS = 64  # in use at a time
_WINDOW_BYTES = 8 << 30  # of shards in use at a time; below the room that fetched ones have
_NAMED = 5  # damaged shards that get a line of their own


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
        """Drop everything that belongs to one process."""
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._files: OrderedDict[int, IO[bytes]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for own in ("_process", "_lock", "_files"):
            state.pop(own)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.release()

    def __len__(self) -> int:
        return len(self._index.offsets)

    def load(self, index: int) -> Pixels:
        return decode(self.encoded(index), self.key(index))

    def size(self, index: int) -> tuple[int, int]:
        """(height, width), from the header alone. Raises DecodeError."""
        return size_of(self.encoded(index), self.key(index))

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
        """Bytes of a shard; a few tries, because network file systems have their moments."""
        for attempt in range(remote.TRIES):
            try:
                # Held by this frame while it reads: another thread may drop it from the open ones.
                file = self._file(shard)
                return os.pread(file.fileno(), size, offset)
            except OSError as error:
                with self._lock:
                    self._files.pop(shard, None)
                if attempt == remote.TRIES - 1:
                    raise ValueError(
                        f"shard {self._shards[shard]!r} cannot be read ({error.strerror or error}; {remote.TRIES} "
                        "tries); bring it back, and go on with --resume auto"
                    ) from error
                time.sleep(remote.PAUSE * 2**attempt)
        raise AssertionError("the last try returns or raises")

    def _file(self, shard: int) -> IO[bytes]:
        if self._process != os.getpid():  # forked: the parent's lock may be held for ever
            self.release()
        with self._lock:
            if shard in self._files:
                self._files.move_to_end(shard)
                return self._files[shard]
        name = self._shards[shard]
        if remote.is_remote(name):
            file = remote.open_remote(name, int(self._index.shard_bytes[shard]))
        else:
            file = Path(name).open("rb", buffering=0)  # noqa: SIM115 (kept open)
        with self._lock:
            self._files[shard] = file
            while len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)  # closed when its last reader is done
        return file


def open_shards(shards: Sequence[str], *, name: str, progress: bool = True) -> ShardSource:
    """A source from shards that are local, or remote; scanned once where no index tells what is in them."""
    indices = _written_indices(shards)
    parts: list[ShardIndex | None] = []
    for shard in shards:
        index = indices.get(_index_beside(shard))
        parts.append(_part_of(index, shard))
    unknown = [number for number, part in enumerate(parts) if part is None]

    def find(number: int) -> None:
        parts[number] = _scan_once(shards[number])

    with ThreadPoolExecutor(8) as pool, progress_bar(f"indexing {name}", len(unknown), progress, "shards") as advance:
        for _ in pool.map(find, unknown):
            advance(1)
    index = join([part for part in parts if part is not None])
    _tell_losses(index, name)
    if not len(index.offsets):
        raise ValueError(f"no images in the {len(shards)} shards of {name}; members such as 0001.jpg are taken")
    return ShardSource(shards, index, name=name)


def _base(shard: str) -> str:
    return shard.partition("?")[0].rpartition("/")[2] if "://" in shard else Path(shard).name


def _index_beside(shard: str) -> str:
    """Where `patchmix shards` would have written this shard's index; "" for what comes through a pipe."""
    if shard.startswith("pipe:"):
        return ""
    folder = shard[: len(shard.partition("?")[0]) - len(_base(shard))] if "://" in shard else f"{Path(shard).parent}/"
    stem = _base(shard).removesuffix(".tar").rstrip("0123456789").rstrip("-_")
    return f"{folder}{stem}-index.safetensors"


def _written_indices(shards: Sequence[str]) -> dict[str, ShardIndex]:
    """The indices that lie beside the shards, by their place."""
    found = {}
    for place in {_index_beside(shard) for shard in shards} - {""}:
        path, fetched = Path(place), False
        if remote.is_remote(place):
            path = cache_root() / "index" / f"{hashlib.sha256(place.encode()).hexdigest()[:32]}-{os.getpid()}"
            path.parent.mkdir(parents=True, exist_ok=True)
            fetched = remote.read_remote(place, path)
        try:
            if path.is_file():
                found[place] = ShardIndex.load(path)
        except ValueError as error:
            _warn(f"{place}: {error}; the shards are scanned instead")
        finally:
            if fetched:
                path.unlink(missing_ok=True)
    return found


def _part_of(index: ShardIndex | None, shard: str) -> ShardIndex | None:
    if index is None or _base(shard) not in index.shards:
        return None
    part = index.one(index.shards.index(_base(shard)))
    if not remote.is_remote(shard) and Path(shard).stat().st_size != int(part.shard_bytes[0]):
        _warn(f"{shard} is not the file that its index describes; it is scanned instead")
        return None
    return part


def _scan_once(shard: str) -> ShardIndex:
    """The index of one shard, from the last time or by reading its headers."""
    base = _base(shard)
    path = Path(shard)
    try:
        if not remote.is_remote(shard):
            path = path.resolve()
            status = path.stat()
            identity = f"{path}\0{status.st_size}\0{status.st_mtime_ns}"
        else:
            identity = shard
        index = remembered(identity)
        if index is None:
            with remote.open_remote(shard) if remote.is_remote(shard) else path.open("rb", buffering=0) as file:
                index = scanned(file, base)
            remember(identity, index)
        return index
    except OSError as error:
        raise ValueError(f"shard {shard!r} cannot be read ({error.strerror or error}); bring it back") from error


def _tell_losses(index: ShardIndex, name: str) -> None:
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
