"""`patchmix demo`: the whole way from generated images to an evaluated encoder and figures, in minutes, offline."""

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from timm.models.vision_transformer import VisionTransformer

from patchmix import build
from patchmix.config import Config
from patchmix.data.sources import open_source
from patchmix.evaluate.knn import HEADLINE_K, knn
from patchmix.evaluate.monitor import raw_pixel_knn
from patchmix.evaluate.results import wilson
from patchmix.interop.backbone import Architecture, Backbone
from patchmix.recipes import start
from patchmix.report.curves import show_curves
from patchmix.report.figures import show_mix
from patchmix.report.page import report
from patchmix.run import run_config
from patchmix.settings import Demo, Knn, Report, ShowCurves, ShowMix


def demo(settings: Demo) -> Path:
    """Pre-trains on `shapes`, compares kNN with raw pixels and with the same network untrained, draws and reports."""
    config = start("demo").replace(budget=settings.budget)
    run = run_config(config, settings.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S"))
    trained = run.knn("shapes")
    untrained = knn(Knn("untrained", "shapes", cache=False), _untrained(config))
    train, test = open_source("shapes", "train"), open_source("shapes", "test")
    pixels = raw_pixel_knn(train, test)
    table = Table(title=f"kNN accuracy on {len(test):,} test images of shapes, ten classes (k = {HEADLINE_K})")
    table.add_column("features")
    table.add_column("accuracy", justify="right")
    table.add_column("95 % interval", justify="right")
    for name, value in (
        ("raw pixels", pixels),
        ("untrained encoder", untrained.top1),
        ("trained encoder", trained.top1),
    ):
        low, high = wilson(value, len(test))
        style = "bold" if name == "trained encoder" else None
        table.add_row(name, f"{100 * value:.1f} %", f"{100 * low:.1f} … {100 * high:.1f}", style=style)
    Console().print(table)
    figures, patch_size = run.path / "figures", run.load().architecture.patch_size
    show_mix(ShowMix("shapes", figures / "mix.png", patch_size=patch_size, size=32))
    show_curves(ShowCurves((str(run.path),), figures / "curves.png"))
    report(Report((str(run.path),), images=600))
    return run.path


def _untrained(config: Config) -> Backbone:
    """The encoder as the run began with it."""
    encoder = build.build_method(config).encoder
    assert isinstance(encoder, VisionTransformer)
    return Backbone(Architecture.of(config.model.name, encoder), dict(encoder.state_dict()))
