"""Draws the pictures of README and docs: `make figures RUN=runs/fast PHOTOS=clothing`.

The photos must be free to show; those in the repository are of a clothing set under CC0. The comparisons of PatchMix
and MoCo v3 and the parts of `fast` are drawn from docs/results/runs.csv, some also printed as rows of a table; the
run's predictions are of its test images.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch.nn.functional import normalize

from patchmix.build import build_method
from patchmix.data.sources import open_source
from patchmix.evaluate.results import t_quantile
from patchmix.methods.patchmix import PatchMixMethod
from patchmix.report.ablation_table import over_seeds
from patchmix.report.curves import PANELS, curves_figure, read_history
from patchmix.report.figures import show_mix
from patchmix.report.gallery import crop_batch
from patchmix.report.style import COLORS, MATRIX, look, style, write
from patchmix.run import Run
from patchmix.settings import ShowMix
from patchmix.train.checkpoint import load_checkpoint

DOCS = Path(__file__).parent
IMAGES = DOCS / "images"
METHODS = {"fast": "PatchMix", "mocov3": "MoCo v3"}
VIEWS = {"flips": "flips only", "all views": "crops, flips, colors"}  # other groups of views keep their name
TIMES = {  # minutes on one core: group and name of the trainings, a mark for each seed
    "PatchMix, fast": {
        1.25: ("speed", "fast"),
        5: ("views", "fast, all views"),
        20: ("speed", "fast, 20 minutes"),
        60: ("hour", "fast"),
    },
    "MoCo v3, fast": {
        5: ("views", "mocov3, all views"),
        20: ("speed", "mocov3, 20 minutes"),
        60: ("hour", "mocov3"),
    },
    "SimCLR, fast": {20: ("speed", "simclr, 20 minutes")},
    "PatchMix, bf16, patch 4": {10: ("bf16", "fast, patch 4"), 60: ("long", "fast, patch 4")},
    "MoCo v3, bf16, patch 4": {10: ("bf16", "mocov3, patch 4"), 60: ("long", "mocov3, patch 4")},
    "PatchMix, paper": {20: ("speed", "paper")},
    "MoCo v3, paper": {20: ("speed", "mocov3, own settings")},
    "PatchMix, official": {20: ("speed", "official")},
}
EVALUATIONS = {  # of trainings on few images: their group in the log
    "knn": ("small", "kNN"),
    "linear": ("small", "linear"),
    "finetune": ("labels", "fine-tuned"),
}
SIZES = {  # in trainings of ten minutes in bf16
    "": "patch 8",
    ", smaller images first": "patch 8, smaller images first",
    ", patch 4": "patch 4, smaller images first",
}
TABLES = {"without": "fast", "methods": "patchmix", "mixes": "mix patchmix"}  # and with what the rows are compared
DETAILS = {
    "simclr": ", τ = 0.5",
    "swav": ", 300 prototypes, queue of 1,024, ε = 0.03",
    "dino": ", 2,048 prototypes",
    "ibot": ", 2,048 prototypes",
}


class Part(NamedTuple):
    """A row of the table of what each part of `fast` gives."""

    label: str
    knn: dict[str, float]  # by seed
    images: list[int]  # seen in the training
    tflops: list[float]  # that it took
    gains: list[float]  # kNN minus that of `fast` with the same seed


def logged(group: str, name: str | None = None) -> list[dict[str, str]]:
    """The trainings of a group in the log, or those of one name: its seeds."""
    with (DOCS / "results" / "runs.csv").open(newline="") as file:
        return [run for run in csv.DictReader(file) if run["group"] == group and name in (None, run["name"])]


@style()
def show_times() -> None:
    """kNN over the time of whole trainings."""
    figure = Figure(figsize=(7.0, 3.0))
    axis = figure.subplots()
    for index, (label, times) in enumerate(TIMES.items()):
        color, mark = look(index, ("o", "s"))
        knn = {minutes: [float(run["knn"]) for run in logged(*training)] for minutes, training in times.items()}
        axis.plot(list(knn), [statistics.mean(values) for values in knn.values()], color=color)
        marks = [(minutes, value) for minutes, values in knn.items() for value in values]
        axis.plot(*zip(*marks, strict=True), mark, color=color, markersize=4, label=label)
    axis.set_xscale("log")
    ticks = sorted({minutes for times in TIMES.values() for minutes in times})
    axis.set_xticks(ticks, [f"{minutes:g}" for minutes in ticks], minor=False)
    axis.set_xticks([], minor=True)
    axis.set(xlabel="minutes on one core", ylabel="kNN in %")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    write({IMAGES / "times.png": figure})


@style()
def show_views() -> None:
    """kNN after equal time, a mark for each seed, by what is known about augmentation."""
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for run in logged("views"):
        method, _, views = run["name"].partition(", ")
        found[VIEWS.get(views, views)][method][run["seed"]] = float(run["knn"])
    figure = Figure(figsize=(5.4, 0.6 + 0.5 * len(found)))
    axis = figure.subplots()
    for height, (views, knn) in enumerate(reversed(found.items())):
        seeds = sorted(knn["fast"].keys() & knn["mocov3"].keys())
        for color, method, shift in zip(COLORS, METHODS, (0.12, -0.12), strict=False):
            values = [knn[method][seed] for seed in seeds]
            axis.plot(values, [height + shift] * len(values), "o", color=color, markersize=4)
            axis.plot(statistics.mean(values), height + shift, "|", color=color, markersize=14)
        gain = with_interval([knn["fast"][seed] - knn["mocov3"][seed] for seed in seeds])
        means = " | ".join(f"{statistics.mean(knn[method][seed] for seed in seeds):.1f}" for method in METHODS)
        print(f"| {views} | {means} | {gain} |")
    axis.set_yticks(range(len(found)), list(reversed(found)))
    axis.set_ylim(-0.5, len(found) - 0.5)
    axis.set_xlabel("kNN of CIFAR-10's test images in %, after 5 minutes on one core")
    for color, name in zip(COLORS, METHODS.values(), strict=False):
        axis.plot([], [], "o", color=color, label=name)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    write({IMAGES / "views.png": figure})


def read_parts(group: str = "without", base: str = "fast") -> dict[str, Part]:
    """`fast` and its changes, or methods, or mixes, compared with `base`: the greatest loss first."""
    parts: dict[str, Part] = {}
    for run in logged(group):
        name = run["name"].replace("mocov3", "MoCo v3") if group.startswith("without") else run["name"]
        part = parts.setdefault(name, Part(label(group, name, run["settings"]), {}, [], [], []))
        part.knn[run["seed"]] = float(run["knn"])
        part.images.append(int(run["images"]))
        part.tflops.append(part.images[-1] * float(run["gflops_per_image"]) / 1000)
    for part in parts.values():
        part.gains.extend(knn - parts[base].knn[seed] for seed, knn in part.knn.items())
    return dict(sorted(parts.items(), key=lambda item: statistics.mean(item[1].gains)))


def label(group: str, name: str, settings: str) -> str:
    if group in ("methods", "mixes"):
        return f"`{name.removeprefix('mix ')}`{DETAILS.get(name, '')} | {settings.partition('--base-lr ')[2] or '2e-3'}"
    return name if "MoCo v3" in name or not settings else f"{name} (`{settings}`)"


def table_of_parts(group: str = "without", base: str = "fast") -> list[str]:
    """The rows of the table in docs/results.md."""
    parts, lines = read_parts(group, base), []
    others = [read_parts("without, momentum 0.99")] if group == "without" else []
    half = pooled_interval([part.gains for each in (parts, *others) for name, part in each.items() if name != base])
    for name, part in parts.items():
        cells = [part.label, len(part.knn), f"{statistics.mean(part.images):,.0f}"]
        cells += [f"{statistics.mean(part.tflops):.1f}", f"{statistics.mean(part.knn.values()):.1f}"]
        cells += ["" if name == base else with_interval(part.gains, half)]
        if group == "methods":
            cells += [f"{float(logged('flips, momentum 0.99', name)[0]['knn']):.1f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines if group == "without" else lines[::-1]


def pooled_interval(groups: list[list[float]]) -> float:
    """Half of the 95 % interval of one value; its spread is taken to be the same in all groups."""
    freedom = sum(len(values) - 1 for values in groups)
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in groups if len(values) > 1)
    return t_quantile(freedom) * (squares / freedom) ** 0.5


def table_of_few_images() -> list[str]:
    """Likewise, of trainings on few images: momentum, how they are evaluated, and the mean of each method's seeds."""
    rows = []
    for images in (1_000, 5_000, 20_000):
        for column, (group, label) in EVALUATIONS.items():
            for momentum, when in (("0.9", ""), ("0.99", ", momentum 0.99")):
                found: dict[str, dict[str, float]] = defaultdict(dict)
                for run in logged(group + when):
                    method, _, rest = run["name"].partition(", ")
                    if rest == f"{images} images" and run[column]:
                        found[method][run["seed"]] = float(run[column])
                seeds = sorted(found["fast"].keys() & found["mocov3"].keys())
                if not seeds:
                    continue
                pairs = [[found[method][seed] for seed in seeds] for method in ("fast", "mocov3")]
                gains = [fast - moco for fast, moco in zip(*pairs, strict=True)]
                knn = [
                    f"{statistics.mean(values):.1f}" if values else "–" for values in (*pairs, found["sdmp"].values())
                ]
                cells = [f"{images:,}", label, momentum, *knn, with_interval(gains), str(len(gains))]
                rows.append(f"| {' | '.join(cells)} |")
    return rows


def table_of_sizes() -> list[str]:
    """Likewise, of the trainings of ten minutes in bf16: images and TFLOPs of both methods, and kNN of two kinds."""
    rows = []
    for name, label in SIZES.items():
        for group, images in (("sizes", "training images"), ("bf16", "test images")):
            both = [{run["seed"]: run for run in logged(group, method + name)} for method in METHODS]
            seen = [int(runs["0"]["images"]) for runs in both]
            giga = [float(runs["0"]["gflops_per_image"]) for runs in both]
            tera = [f"{number * cost / 1000:.0f}" for number, cost in zip(seen, giga, strict=True)]
            cells = [label, "; ".join(f"{number:,}" for number in seen), "; ".join(tera)]
            knn = [[float(runs[seed]["knn"]) for seed in sorted(runs)] for runs in both]
            each = [f"{statistics.mean(values):.1f} ({', '.join(f'{v:.1f}' for v in values)})" for values in knn]
            gain = with_interval([fast - moco for fast, moco in zip(*knn, strict=True)])
            rows.append(f"| {' | '.join([*cells, images, *each, gain])} |")
    return rows


def with_interval(gains: list[float], half: float | None = None) -> str:
    """The mean difference ± half of its 95 % interval: of three seeds, unless `half` is that of one."""
    text = f"{round(statistics.mean(gains), 1) + 0.0:+.1f}".replace("-", "−")
    if half is None and len(gains) < 3:
        return text
    error = over_seeds(gains).high - statistics.mean(gains) if half is None else half / len(gains) ** 0.5
    return f"{text} ± {error:.1f}"


@style()
def show_parts() -> None:
    """What each change of `fast` gives, a mark for each seed."""
    parts = read_parts()
    for group, base in TABLES.items():
        print(*table_of_parts(group, base), sep="\n")
    print(*table_of_few_images(), *table_of_sizes(), sep="\n")
    names = [name for name in parts if name != "fast"]
    figure = Figure(figsize=(7.0, 0.8 + 0.2 * len(names)))
    axis = figure.subplots()
    for height, name in enumerate(names):
        gains = parts[name].gains
        axis.plot(gains, [height] * len(gains), "o", color=COLORS["MoCo v3" in name], markersize=4)
        axis.plot(statistics.mean(gains), height, "|", color=COLORS["MoCo v3" in name], markersize=10)
    axis.axvline(0.0, color="gray", linewidth=1)
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("kNN in %, difference from fast with the same seed")
    write({IMAGES / "parts.png": figure})


@style()
@torch.no_grad()
def show_predictions(run: Run) -> None:
    """Mix-to-origin of test images, without augmentation: the first ones' targets and predictions, and how often the
    most similar key is right over all of them."""
    config, batch = run.config, 128
    method = build_method(config).eval()
    assert isinstance(method, PatchMixMethod)
    method.load_state_dict(load_checkpoint(run.path / "checkpoints" / "last")["method"])
    source = open_source(config.data.path, "test", cache_bytes=0)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (config.views.mean, config.views.std))
    right = torch.zeros(2)
    for start in range(0, len(source) - batch + 1, batch):
        images = crop_batch(source, range(start, start + batch), method.encoder.patch_embed.img_size[0])
        images = (images.permute(0, 3, 1, 2) / 255 - mean) / std
        mixed = method.mix(images)
        assert mixed.groups is not None
        (z,) = method.keys(images)
        h, h_region = method.region_queries(mixed.images, mixed.groups)
        scores, regions = (normalize(x) @ normalize(z).T / method.options.temperature for x in (h, h_region))
        own = torch.cat([torch.arange(batch).roll(-m) for m in range(len(mixed.groups))])
        hits = mixed.share.gather(1, scores.argmax(dim=1, keepdim=True)) > 0, regions.argmax(dim=1) == own
        right += torch.stack([hit.float().mean() for hit in hits]) * batch
        if start == 0:
            shown = mixed.share[:11, :12], scores[:11, :12].softmax(dim=1)
    mixes, parts = (100 * right / (start + batch)).tolist()
    print(
        f"{batch} keys: an original is the most similar to its mix in {mixes:.1f} %, to its own part in {parts:.1f} %"
    )
    figure = Figure(figsize=(7.6, 3.6))
    for axis, title, values in zip(figure.subplots(1, 2), ("target", "predicted"), shown, strict=True):
        axis.imshow(values, cmap=MATRIX, vmin=0, vmax=0.6)
        axis.set(title=title, xlabel="original (key)", ylabel="mixed image (query)", xticks=range(12), yticks=range(11))
        axis.grid(False)
        for i, j in (values > 0.095).nonzero().tolist():
            value = values[i, j].item()
            color = "black" if value > 0.36 else "white"
            axis.text(j, i, f"{value:.1f}".removeprefix("0"), ha="center", va="center", fontsize=7, color=color)
    figure.tight_layout()
    write({IMAGES / "predictions.png": figure})


def show_losses(run: Path) -> None:
    """The part of `patchmix show curves` that is about the losses."""
    history = read_history(run)
    rows = [{key: value for key, value in row.items() if key not in PANELS} for row in history.rows]
    write({IMAGES / "curves.png": curves_figure([replace(history, rows=rows)])})


def main(run: Path, photos: str) -> None:
    show_views()
    show_times()
    show_parts()
    show_mix(ShowMix(photos, IMAGES / "mix.png", num_mix=3, patch_size=16, size=96, images=6, seed=3))
    show_losses(run)
    show_predictions(Run(run))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
