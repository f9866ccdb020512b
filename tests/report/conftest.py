"""A tiny real run with a kNN result, and a browser where Chromium is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, sync_playwright

from patchmix.evaluate.knn import knn
from patchmix.interop.backbone import Architecture, Backbone
from patchmix.nn.vit import create_encoder
from patchmix.settings import Knn

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def run(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained run, with a kNN result."""
    out = Path(shutil.copytree(trained_run, tmp_path_factory.mktemp("runs") / "tiny", symlinks=True))
    knn(Knn(str(out), "shapes:64", device="cpu", cache=False))
    return out


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder that was not trained, to compare with."""
    torch.manual_seed(1)
    encoder = create_encoder("vit_tiny_patch16_32", dim=48, depth=1, heads=4)
    folder = tmp_path_factory.mktemp("encoders") / "a rather long name of an encoder without training"
    folder.mkdir()
    file = Backbone(Architecture.of("vit_tiny_patch16_32", encoder), encoder.state_dict())
    file.save(folder / "encoder.safetensors")
    return folder


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium on this machine; install chromium to test the report in a browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
