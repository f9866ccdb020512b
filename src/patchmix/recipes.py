"""Recipes: a typed function each, from a model's name to a complete configuration.

`paper` takes the left column of docs/fidelity.md, `official` the right one, `fast` is for small images and hours of
one CPU, `demo` is `fast` on generated images.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchmix.config import (
    Config,
    DataConfig,
    MethodConfig,
    ModelConfig,
    OptimConfig,
    RuntimeConfig,
    TrainConfig,
    ViewsConfig,
    check_known,
    read_config,
)
from patchmix.methods.options import PatchMixOptions

_BASE_LR = {"tiny": 2e-3, "small": 5e-4, "base": 7.5e-4}  # for a batch of 256
_SMALL_IMAGES = 64  # up to here a model takes the paper's CIFAR settings, above the ImageNet ones


def paper(model: str = "vit_small_patch16_224", epochs: float | None = None) -> Config:
    """The paper's text and tables. ViT-S/16, ImageNet-1K, 300 epochs: kNN 73.3, linear 77.4, fine-tune 82.8 %;
    ViT-T/2, CIFAR-10, 800 epochs: kNN 92.9, linear 94.4, fine-tune 97.5 %.

    patchmix pretrain imagenet --out runs/s16 --recipe paper --model vit_small_patch16_224
    patchmix pretrain cifar10 --out runs/t2 --recipe paper --model vit_tiny_patch2_32
    """
    size, small_images = _size_of(model), _is_small(model)
    full = 800.0 if small_images else 300.0
    epochs = full if epochs is None else epochs
    warmup = 100.0 if small_images else 10.0
    decay = 0.5 if size == "tiny" else 1.0
    return Config(
        recipe="paper",
        data=DataConfig("cifar10" if small_images else "imagenet"),
        views=ViewsConfig(area=(0.1, 1.0) if small_images else (0.05, 1.0)),
        model=ModelConfig(name=model),
        method=MethodConfig("patchmix", PatchMixOptions(num_mix=3, temperature=0.2)),
        optim=OptimConfig(
            base_lr=_BASE_LR[size],
            warmup_epochs=min(warmup, epochs * warmup / full),  # a shorter run keeps the proportion
            weight_decay=0.04 * decay,
            weight_decay_end=0.4 * decay,
        ),
        train=TrainConfig(batch_size=512 if small_images else 1024, epochs=epochs),
    )


def official(model: str = "vit_small_patch16_224", epochs: float | None = None) -> Config:
    """What the authors' public code does, where it differs from the paper: M = 2, weights 1 : ½ : ½, smoothed targets,
    12 heads in ViT-S, multi-crop on ImageNet, no momentum encoder for ViT-T, μ by epoch. Their log of a run
    is not public, so no accuracy is claimed.

    patchmix pretrain imagenet --out runs/s16o --recipe official --model vit_small_patch16_224
    """
    config, size = paper(model, epochs), _size_of(model)
    if not _is_small(model):
        config = config.replace(area=(0.35, 1.0), local_crops=8, local_size=96, local_area=(0.05, 0.35))
    return config.replace(
        recipe="official",
        heads=12 if size == "small" else None,
        min_lr=1e-6,
        num_mix=2,
        weights=(1.0, 0.5, 0.5),
        normalize_mix_to_mix=True,
        label_smoothing=0.1,
        mixed_query=2,
        momentum_encoder=size != "tiny",
        momentum_stages=max(1, round(config.train.epochs)),
        momentum_update="before_keys",
    )


def fast(model: str = "vit_tiny_patch8_32", epochs: float | None = None) -> Config:
    """Short training on small images, for any --budget: PatchMix with one pass of keys, plain queries for a quarter of
    the batch, and a class token of each original in a mixed image as further query. CIFAR-10, one CPU core: in bf16 kNN
    60.6 % after 10 minutes (85 TFLOPs), with patch 4 and smaller images first 61.8 % after 10 (115) and 74.8 % after 60
    (688); in fp32 50.7 % after 5 minutes, 58.7 % after 20 (a slower core) and 66.5 % after 60.

    patchmix pretrain cifar10 --out runs/fast --recipe fast --budget 10min --workers 0
    patchmix pretrain cifar10 --out runs/long --recipe fast --budget 1h --patch-size 4 --image-sizes 0.5 0.75 1
    """
    epochs = 20.0 if epochs is None else epochs
    small: dict[str, Any] = {"dim": 128, "depth": 4, "heads": 4} if model == "vit_tiny_patch8_32" else {}
    return Config(
        recipe="fast",
        data=DataConfig("cifar10"),
        views=ViewsConfig(area=(0.4, 1.0), blur=(0.0, 0.0), solarize=(0.0, 0.0)),
        model=ModelConfig(name=model, stem="conv", drop_path=0.0, positions="sincos", **small),
        method=MethodConfig(
            "patchmix",
            PatchMixOptions(
                num_mix=2,
                weights=(0.5, 0.5, 0.0),
                region_weight=1.0,
                directions="shared",
                plain_share=0.25,
                momentum=0.9,
                head_hidden=512,
                head_out=128,
            ),
        ),
        optim=OptimConfig("muon", base_lr=2e-3, warmup_epochs=epochs / 10, weight_decay=0.05, weight_decay_end=0.05),
        train=TrainConfig(batch_size=128, epochs=epochs),
        runtime=RuntimeConfig(monitor_every=1.0),
    )


def demo(model: str = "vit_tiny_patch8_32", epochs: float | None = None) -> Config:
    """`fast` on generated images, a few minutes on two CPU cores; larger crops, less color jitter, patch projection
    and AdamW suit these images better.

    patchmix demo
    """
    config = fast(model, 12.0 if epochs is None else epochs)
    config = config.replace(
        data="shapes", area=(0.7, 1.0), jitter=0.3, gray=0.0, stem="patch", optim="adamw", base_lr=4e-3, batch_size=64
    )
    return config.replace(recipe="demo", workers=0, monitor_every=2.0, monitor_bank=4_000, monitor_queries=1_000)


def adapt(model: str = "same", epochs: float | None = None) -> Config:
    """Continues from good weights: heads first, then the encoder with a low learning rate that falls
    from layer to layer. docs/adapt.md has results.

    patchmix adapt timm:vit_small_patch14_dinov2 photos --out runs/adapted --image-size 224
    """
    epochs = 20.0 if epochs is None else epochs
    return Config(
        recipe="adapt",
        data=DataConfig("your images"),
        views=ViewsConfig(area=(0.2, 1.0), mean=(), std=()),
        model=ModelConfig(name=model),
        method=MethodConfig("patchmix", PatchMixOptions()),
        optim=OptimConfig(
            warmup_epochs=epochs / 20, weight_decay_end=0.04, encoder_lr=0.1, layer_decay=0.8, head_warmup=0.1
        ),
        train=TrainConfig(batch_size=256, epochs=epochs),
        runtime=RuntimeConfig(monitor_every=1.0),
    )


RECIPES: dict[str, Callable[..., Config]] = {each.__name__: each for each in (paper, official, fast, demo, adapt)}


def start(
    recipe: str = "paper",
    *,
    config: Path | None = None,
    data: str | None = None,
    model: str | None = None,
    method: str | None = None,
    epochs: float | None = None,
) -> Config:
    """What a run is configured from: a recipe, or a config.yaml, for this data, model, method and length."""
    if epochs is not None and epochs <= 0:  # from which the warm-up is computed
        raise ValueError(f"epochs is {epochs:g}; it must be greater than 0")
    if config is None:
        check_known(recipe, RECIPES, "recipe")
        given = {"model": model, "epochs": epochs}
        start = RECIPES[recipe](**{key: value for key, value in given.items() if value is not None})
    else:
        start = read_config(config)
        if model not in (None, start.model.name):  # whose name says its sizes
            sizes = dict.fromkeys(("image_size", "patch_size", "dim", "depth", "heads"))
            start = start.replace(model=model, **sizes)
        if epochs is not None:  # a shorter run keeps the proportion of warm-up
            warmup = start.optim.warmup_epochs * min(1.0, epochs / start.train.epochs)
            start = start.replace(epochs=epochs, warmup_epochs=warmup, budget=None)
    changed = {"data": data, "method": method}
    return start.replace(**{key: value for key, value in changed.items() if value is not None})


@dataclass(frozen=True)
class PaperRow:
    """A row of the paper's tables that a recipe reproduces; accuracies in %."""

    data: str
    images: int
    model: str
    epochs: int
    knn: float
    linear: float
    finetune: float

    @property
    def accuracies(self) -> dict[str, float]:
        """By protocol."""
        return {"knn": self.knn, "linear": self.linear, "finetune": self.finetune}


PAPER_ROWS = (
    PaperRow("imagenet", 1_281_167, "vit_small_patch16_224", 300, 73.3, 77.4, 82.8),
    PaperRow("imagenet", 1_281_167, "vit_small_patch16_224", 800, 74.3, 77.9, 83.4),
    PaperRow("imagenet", 1_281_167, "vit_base_patch16_224", 300, 76.2, 80.2, 84.1),
    PaperRow("cifar10", 50_000, "vit_tiny_patch2_32", 800, 92.9, 94.4, 97.5),
    PaperRow("cifar10", 50_000, "vit_tiny_patch2_32", 1600, 93.5, 94.8, 97.8),
    PaperRow("cifar10", 50_000, "vit_small_patch2_32", 800, 94.6, 96.0, 98.1),
    PaperRow("cifar10", 50_000, "vit_small_patch2_32", 1600, 95.1, 96.4, 98.2),
    PaperRow("cifar10", 50_000, "vit_base_patch2_32", 800, 95.8, 96.6, 98.3),
    PaperRow("cifar100", 50_000, "vit_tiny_patch2_32", 800, 68.8, 74.7, 84.9),
    PaperRow("cifar100", 50_000, "vit_tiny_patch2_32", 1600, 70.1, 76.0, 84.9),
    PaperRow("cifar100", 50_000, "vit_small_patch2_32", 800, 75.4, 78.7, 86.0),
    PaperRow("cifar100", 50_000, "vit_small_patch2_32", 1600, 74.6, 78.9, 86.1),
    PaperRow("cifar100", 50_000, "vit_base_patch2_32", 800, 75.7, 79.7, 86.0),
)


# 10⁹ FLOPs of training per image, forward and backward over all views, with attention. A test computes them again; here
# they are stored, because computing them takes torch and seconds.
GFLOPS = {
    "paper": {
        "vit_small_patch16_224": 77.4113,
        "vit_base_patch16_224": 294.6612,
        "vit_tiny_patch2_32": 28.2525,
        "vit_small_patch2_32": 101.875,
        "vit_base_patch2_32": 386.2682,
    },
    "official": {
        "vit_small_patch16_224": 151.933,
        "vit_base_patch16_224": 582.4438,
        "vit_tiny_patch2_32": 25.1161,
        "vit_small_patch2_32": 101.875,
        "vit_base_patch2_32": 386.2682,
    },
}


def recipe_rows(name: str) -> list[dict[str, Any]]:
    """The trainings of a recipe: the rows of the paper's tables, or the model that it is made for."""
    if name not in GFLOPS:
        config = RECIPES[name]()
        return [{"recipe": name, "data": config.data.path, "model": config.model.name, "epochs": config.train.epochs}]
    rows = []
    for row in PAPER_ROWS:
        gflops, reported = GFLOPS[name][row.model], row.accuracies if name == "paper" else {}
        cost = {"gflops_per_image": gflops, "exaflops": gflops * row.images * row.epochs / 1e9}
        rows.append({"recipe": name, "data": row.data, "model": row.model, "epochs": row.epochs, **cost, **reported})
    return rows


def recipes(settings: object) -> list[dict[str, Any]]:
    """Prints every recipe with its trainings, their cost and the paper's accuracies."""
    from rich.console import Console
    from rich.table import Table

    console, printed = Console(), []
    for name, recipe in RECIPES.items():
        summary = " ".join((recipe.__doc__ or "").split("\n\n")[0].split())
        console.print(f"[bold]{name}[/bold]: {summary}", soft_wrap=True)
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("data", "model", "epochs", "GF/image", "EFLOPs", "kNN", "linear", "tune"):
            table.add_column(column, justify="left" if column in ("data", "model") else "right", no_wrap=True)
        for row in recipe_rows(name):
            costs = [f"{row[key]:.4g}" for key in ("gflops_per_image", "exaflops") if key in row]
            paper = [f"{row[key]:.1f}" for key in ("knn", "linear", "finetune") if key in row]
            table.add_row(row["data"], row["model"], f"{row['epochs']:g}", *costs, *paper)
            printed.append(row)
        console.print(table)
    console.print(
        "GF: 10⁹ FLOPs of training per image, forward and backward over all views, with attention; EFLOPs: 10¹⁸, of "
        "the whole training. kNN, linear and tune (fine-tuning): accuracies in % that the paper reports.",
        soft_wrap=True,
    )
    return printed


def _size_of(model: str) -> str:
    """Which of the paper's learning rates and decays a model takes: its own size's, or ViT-S's."""
    found = re.match(r"vit_(tiny|small|base)_", model)
    return found[1] if found else "small"


def _is_small(model: str) -> bool:
    found = re.search(r"_(\d+)$", model.split(".")[0])
    return found is not None and int(found[1]) <= _SMALL_IMAGES
