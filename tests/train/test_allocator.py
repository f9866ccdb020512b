"""Commands that compute restart themselves once, as the same process, so that their tensors lie in huge pages."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from patchmix.train import allocator
from patchmix.train.allocator import HUGE_PAGES, TUNABLES, can_ask_for_huge_pages, page_policy, with_huge_pages

SCRIPT = """
import os, sys
from patchmix.train.allocator import restart_with_huge_pages
print("begins", os.getpid(), flush=True)
restart_with_huge_pages()
held = bytearray(64 << 20)
lines = open("/proc/self/smaps_rollup").read().splitlines()
huge = next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))
print("goes on", os.getpid(), sys.argv[1:], huge)
"""
on_request = pytest.mark.skipif(
    page_policy() != "madvise" or not can_ask_for_huge_pages(),
    reason="needs huge pages on request: glibc 2.35, and madvise in /sys/kernel/mm/transparent_hugepage/enabled",
)

HOLDS = """
import sys
from patchmix.train.allocator import keep_freed_memory, return_freed_memory
assert keep_freed_memory()
if sys.argv[1] == "returned":
    assert return_freed_memory()
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident()
blocks = [bytearray(8 << 20) for _ in range(16)]
del blocks[::2], blocks[:]
print(resident() - before)
"""


def run(**environment: str) -> list[str]:
    known = {name: value for name, value in os.environ.items() if name != TUNABLES}
    command = [sys.executable, "-c", SCRIPT, "two words", "--flag"]
    done = subprocess.run(command, env={**known, **environment}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@on_request
def test_a_command_begins_anew_once_with_its_arguments_and_gets_huge_pages() -> None:
    first, again, last = run()
    assert first == again and first.startswith("begins")  # the same process
    pid = first.removeprefix("begins ")
    assert last.startswith(f"goes on {pid} ['two words', '--flag']")
    assert int(last.split()[-1]) >= 32 << 10  # kB, of the 64 MB


@pytest.mark.skipif(not can_ask_for_huge_pages(), reason="needs glibc 2.35 or newer: run on a Linux that has it")
@pytest.mark.parametrize(("rule", "low", "high"), [("kept", 100 << 20, 1 << 40), ("returned", -(1 << 40), 16 << 20)])
def test_freed_memory_is_kept_or_returned(rule: str, low: int, high: int) -> None:
    done = subprocess.run([sys.executable, "-c", HOLDS, rule], capture_output=True, text=True, check=True)
    assert low < int(done.stdout) < high


@on_request
def test_what_the_user_has_set_stays() -> None:
    first, last = run(**{TUNABLES: f"{HUGE_PAGES}=0"})
    assert first.startswith("begins") and last.endswith(" 0")
    other = "glibc.malloc.check=0"
    assert len(run(**{TUNABLES: other})) == 3
    assert with_huge_pages({TUNABLES: other, "A": "b"}) == {TUNABLES: f"{other}:{HUGE_PAGES}=1", "A": "b"}


@pytest.mark.parametrize("policy", ["always", "never", None])
def test_nothing_begins_anew_where_it_is_of_no_use(policy: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("began anew"))
    monkeypatch.delenv(TUNABLES, raising=False)
    monkeypatch.setattr(allocator, "page_policy", lambda: policy)
    allocator.restart_with_huge_pages()
    monkeypatch.setattr(allocator, "page_policy", lambda: "madvise")
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    allocator.restart_with_huge_pages()


def test_the_command_asks_for_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from patchmix.cli import main

    calls: list[bool] = []
    monkeypatch.setattr(allocator, "restart_with_huge_pages", lambda: calls.append(True))
    monkeypatch.chdir(tmp_path)
    knn = ["knn", "nothing-here", "--data", "shapes:64"]
    for words, times in ((["knn", "--help"], 0), (knn, 1), (["doctor", "--help"], 1), (["--help"], 1)):
        monkeypatch.setattr(sys, "argv", ["patchmix", *words])
        with suppress(SystemExit):
            main()
        assert len(calls) == times
    with pytest.raises(SystemExit):
        main(knn)  # called by a program, which must not be restarted
    assert len(calls) == 1
