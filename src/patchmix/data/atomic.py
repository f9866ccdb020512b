"""Files that are there as a whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PARTIAL = ".part"  # how the name of an unfinished file ends


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write; it gets its name when everything is on the disk, and vanishes on an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
