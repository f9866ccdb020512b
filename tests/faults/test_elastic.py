from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.elastic import ELASTIC, Row, finish, start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


@pytest.mark.slow
@pytest.mark.parametrize("inject", ELASTIC, ids=lambda f: f.__name__)
def test_the_group_goes_on(inject: Callable[..., Row], folder: Path) -> None:
    inject(folder)


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    output = finish(start(tmp_path / "run", 2, "--batch-size", "33"), code=1)
    assert "patchmix: batch size 33 must be a multiple of 2" in output
