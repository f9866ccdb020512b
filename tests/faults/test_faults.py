"""Every fault once; `make faults` injects each many times and prints the table of docs/distributed.md."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.injections import FAST, WITH_ROOT, Row


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.mark.parametrize("inject", FAST, ids=lambda f: f.__name__)
def test_nothing_is_lost(inject: Callable[..., Row], folder: Path) -> None:
    inject(folder)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system: run as root")
@pytest.mark.parametrize("inject", WITH_ROOT, ids=lambda f: f.__name__)
def test_nothing_is_lost_on_a_small_or_read_only_disk(inject: Callable[..., Row], folder: Path) -> None:
    inject(folder)
