"""A tiny real run, judged by kNN, and a browser where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from browser import Browser, find_chromium

from patchmix.evaluate.knn import evaluate_knn
from patchmix.interop.backbone import Architecture, Backbone
from patchmix.interop.loading import load_backbone
from patchmix.nn.vit import create_encoder
from patchmix.run import pretrain

SETTINGS = [
    *("model.dim=24", "model.depth=2", "method.head_hidden=16", "method.head_out=8", "method.num_mix=2"),
    *("runtime.monitor_bank=32", "runtime.monitor_queries=16", "runtime.log_every=1", "runtime.monitor_every=1"),
]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv("PATCHMIX_CACHE", str(tmp_path_factory.mktemp("features")))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of two steps on generated images, with a kNN result."""
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
        settings=SETTINGS,
    )
    evaluate_knn(load_backbone(out), "shapes:64", device="cpu", out=out, cache=False)
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
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium on this machine; install chromium to test the report in a browser")
    profile = tmp_path_factory.mktemp("profile")
    browser = Browser(program, profile)
    yield browser
    browser.close()
    shutil.rmtree(profile, ignore_errors=True)
