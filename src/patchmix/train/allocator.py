"""Memory of CPU tensors: kept by the process and in large pages, which saves a page fault per 4 KB at every step."""

import ctypes
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4  # of glibc's mallopt(3)
TUNABLES, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
_FIRST_GLIBC = (2, 35)  # with HUGE_PAGES


def keep_freed_memory() -> bool:
    """Makes glibc reuse freed memory instead of returning it to the system; False where that is not possible.

    The process's size then stays at its peak.
    """
    return _mallopt({_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 2**28})


def return_freed_memory() -> bool:
    """Makes glibc return every tensor above 1 MB to the system at once; False where that is not possible.

    For runs that have to be small: by default glibc keeps up to twice as much, as holes between what is in use.
    """
    return _mallopt({_MMAP_MAX: 2**16, _MMAP_THRESHOLD: 2**20, _TRIM_THRESHOLD: 2**20, _TOP_PAD: 2**17})


def _mallopt(options: dict[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # None in another C library
    return mallopt is not None and all(mallopt(option, value) == 1 for option, value in options.items())


def restart_with_huge_pages() -> None:
    """Restarts this command, as the same process, with CPU tensors in pages of 2 MB; returns if that does not help.

    glibc reads the environment variable that asks for them only when a process starts.
    """
    if page_policy() == "madvise" and can_ask_for_huge_pages() and HUGE_PAGES not in os.environ.get(TUNABLES, ""):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], with_huge_pages(os.environ))


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process whose glibc asks for huge pages."""
    tunables = [environment[TUNABLES]] if environment.get(TUNABLES) else []
    return {**environment, TUNABLES: ":".join([*tunables, f"{HUGE_PAGES}=1"])}


def can_ask_for_huge_pages() -> bool:
    """Whether the allocator is a glibc that supports it."""
    library, version = platform.libc_ver()
    known = library == "glibc" and tuple(int(number) for number in version.split(".")[:2]) >= _FIRST_GLIBC
    return known and "malloc" not in os.environ.get("LD_PRELOAD", "")


def page_policy() -> str | None:
    """Linux's setting for huge pages: always, madvise (on request) or never."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return None
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else None
