"""What several test modules share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("patchmix", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patchmix")  # no test fails because a machine is busy

torch.set_num_threads(1)  # sums then have one order, and small products are quicker

SHARED = Path(__file__).resolve().parents[2] / "shared"
GOLDEN = Path(__file__).parent / "assets" / "golden"
SMALL_RUN: dict[str, Any] = {
    "stem": "patch",  # which every format of export can describe
    "dim": 24,
    "depth": 4,
    "head_hidden": 16,
    "head_out": 8,
    "num_mix": 2,
    "monitor_bank": 32,
    "monitor_queries": 16,
    "log_every": 1,
    "monitor_every": 1,
    "mean": (0.4, 0.5, 0.6),  # not ImageNet's, so that a reader that ignores the run's own mean is noticed
}


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


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run `tiny`: two epochs of two steps on generated images. For reading; `own_run` is a copy to write to."""
    from patchmix import pretrain

    out = tmp_path_factory.mktemp("runs") / "tiny"
    pretrain(
        "shapes:64",
        out,
        recipe="demo",
        model="vit_tiny_patch8_32",
        epochs=2,
        batch_size=32,
        workers=0,
        device="cpu",
        **SMALL_RUN,
    )
    return out


@pytest.fixture
def own_run(trained_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_run, tmp_path / "tiny", symlinks=True))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's cache is neither read nor written."""
    patch = pytest.MonkeyPatch()
    patch.setenv("PATCHMIX_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
