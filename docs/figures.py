"""Draws the pictures of README and docs: `make figures RUN=runs/fast PHOTOS=clothing`.

The photos must be free to show; those in the repository are of a clothing set under CC0. The comparison of PatchMix and
MoCo v3 is drawn, and printed as a table, from docs/results/runs.csv.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

from patchmix.report.ablation_table import over_seeds
from patchmix.report.curves import show_curves
from patchmix.report.figures import show_mix
from patchmix.report.style import COLORS, style, write
from patchmix.settings import ShowCurves, ShowMix

DOCS = Path(__file__).parent
IMAGES = DOCS / "images"
METHODS = {"fast": "PatchMix", "mocov3": "MoCo v3"}
VIEWS = {"flips": "flips only", "all views": "crops, flips, colors"}  # other groups of views keep their name


@style()
def show_views() -> None:
    """kNN after equal time, a mark for each seed, by what is known about augmentation."""
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    with (DOCS / "results" / "runs.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["group"] == "views":
                method, _, views = row["name"].partition(", ")
                found[VIEWS.get(views, views)][method][row["seed"]] = float(row["knn"])
    figure = Figure(figsize=(5.4, 0.6 + 0.5 * len(found)))
    axis = figure.subplots()
    for height, (views, knn) in enumerate(reversed(found.items())):
        seeds = sorted(knn["fast"].keys() & knn["mocov3"].keys())
        for color, method, shift in zip(COLORS, METHODS, (0.12, -0.12), strict=False):
            values = [knn[method][seed] for seed in seeds]
            axis.plot(values, [height + shift] * len(values), "o", color=color, markersize=4)
            axis.plot(statistics.mean(values), height + shift, "|", color=color, markersize=14)
        gain = over_seeds([knn["fast"][seed] - knn["mocov3"][seed] for seed in seeds])
        means = " | ".join(f"{statistics.mean(knn[method][seed] for seed in seeds):.1f}" for method in METHODS)
        print(f"| {views} | {means} | {gain.mean:+.1f} ± {gain.high - gain.mean:.1f} |")
    axis.set_yticks(range(len(found)), list(reversed(found)))
    axis.set_ylim(-0.5, len(found) - 0.5)
    axis.set_xlabel("kNN of CIFAR-10's test images in %, after 5 minutes on one core")
    for color, name in zip(COLORS, METHODS.values(), strict=False):
        axis.plot([], [], "o", color=color, label=name)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    write({IMAGES / "views.png": figure})


def main(run: Path, photos: str) -> None:
    show_views()
    show_mix(ShowMix(photos, IMAGES / "mix.png", num_mix=3, patch_size=16, size=96, images=6, seed=3))
    show_curves(ShowCurves((str(run),), IMAGES / "curves.png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
