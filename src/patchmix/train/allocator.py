"""Memory that is kept, in large pages: short-lived tensors otherwise cost a page fault per 4 KB, every step."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4  # of glibc's mallopt(3)


def keep_freed_memory() -> bool:
    """Asks glibc to reuse freed memory instead of returning it to the system; False where that can't be asked.

    Concerns tensors on the CPU only. The process's size stays at its peak instead of going up and down.
    """
    return _set(((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 2**28)))


def return_freed_memory() -> bool:
    """Asks glibc to give every tensor above 1 MB back to the system at once; False where that can't be asked.

    For runs that have to be small: by default glibc keeps up to twice as much, as holes between what is in use.
    """
    return _set(((_MMAP_MAX, 2**16), (_MMAP_THRESHOLD, 2**20), (_TRIM_THRESHOLD, 2**20), (_TOP_PAD, 2**17)))


def _set(options: Iterable[tuple[int, int]]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return all(mallopt(option, value) == 1 for option, value in options)


TUNABLES, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
_FIRST_GLIBC = (2, 35)  # that knows this setting


def restart_with_huge_pages() -> None:
    """Begins this command anew, as the same process, with tensors of the CPU in pages of 2 MB instead of 4 KB.

    glibc asks the system for them if a variable says so when a process begins, and only then. Returns where that is
    so already, or of no use.
    """
    if page_policy() == "madvise" and can_ask_for_huge_pages() and HUGE_PAGES not in os.environ.get(TUNABLES, ""):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], with_huge_pages(os.environ))


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process whose glibc asks for them."""
    tunables = [environment[TUNABLES]] if environment.get(TUNABLES) else []
    return {**environment, TUNABLES: ":".join([*tunables, f"{HUGE_PAGES}=1"])}


def can_ask_for_huge_pages() -> bool:
    """Whether the allocator is a glibc that knows how."""
    return _glibc_version() >= _FIRST_GLIBC and "malloc" not in os.environ.get("LD_PRELOAD", "")


def page_policy() -> str | None:
    """Linux's word for who gets huge pages: always, madvise (who asks) or never."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return None
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else None


def _glibc_version() -> tuple[int, ...]:
    """(0,) where the C library is another one."""
    try:
        name = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, OSError, ValueError):
        return (0,)
    return tuple(int(number) for number in re.findall(r"\d+", name)) or (0,)
