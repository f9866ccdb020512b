"""Memory that is kept: large short-lived tensors otherwise cost a page fault per 4 KB, every step."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of glibc's mallopt(3)


def keep_freed_memory() -> bool:
    """Asks glibc to reuse freed memory instead of returning it to the system; False where that can't be asked.

    Concerns tensors on the CPU only. The process's size stays at its peak instead of going up and down.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 2**28))
    return all(mallopt(option, value) == 1 for option, value in settings)
