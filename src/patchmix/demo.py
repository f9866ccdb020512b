"""`patchmix demo`: the whole way from generated images to a judged encoder and pictures, in minutes, offline."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from patchmix import build
from patchmix.config import Config
from patchmix.data.sources import open_source
from patchmix.report.figures import curves_figure, mix_figure, targets_figure
from patchmix.report.style import save
from patchmix.run import configure, run_config
from patchmix.study.reporting import report_runs
from patchmix.train.log import read_metrics


def demo(out: Path, *, budget: str = "3min") -> Path:
    """Pre-trains on `shapes`, compares kNN with raw pixels and a random encoder, writes pictures to OUT/figures."""
    config = configure("shapes", recipe="demo", budget=budget)
    run = run_config(config, out)
    rows = read_metrics(run.path / "metrics.jsonl")
    values = [row["knn"] for row in rows if row["kind"] == "monitor"]
    pixels = build.raw_pixel_knn(
        open_source("shapes", "train"),
        open_source("shapes", "test"),
        bank=config.runtime.monitor_bank,
        asked=config.runtime.monitor_queries,
    )
    console = Console()
    table = Table(title="kNN accuracy on shapes, ten classes (k = 20)")
    table.add_column("features")
    table.add_column("accuracy", justify="right")
    for name, value in (
        ("chance", 0.1),
        ("raw pixels", pixels),
        ("random encoder", values[0]),
        ("trained encoder", values[-1]),
    ):
        table.add_row(name, f"{100 * value:.1f} %", style="bold" if name == "trained encoder" else None)
    console.print(table)
    for path in write_figures(run.path, config, references={"raw pixels": pixels, "random encoder": values[0]}):
        console.print(f"wrote {path}", soft_wrap=True)
    report_runs([run.path], images=600)
    return run.path


def write_figures(folder: Path, config: Config, references: dict[str, float]) -> list[Path]:
    figures = folder / "figures"
    source = open_source(config.data.path, "train")
    images = torch.stack([torch.from_numpy(source.load(i).copy()) for i in range(6)])
    num_mix = config.method.options["num_mix"]
    rows = read_metrics(folder / "metrics.jsonl")
    patch = build.build_encoder(config.model).patch_embed.patch_size[0]
    return [
        save(mix_figure(images, patch_size=patch, num_mix=num_mix), figures / "mix.png"),
        save(targets_figure(9, num_mix), figures / "targets.png"),
        save(curves_figure(rows, references=references), figures / "curves.png"),
    ]


def default_folder() -> Path:
    """runs/demo-DATE-TIME: a second demo does not meet the first."""
    return Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
