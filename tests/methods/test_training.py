"""Every method through the whole machinery: configuration, views, loop, monitor."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patchmix import build
from patchmix.config import Config
from patchmix.data.memory import InMemorySource, from_array
from patchmix.data.shapes import shapes_source
from patchmix.evaluate.features import extract
from patchmix.evaluate.knn import knn_predict
from patchmix.evaluate.labeled import Subset
from patchmix.evaluate.monitor import collapse_warning, health
from patchmix.evaluate.protocol import accuracy
from patchmix.methods.options import SimCLROptions
from patchmix.recipes import demo
from patchmix.run import run_config
from patchmix.train.log import RunLog, read_metrics
from patchmix.train.loop import train
from patchmix.train.optimizer import build_optimizer

CPU = torch.device("cpu")
STEPS = 400  # enough to tell shapes apart by their outlines
# Self-distillation has no negatives: views that share too little of what the untrained network sees end at chance.
GENTLE = {
    "area": (0.6, 1.0),
    "jitter": 0.2,
    "blur": (0, 0),
    "gray": 1.0,
    "hue": 0,
    "saturation": 0,
    "freeze_last_layer": 1.0,
}
ON_SHAPES = {"dino": GENTLE, "ibot": GENTLE}
# Small heads; a momentum that can follow in a few hundred steps.
SETTINGS: dict[str, dict[str, Any]] = {
    "patchmix": {"momentum": 0.97},
    "mocov3": {"momentum": 0.97, "frozen_patch_embed": False},
    "simclr": {},
    "byol": {"momentum": 0.97},
    "swav": {"prototypes": 100, "epsilon": 0.03},  # 0.05 ends at chance, as its authors warn
    "dino": {"momentum": 0.97, "head_bottleneck": 64},
    "ibot": {"momentum": 0.97, "head_bottleneck": 64},
    "sdmp": {"momentum": 0.97, "frozen_patch_embed": False},
    "regioncl": {"momentum": 0.97},
}


def configuration(name: str, *, epochs: float, **settings: Any) -> Config:
    heads = {"head_hidden": 256, "head_out": 256 if name in ("dino", "ibot") else 64}
    config = demo(epochs=epochs).replace(area=(0.4, 1.0))  # the demo's larger crops suit PatchMix, not SwAV
    return config.replace(method=name, **heads, **SETTINGS[name], **settings)


def run(config: Config, source: InMemorySource, folder: Path, evaluators: Any = ()) -> list[dict[str, Any]]:
    method = build.build_method(config).train()
    loader = build.build_loader(config, source, 32)
    log = RunLog(folder)
    try:
        train(
            method,
            loader,
            build.build_plan(config, method.encoder, loader.steps_per_epoch, CPU),
            optimizer=build_optimizer(method),
            device=CPU,
            prepare=build.build_prepare(config.views, 3),
            log=log,
            evaluators=evaluators,
        )
    finally:
        log.close()
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.parametrize("name", build.METHODS)
def test_a_few_steps_with_local_crops(name: str, tmp_path: Path) -> None:
    tiny = {"dim": 24, "depth": 1, "heads": 2, "batch_size": 16, "workers": 0}
    crops = {"local_crops": 2, "local_size": 16, "log_every": 1, "clip_grad": 3}
    rows = run(configuration(name, **tiny, **crops, epochs=2), shapes_source("train", 48), tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["loss"] == row["loss"] and abs(row["loss"]) < 100 for row in rows)
    assert len({row["loss"] for row in rows}) == 6


def test_another_method_starts_from_its_own_defaults() -> None:
    assert demo().replace(method="simclr", head_out=32).method.options == SimCLROptions(head_out=32)
    assert demo().replace(method="patchmix").method.options == demo().method.options


@pytest.mark.parametrize("name", build.METHODS)
def test_every_option_can_be_set_by_name(name: str) -> None:
    config = demo().replace(method=name)
    for key, default in dataclasses.asdict(config.method.options).items():
        assert config.replace(**{key: default}) == config
    with pytest.raises(ValueError, match="unknown setting 'head_hiden'; did you mean 'head_hidden'"):
        config.replace(head_hiden=1)


def textures(length: int, seed: int) -> InMemorySource:
    """Eight classes of gray waves and checks by their frequency; angle, phase and contrast are random.

    Unlike the outlines of `shapes`, these are learnt within two hundred steps.
    """
    rng = np.random.default_rng(seed)
    labels = np.arange(length) % 8
    y, x = np.mgrid[:32, :32] / 32.0
    images = np.empty((length, 32, 32, 3), np.uint8)
    for i, label in enumerate(labels):
        frequency = (1.5, 3.0, 5.0, 8.0)[label % 4] * rng.uniform(0.9, 1.1)
        angle, (phase, other) = rng.uniform(0, np.pi), rng.uniform(0, 2 * np.pi, 2)
        u, v = np.cos(angle) * x + np.sin(angle) * y, np.cos(angle) * y - np.sin(angle) * x
        wave = np.sin(2 * np.pi * frequency * u + phase)
        if label >= 4:
            wave *= np.sin(2 * np.pi * frequency * v + other)
        grey = 128 + rng.uniform(30, 100) * wave + rng.normal(0, 20, wave.shape)
        images[i] = grey.clip(0, 255)[..., None]
    classes = tuple(f"{kind} {k}" for kind in ("waves", "checks") for k in range(4))
    return from_array(
        images, labels.astype(np.int64), classes, name="textures", prefix=f"{seed}", fingerprint=f"{seed:032d}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", build.METHODS)
def test_beats_the_random_encoder_on_textures(name: str, tmp_path: Path) -> None:
    small = {"dim": 48, "depth": 2, "heads": 2, "batch_size": 64, "workers": 0}
    gray = {"area": (0.4, 1.0), "blur": (0, 0), "hue": 0, "saturation": 0}
    config = configuration(name, **small, **gray, base_lr=4e-3, epochs=16)
    beats_the_random_encoder(config, textures(800, seed=1), textures(400, seed=2), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", build.METHODS)
def test_beats_the_random_encoder_on_shapes(name: str, tmp_path: Path) -> None:
    config = configuration(name, **ON_SHAPES.get(name, {}), epochs=STEPS * 64 / 4000)
    beats_the_random_encoder(config, shapes_source("train", 4000), shapes_source("test", 1000), tmp_path)


@pytest.mark.slow
def test_the_demo_in_bf16_is_as_good_as_in_fp32(tmp_path: Path) -> None:
    knn = {}
    for precision in ("fp32", "bf16"):
        trained = run_config(demo().replace(precision=precision, monitor_every=0, device="cpu"), tmp_path / precision)
        losses = [row["loss"] for row in read_metrics(trained.path / "metrics.jsonl") if "loss" in row]
        assert np.isfinite(losses).all()
        knn[precision] = 100 * trained.knn("shapes", device="cpu").top1
    print(knn)
    assert knn["bf16"] == pytest.approx(knn["fp32"], abs=2)


def beats_the_random_encoder(config: Config, source: InMemorySource, unseen: InMemorySource, folder: Path) -> None:
    """And does not collapse."""
    evaluator = knn_and_health(config, Subset(source, len(source)), Subset(unseen, len(unseen)))
    rows = run(config, source, folder, [evaluator])
    before, *_, after = [row for row in rows if row["kind"] == "monitor"]
    print(f"{config.method.name}: kNN {before['knn']:.3f} → {after['knn']:.3f}, rank {after['rank']:.1f}")
    assert after["knn"] > before["knn"] + 0.03
    assert collapse_warning(after) is None


def knn_and_health(config: Config, bank: Subset, test: Subset) -> Any:
    def evaluate(encoder: torch.nn.Module) -> Any:
        settings = {"image_size": 32, "mean": config.views.mean, "std": config.views.std, "device": CPU, "workers": 0}
        keys, queries = (extract(encoder, part, **settings) for part in (bank, test))
        yield from health(keys.vectors)
        assert keys.labels is not None and queries.labels is not None
        predicted = knn_predict(keys.vectors, keys.labels, queries.vectors, ks=[20])[20]
        yield "knn", accuracy(predicted, queries.labels)

    return evaluate
