"""`patchmix demo`: from generated images to an evaluated encoder and figures, in minutes, offline."""

import time
from pathlib import Path

from patchmix.evaluation import evaluate
from patchmix.recipes import start
from patchmix.report.curves import show_curves
from patchmix.report.figures import show_mix
from patchmix.report.page import report
from patchmix.run import run_config
from patchmix.settings import Demo, Evaluate, Report, ShowCurves, ShowMix
from patchmix.train.watch import Interrupted


def demo(settings: Demo) -> Path:
    """Pre-trains on `shapes`, compares kNN with raw pixels and with the same network untrained, draws and reports."""
    config = start("demo").replace(budget=settings.budget)
    out = settings.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    try:
        run = run_config(config, out, resume="auto")
    except Interrupted as error:
        error.args = (f"{error}; continue with patchmix demo --out {out} --budget {settings.budget}",)
        raise
    run.knn("shapes")
    evaluate(Evaluate((str(run.path),), ("shapes",), run.path / "evaluation", protocols=("knn",)))
    figures, patch_size = run.path / "figures", run.load().architecture.patch_size
    show_mix(ShowMix("shapes", figures / "mix.png", patch_size=patch_size, size=32))
    show_curves(ShowCurves((str(run.path),), figures / "curves.png"))
    report(Report((str(run.path),), images=600))
    return run.path
