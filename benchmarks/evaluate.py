"""`patchmix evaluate`: five protocols on the stored features of 10 000 images, 64 patches of 192 numbers each."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from benchmarks.result import Result
from patchmix.data.shapes import shapes_source
from patchmix.evaluation import evaluate
from patchmix.interop.backbone import Architecture, Backbone
from patchmix.nn.vit import create_encoder
from patchmix.settings import Evaluate
from patchmix.study.bench import Spread, seconds

IMAGES, CLASSES = {"train": 8_000, "test": 2_000}, 10


def run(quick: bool = False) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.environ["PATCHMIX_CACHE"] = str(root / "cache")
        for split, count in IMAGES.items():
            write(root / "data", split, count // 10 if quick else count)
        torch.manual_seed(0)
        encoder = create_encoder("vit_tiny_patch4_32", depth=1)
        shape = Architecture.of("vit_tiny_patch4_32", encoder)
        Backbone(shape, encoder.state_dict()).save(root / "encoder.safetensors")
        runs, data = (str(root / "encoder.safetensors"),), (str(root / "data"),)
        settings = Evaluate(runs, data, root / "out", baselines=False, device="cpu")
        quiet = Console(quiet=True)
        evaluate(settings, quiet)  # computes and stores the features
        shutil.rmtree(root / "out")
        time = seconds(lambda: evaluate(settings, quiet))
    del os.environ["PATCHMIX_CACHE"]
    return [
        Result(f"evaluate, five protocols on {sum(IMAGES.values()):,} images, seconds", Spread.of([time]), at_most=60)
    ]


def write(root: Path, split: str, count: int) -> None:
    """Shapes in class folders; the mask is what differs from the image's corner."""
    source = shapes_source(split, count)  # type: ignore[arg-type]
    assert source.labels is not None
    for i in range(count):
        pixels = source.load(i).astype(int)
        mask = (np.abs(pixels - pixels[0, 0]).sum(axis=2) > 60).astype(np.uint8)
        for kind, picture in (("images", pixels.astype(np.uint8)), ("masks", mask)):
            path = root / kind / split / f"class{source.labels[i] % CLASSES}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(path)
