"""The recipes beside the rows of the paper that they reproduce, and what they cost."""

from __future__ import annotations

import dataclasses

from rich.console import Console
from rich.table import Table

from patchmix.config import Config
from patchmix.recipes import PAPER_ROWS, RECIPES
from patchmix.study.flops import method_flops, sizes_of


def print_recipes(console: Console | None = None) -> None:
    """Every recipe × row of the paper, with its cost and the paper's accuracy."""
    console = console or Console()
    table = Table(title="Recipes", caption="EFLOPs: the whole training, attention's matrix products included")
    for column in (
        "recipe",
        "data",
        "model",
        "epochs",
        "batch",
        "lr",
        "GFLOPs / image",
        "EFLOPs",
        "paper: kNN",
        "linear",
        "tune",
    ):
        table.add_column(column, justify="left" if column in ("recipe", "data", "model") else "right")
    for name in ("paper", "official"):
        for row in PAPER_ROWS:
            config = RECIPES[name](row.model, epochs=float(row.epochs))
            each = step_flops_per_image(config) or 0
            total = each * row.images * row.epochs
            reported = (row.knn, row.linear, row.finetune) if name == "paper" else (None, None, None)
            table.add_row(
                name,
                row.data,
                row.model,
                str(row.epochs),
                str(config.train.batch_size),
                f"{config.lr:.1e}",
                f"{each / 1e9:.1f}",
                f"{total / 1e18:,.0f}",
                *("–" if value is None else f"{value:.1f}" for value in reported),
            )
        table.add_section()
    config = RECIPES["demo"]()
    each = step_flops_per_image(config) or 0
    table.add_row(
        "demo",
        "shapes",
        f"{config.model.name} (dim {config.model.dim}, depth {config.model.depth})",
        f"{config.train.epochs:g}",
        str(config.train.batch_size),
        f"{config.lr:.1e}",
        f"{each / 1e9:.2f}",
        f"{each * 10_000 * config.train.epochs / 1e18:.4f}",
        "–",
        "–",
        "–",
    )
    console.print(table)
    for name, recipe in RECIPES.items():
        summary = " ".join((recipe.__doc__ or "").split("\n\n")[0].split())
        console.print(f"[bold]{name}[/bold]: {summary}", soft_wrap=True)


def step_flops_per_image(config: Config) -> int | None:
    """FLOPs of a training step per image, with attention, forward and backward; None where no closed form is known."""
    model, views, options = config.model, config.views, config.method.options
    try:
        sizes = sizes_of(model.name, image_size=model.image_size, patch_size=model.patch_size)
    except ValueError:
        return None
    sizes = dataclasses.replace(
        sizes,
        dim=model.dim or sizes.dim,
        depth=model.depth or sizes.depth,
        head_hidden=options.get("head_hidden", sizes.head_hidden),
        head_out=options.get("head_out", sizes.head_out),
    )
    return method_flops(
        config.method.name,
        sizes,
        batch=1,
        attention=True,
        local_crops=views.local_crops,
        local_size=views.local_size,
    )
