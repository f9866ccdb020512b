"""Images in parquet files of the Hugging Face layout, read row group by row group, never as a whole."""

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from patchmix.data.contract import EncodedSource, Groups, Labels, Split
from patchmix.data.decode import DecodeError
from patchmix.data.shard_files import by_split, files_in, first_image

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class")
_CACHED_BYTES = 256 << 20  # of row groups, in each process that reads
_MOST_GROUPS = 64


def parquet_files(root: Path) -> dict[Split, list[str]]:
    """Parquet files with images by split; {} when there are none, but image files that they may describe."""
    if root.is_file():
        return {"train": [str(root)]} if root.suffix == ".parquet" else {}
    names = files_in(root, ".parquet")
    with_images = [name for name in names if _image_column(_open(Path(name)).schema_arrow)]
    if names and not with_images and first_image(root):
        return {}
    return by_split(with_images or names, str(root))


class ParquetSource(EncodedSource):
    """The rows of some parquet files, in the order of the files."""

    def __init__(self, files: Sequence[str | Path], *, name: str) -> None:
        self.name = name
        self._files = tuple(Path(file) for file in files)
        opened = [_open(file) for file in self._files]
        self._owners = [(file, group) for file, p in enumerate(opened) for group in range(p.num_row_groups)]
        groups = [opened[file].metadata.row_group(group) for file, group in self._owners]
        *starts, self._length = np.cumsum([0, *(group.num_rows for group in groups)]).tolist()
        if not self._length:
            raise ValueError(f"no rows in {', '.join(str(file) for file in self._files)!r}; give another file")
        self._file_starts = np.cumsum([0, *(p.metadata.num_rows for p in opened[:-1])])
        # Half of what is kept: while windows change, two of them are in use.
        window = _CACHED_BYTES * len(groups) // (2 * max(1, sum(group.total_byte_size for group in groups)))
        self.groups = Groups(np.array(starts), max(1, min(_MOST_GROUPS, window)))
        self._image_columns = [_image_column(p.schema_arrow) for p in opened]
        if None in self._image_columns:
            number = self._image_columns.index(None)
            raise ValueError(
                f"{str(self._files[number])!r} has the columns {', '.join(opened[number].schema_arrow.names)}; needs "
                "'image' or 'img' as binary, or as a struct with 'bytes', the Hugging Face image layout"
            )
        integers = [{field.name for field in p.schema_arrow if pa.types.is_integer(field.type)} for p in opened]
        label_column = next((column for column in LABEL_COLUMNS if all(column in names for names in integers)), None)
        self.classes = _class_names(opened[0].schema_arrow, label_column)
        self.labels = None if label_column is None else _read_labels(self._files, label_column)
        self.release()

    def release(self) -> None:
        """Drop everything that belongs to one process."""
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._groups: OrderedDict[int, Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_process", "_lock", "_groups")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.release()

    def __len__(self) -> int:
        return int(self._length)

    def key(self, index: int) -> str:
        file, _ = self._owners[self.groups.of(index)]
        return f"{self._files[file].name}#{index - self._file_starts[file]}"

    def fingerprint(self) -> str:
        digest = hashlib.sha256(b"parquet\0")
        for file in self._files:
            metadata = _open(file).metadata
            sizes = [metadata.row_group(g).total_byte_size for g in range(metadata.num_row_groups)]
            digest.update(f"{file.name}\0{metadata.num_rows}\0{file.stat().st_size}\0{sizes}\0".encode())
        return digest.hexdigest()[:32]

    def encoded(self, index: int) -> bytes:
        group = self.groups.of(index)
        try:
            value = self._column(group)[index - int(self.groups.starts[group])].as_py()
        except (pa.ArrowException, OSError) as error:  # a damaged row group
            raise DecodeError(self.key(index), " ".join(str(error).split())) from error
        if not value:
            raise DecodeError(self.key(index), "has no bytes")
        return bytes(value)

    def _column(self, group: int) -> Any:
        """The image bytes of a row group, through a small cache of the last ones used."""
        if self._process != os.getpid():  # forked: the parent's lock may be held forever
            self.release()
        with self._lock:
            if group in self._groups:
                self._groups.move_to_end(group)
                return self._groups[group]
            file, number = self._owners[group]
            # Opened again each time: a handle shared with a forked parent would share its position.
            table = _open(self._files[file]).read_row_group(number, [self._image_columns[file]], use_threads=False)
            self._groups[group] = table.flatten().column(0)  # of a struct, its bytes
            while len(self._groups) > 1 and sum(column.nbytes for column in self._groups.values()) > _CACHED_BYTES:
                self._groups.popitem(last=False)
            return self._groups[group]


def _read_labels(files: Sequence[Path], name: str) -> Labels | None:
    columns = [pq.read_table(file, columns=[name]).column(0) for file in files]
    for file, column in zip(files, columns, strict=True):
        if column.null_count:
            empty = f"column {name!r} of {str(file)!r} has {column.null_count} empty labels"
            raise ValueError(f"{empty}; fill or drop these rows")
    labels: Labels = np.concatenate([column.to_numpy() for column in columns]).astype(np.int64)
    return labels if labels.min() >= 0 else None  # -1 is Hugging Face's way to withhold a split's labels


def _open(file: Path) -> Any:
    try:
        return pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{str(file)!r} cannot be read as parquet ({reason}); give another file") from error


def _image_column(schema: Any) -> str | None:
    """The path, for reading, of the column with the encoded images."""
    for name in [column for column in IMAGE_COLUMNS if column in schema.names]:
        kind = schema.field(name).type
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            return f"{name}.bytes"
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return name
    return None


def _class_names(schema: Any, label_column: str | None) -> tuple[str, ...] | None:
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[label_column]["names"]
    except (KeyError, TypeError, ValueError):  # written by something else than Hugging Face's datasets
        return None
    return tuple(str(name) for name in names)
