"""What several test modules share: where the real data and the golden tensors are, if they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # sums then have one order, and small products are quicker

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real data and golden tensors that stands beside a development checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"no shared data beside the checkout ({SHARED.name}/ is missing)")
    return SHARED


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
