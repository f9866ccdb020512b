"""Small encoders, small labeled sets, and a feature cache of one's own for every test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from patchmix.data.shapes import shapes_source
from patchmix.interop.backbone import Architecture, Backbone
from patchmix.nn.vit import create_encoder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing that a test stores may be found by another, or by the user."""
    monkeypatch.setenv("PATCHMIX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


def make_backbone(seed: int = 0, *, in_chans: int = 3, depth: int = 2) -> Backbone:
    """A ViT with random weights for 32 px, small enough for thousands of images a second."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = create_encoder("vit_tiny_patch8_32", dim=24, depth=depth, heads=3, in_chans=in_chans)
    return Backbone(Architecture.of("vit_tiny_patch8_32", encoder), encoder.state_dict())


@pytest.fixture
def backbone() -> Backbone:
    return make_backbone()


def write_image(path: Path, pixels: npt.NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def class_folder(tmp_path: Path) -> Path:
    """Three classes of two motifs, each twice, the twin a little darker: 12 PNG files, no test split."""
    shapes = shapes_source("train", 6)
    for i in range(6):
        pixels = shapes.load(i)
        write_image(tmp_path / "folder" / f"class{i % 3}" / f"{i}.png", pixels)
        write_image(tmp_path / "folder" / f"class{i % 3}" / f"{i}-twin.png", (pixels * 0.98).astype(np.uint8))
    return tmp_path / "folder"
