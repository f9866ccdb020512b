"""What several test modules share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # sums then have one order, and small products are quicker

SHARED = Path(__file__).resolve().parents[2] / "shared"
GOLDEN = Path(__file__).parent / "assets" / "golden"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real images that stands beside a development checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"needs real images: put CIFAR-10, COCO and photos into {SHARED}/data")
    return SHARED


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    """Outputs of the authors' code; assets/golden/README.md says what they are."""
    return GOLDEN


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
