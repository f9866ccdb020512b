"""The recipes beside the rows of the paper that they reproduce, and what they cost."""

from __future__ import annotations

import dataclasses

from rich.console import Console
from rich.table import Table

from patchmix.config import Config
from patchmix.recipes import PAPER_ROWS, RECIPES, PaperRow
from patchmix.study.flops import method_flops, sizes_of


def print_recipes(console: Console | None = None) -> None:
    """Every recipe × row of the paper, with its cost and the paper's accuracy."""
    console = console or Console()
    for name, recipe in RECIPES.items():
        summary = " ".join((recipe.__doc__ or "").split("\n\n")[0].split())
        console.print(f"[bold]{name}[/bold]: {summary}", soft_wrap=True)
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("data", "model", "epochs", "GF/image", "EFLOPs", "kNN", "linear", "tune"):
            table.add_column(column, justify="left" if column in ("data", "model") else "right", no_wrap=True)
        rows = PAPER_ROWS if name != "demo" else (PaperRow("shapes", 10_000, recipe().model.name, 12, 0, 0, 0),)
        for row in rows:
            each = step_flops_per_image(recipe(row.model, epochs=float(row.epochs))) or 0
            reported = (row.knn, row.linear, row.finetune) if name == "paper" else ()
            table.add_row(
                row.data,
                row.model,
                str(row.epochs),
                f"{each / 1e9:.1f}",
                f"{each * row.images * row.epochs / 1e18:.3g}",
                *(f"{value:.1f}" for value in reported),
            )
        console.print(table)
    console.print(
        "GF: 10⁹ FLOPs of training an image, forward and backward over all views, attention included; EFLOPs: 10¹⁸, "
        "the whole training. kNN, linear and tune: accuracies in % that the paper reports.",
        soft_wrap=True,
    )


def step_flops_per_image(config: Config) -> int | None:
    """FLOPs of a training step per image, with attention, forward and backward; None where no closed form is known."""
    model, views = config.model, config.views
    try:
        sizes = sizes_of(model.name, image_size=model.image_size, patch_size=model.patch_size)
        return method_flops(
            config.method.name,
            dataclasses.replace(
                sizes, dim=model.dim or sizes.dim, depth=model.depth or sizes.depth, in_chans=model.in_chans
            ),
            options=dataclasses.asdict(config.method.options),
            batch=1,
            attention=True,
            class_token=True,
            local_crops=views.local_crops,
            local_size=views.local_size,
        )
    except ValueError:  # another project's method or model
        return None
