"""Measurements in processes of their own, which wait for their turn: allocators and settings of one touch no other.

A child reads a request a line from its input and answers with a line of JSON; while it waits it uses no core.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patchmix.train.allocator import TUNABLES, with_huge_pages

ROOT = Path(__file__).resolve().parents[1]


class Child:
    """A process that measures; `ask` sends it a request and returns its answer."""

    def __init__(self, **what: Any) -> None:
        environment = dict(os.environ)
        environment.pop(TUNABLES, None)
        if what.get("allocator") == "kept":
            environment = with_huge_pages(environment)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.child", json.dumps(what)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self.ready = self._read()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def seconds(self) -> float:
        return float(self.ask(do="step")["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a measuring process ended with code {self._process.wait()}; its error stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def children(**wanted: dict[str, Any]) -> Iterator[dict[str, Child]]:
    """All at once, so that they can be asked in turns."""
    started: dict[str, Child] = {}
    try:
        for name, what in wanted.items():
            started[name] = Child(**what)
        yield started
    finally:
        for child in started.values():
            child.close()
