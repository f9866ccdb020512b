"""Which samples a tar shard holds and where their bytes are. Only headers and labels are read; nothing is unpacked.

Members belong to one sample as long as their names agree up to the first dot after the last slash, as in webdataset:
`a/0001.jpg` and `a/0001.cls`. A damaged header costs its member; reading goes on at the next header that is whole.
"""

import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, NamedTuple

from patchmix.data.decode import EXTENSIONS

BLOCK = 512
MAX_MEMBER = 256 << 20  # bytes of one image file
_MAX_NAME = 64 << 10  # bytes of an extended header
_MAX_LABEL = 1 << 20  # bytes of a .cls or .json
_LABEL_FIELDS = ("cls", "label", "class")  # of a .json
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)


class Member(NamedTuple):
    """A plain file inside a tar."""

    name: str
    offset: int
    size: int


class Found(NamedTuple):
    """A sample: its image, and its label or -1."""

    image: Member
    label: int


@dataclass
class Scan:
    """What a shard holds, and what of it had to be left out: reason → how many."""

    samples: list[Found] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    damaged: bool = False


def scan(file: IO[bytes]) -> Scan:
    """Read the headers of a tar, whatever state it is in. Raises OSError where the file cannot be read."""
    result = Scan()
    prefix: str | None = None
    group: list[Member] = []
    for member in _members(file.fileno(), result):
        if _prefix(member.name) != prefix:
            _close_sample(file.fileno(), group, result)
            prefix, group = _prefix(member.name), []
        group.append(member)
    _close_sample(file.fileno(), group, result)
    if result.damaged and any(sample.label >= 0 for sample in result.samples):
        whole = [sample for sample in result.samples if sample.label >= 0]
        result.skipped["label lost"] += len(result.samples) - len(whole)
        result.samples = whole
    result.skipped += Counter()  # without zeros
    return result


def _prefix(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


def _extension(name: str) -> str:
    return "." + name.rpartition("/")[2].partition(".")[2].lower()


def _close_sample(handle: int, group: list[Member], result: Scan) -> None:
    images = [member for member in group if _extension(member.name).endswith(EXTENSIONS)]
    if not images:
        return
    # `0001.jpg` before `0001.left.jpg`.
    image = next((member for member in images if _extension(member.name) in EXTENSIONS), images[0])
    result.skipped["further image of a sample"] += len(images) - 1
    if image.size > MAX_MEMBER:
        result.skipped[f"larger than {MAX_MEMBER >> 20} MB"] += 1
        return
    label = -1
    for member in group:
        if _extension(member.name) in (".cls", ".json") and label < 0:
            label = _read_label(handle, member)
    result.samples.append(Found(image, label))


def _read_label(handle: int, member: Member) -> int:
    """The class in a .cls, or in a .json under cls, label or class; -1 where there is none."""
    if member.size > _MAX_LABEL:
        return -1
    try:
        value = json.loads(os.pread(handle, member.size, member.offset))
    except (ValueError, RecursionError):
        return -1
    if isinstance(value, dict):
        value = next((value[key] for key in _LABEL_FIELDS if key in value), None)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else -1


def _members(handle: int, result: Scan) -> Iterator[Member]:
    """The plain files with safe names, in order; everything else is counted in `result`."""
    end = os.fstat(handle).st_size
    position = 0
    name: str | None = None  # of the next member, from an extended header
    size: int | None = None
    sparse = False
    while position + BLOCK <= end:
        header = _header(os.pread(handle, BLOCK, position))
        if header is None:
            if not os.pread(handle, 2 * BLOCK, position).strip(b"\0"):
                return  # two empty blocks: the end
            result.damaged = True
            result.skipped["damaged header"] += 1
            position = _next_header(handle, position + BLOCK, end)
            name, size, sparse = None, None, False
            continue
        offset, length = position + BLOCK, header.size if size is None else size
        position = offset + -(-length // BLOCK) * BLOCK
        if offset + length > end:
            result.damaged = True
            result.skipped["cut off"] += 1
            return
        if header.type in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
            if length > _MAX_NAME:
                result.skipped["name too long"] += 1
            elif header.type == tarfile.GNUTYPE_LONGNAME:
                name = os.pread(handle, length, offset).rstrip(b"\0").decode("utf-8", "backslashreplace")
            else:
                records = _pax_records(os.pread(handle, length, offset))
                name = records.get("path", name)
                told = records.get("size", "")
                size = int(told) if told.isdecimal() and len(told) < 19 else None
                sparse = any(key.startswith("GNU.sparse") for key in records)
            continue
        if header.type in (tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE):
            continue
        member = Member(header.name if name is None else name, offset, length)
        reason = "link, device or sparse file" if sparse or header.type not in _REGULAR else _unsafe(member.name)
        name, size, sparse = None, None, False
        if reason is None:
            yield member
        elif header.type != tarfile.DIRTYPE:
            result.skipped[reason] += 1
    result.damaged = True
    result.skipped["end missing"] += 1


def _header(block: bytes) -> tarfile.TarInfo | None:
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "backslashreplace")
    except (tarfile.HeaderError, ValueError):
        return None
    return header if header.size >= 0 else None


def _next_header(handle: int, position: int, end: int) -> int:
    """Where the next block with a header's magic and a right checksum lies; `end` if nowhere."""
    step = 256 * BLOCK
    while position < end:
        piece = os.pread(handle, step, position)
        for start in range(0, len(piece), BLOCK):
            block = piece[start : start + BLOCK]
            if block[257:262] == b"ustar" and _header(block) is not None:
                return position + start
        position += step
    return end


def _pax_records(data: bytes) -> dict[str, str]:
    """ "30 path=…\\n" → {"path": …}; what is malformed is left out."""
    records = {}
    while data:
        length, space, _ = data.partition(b" ")
        if not space or not length.isdigit() or len(length) > 9 or not len(length) < int(length) <= len(data):
            break
        key, equals, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        if equals:
            records[key.decode("utf-8", "replace")] = value.decode("utf-8", "backslashreplace")
        data = data[int(length) :]
    return records


def _unsafe(name: str) -> str | None:
    parts = name.replace("\\", "/").split("/")
    if parts[0] == "" or ".." in parts or any(ord(letter) < 32 for letter in name):
        return "unsafe name"
    return None
