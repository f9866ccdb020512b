"""`patchmix evaluate`: all cheap protocols, several encoders, several datasets, one table."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from patchmix.build import build_encoder, encoder_config
from patchmix.data.decode import pixel_channels
from patchmix.data.sources import open_source
from patchmix.device import resolve_device
from patchmix.evaluate.features import MOST_BYTES, Features
from patchmix.evaluate.knn import TEMPERATURE, knn_of
from patchmix.evaluate.labeled import Labeled, few_labels, open_labeled
from patchmix.evaluate.linear import linear_of
from patchmix.evaluate.masks import has_masks, open_masks
from patchmix.evaluate.protocol import Task, changed
from patchmix.evaluate.results import RAW_PIXELS, Result, known_result, read_results
from patchmix.evaluate.segment import segment_fast_of
from patchmix.files import replacing, run_lock, write_text
from patchmix.interop.backbone import Backbone
from patchmix.interop.loading import load_backbone
from patchmix.nn.vit import initialize_as_mocov3
from patchmix.report.ablation_table import markdown_table
from patchmix.report.gallery import uniquely_named
from patchmix.report.style import look, panel_grid, style
from patchmix.settings import Evaluate, Knn, Linear, Segment
from patchmix.study.compare import stored_config

TITLES = {"knn": "kNN", "linear": "linear", "few-shot": "{}-shot", "attentive": "attentive", "segment": "mIoU"}
UNTRAINED = "untrained"


@dataclass(frozen=True)
class Entry:
    """A row of the table: an encoder, or the pixels that `backbone` would see."""

    name: str
    backbone: Backbone
    digest: str
    runs: tuple[str, ...] = ()  # whose curves it belongs to
    step: int | None = None


@dataclass(frozen=True)
class Score:
    """A cell of the table."""

    data: str
    entry: Entry
    protocol: str  # a key of TITLES
    result: Result

    @property
    def percent(self) -> tuple[float, float, float]:
        """The headline and its 95 % interval, in %."""
        metric = self.result.main
        low, high = self.result.interval(metric)
        return 100 * self.result.metrics[metric], 100 * low, 100 * high


def evaluate(settings: Evaluate, console: Console | None = None) -> list[Score]:
    """Evaluates every encoder on every dataset, prints the table and writes evaluation.md and .csv to `out`.

    Each image passes an encoder once, for all protocols. Results are kept in `out`/results.jsonl; the same call adds
    what is missing. With `all_steps` there is a row for each checkpoint, and evaluation.png shows the curves.
    """
    if not settings.runs or not settings.data:
        raise ValueError("there is nothing to evaluate; give at least one run's folder, and its data by --data")
    console, device = console or Console(markup=False), resolve_device(settings.device)
    entries = uniquely_named(list(find_entries(settings)))
    channels = {entry.backbone.architecture.in_chans for entry in entries}
    if len({pixel_channels(count) for count in channels}) > 1:
        raise ValueError(
            f"the encoders take {' and '.join(map(str, sorted(channels)))} channels; evaluate them separately"
        )
    sets = {name: open_set(name, settings, min(channels)) for name in settings.data}
    for name, data in sets.items():
        if not data.keys() & set(settings.protocols or TITLES):
            wanted, fitting = ", ".join(settings.protocols), ", ".join(data)
            raise ValueError(f"--protocols {wanted} does not apply to {name}; choose from {fitting}, or leave it out")
    scores: list[Score] = []
    with run_lock(settings.out):
        for name, data in sets.items():
            for entry in entries:
                scores += evaluate_one(settings, entry, name, data, device, console)
        console.print(as_table(scores, settings))
        paths = write_files(scores, settings)
    console.print(f"wrote {', '.join(map(str, paths))}", soft_wrap=True)
    return scores


def find_entries(settings: Evaluate) -> Iterator[Entry]:
    """The encoders of all runs, then the untrained ones, then the pixels."""
    baselines: dict[Any, Entry] = {}
    for source in settings.runs:
        last = load_backbone(source, encoder=settings.encoder)
        files = sorted(Path(source).glob("checkpoints/step-*.pt")) if settings.all_steps else []
        if settings.all_steps and not files:
            raise ValueError(f"{source} has no checkpoints for --all-steps; give a run, made with --keep-checkpoints")
        loaded = [load_backbone(file, encoder=settings.encoder) for file in files]
        if all(each.digest() != last.digest() for each in loaded):
            loaded.append(last)
        for each in loaded:
            step = each.origin.get("step")
            name = f"{last.name}, step {step:,}" if settings.all_steps and step is not None else last.name
            yield Entry(name, each, each.digest(), (source,), step)
        random = untrained(source, last)
        key = random.digest(), random.architecture, random.mean, random.std
        before = baselines[key].runs if key in baselines else ()
        baselines[key] = Entry(UNTRAINED, random, key[0], (*before, source), 0)
    if settings.baselines:
        several = len(baselines) > 1
        for entry in baselines.values():
            yield replace(entry, name=f"{UNTRAINED} {entry.runs[0]}") if several else entry
        yield Entry(RAW_PIXELS, last, RAW_PIXELS)


def untrained(source: str, backbone: Backbone) -> Backbone:
    """A random network of the run's configuration; for other weights, one of their architecture."""
    config = stored_config(Path(source))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed if config else 0)
        if config:
            encoder = build_encoder(encoder_config(config))
        else:
            initialize_as_mocov3(encoder := backbone.architecture.create())
    return replace(backbone, weights=encoder.state_dict(), origin={}, name=UNTRAINED)


def open_set(name: str, settings: Evaluate, in_chans: int) -> dict[str, Labeled]:
    """Labeled images and images with masks, by protocol: a folder with masks may have classes below images/."""
    root, found = Path(name).expanduser(), dict[str, Labeled]()
    images = root / "images"
    if has_masks(root):
        found["segment"] = open_masks(root, ignored=settings.ignore_index, in_chans=in_chans)
        if set(settings.protocols) == {"segment"} or not images.is_dir():
            return found
        if open_source(images, "train", class_folders=True, cache_bytes=0).labels is None:
            return found
    labeled = open_labeled(images if found else name, in_chans=in_chans).with_test()
    if "few-shot" in (settings.protocols or TITLES):  # finds a class with too few images before the long part
        few_labels(labeled.train, shots=settings.shots, fraction=None, seed=settings.seed, draw=0)
    return found | {protocol: labeled for protocol in TITLES if protocol != "segment"}


def evaluate_one(
    settings: Evaluate, entry: Entry, name: str, data: dict[str, Labeled], device: torch.device, console: Console
) -> list[Score]:
    """The scores of one encoder on one dataset, by all protocols that apply; what is not known is evaluated."""
    known, pixels, memory = read_results(settings.out), entry.digest == RAW_PIXELS, dict[Path, Features]()
    pool: Any = "pixels" if pixels else "token"
    seed: dict[str, Any] = {"seed": settings.seed}
    few: dict[str, Any] = seed | {"shots": settings.shots, "draws": settings.draws}
    quick: dict[str, Any] = {"protocol": "fast", "workers": settings.workers}
    fast = partial(Linear, "", name, **quick)
    masks = Segment("", Path(name), ignore_index=settings.ignore_index, **seed, **quick)
    # What to run, the protocol's name in results, and settings that a known result must have.
    jobs: dict[str, tuple[Any, Callable[[Task], Result], str, dict[str, Any]]] = {
        "knn": (Knn("", name, pool=pool, workers=settings.workers), knn_of, "knn", {"temperature": TEMPERATURE}),
        "linear": (fast(pool=pool, **seed), linear_of, "linear-fast", seed),
        "few-shot": (fast(pool=pool, **few), linear_of, f"linear-fast@{settings.shots}-shot", few),
        "attentive": (fast(pool="attentive", **seed), linear_of, "attentive", seed),
        "segment": (masks, segment_fast_of, "segment-fast", seed | {"ignore_index": [*settings.ignore_index]}),
    }
    found: dict[str, Result] = {}
    missing: dict[str, Task] = {}
    wanted: dict[str, tuple[Any, list[str]]] = {}  # by fingerprint: protocols share images
    for protocol, (own, _, kept_as, needed) in jobs.items():
        labeled = data.get(protocol)
        tokens = protocol in ("attentive", "segment")  # which pixels don't have
        if labeled is None or protocol not in (settings.protocols or TITLES) or (pixels and tokens):
            continue
        task = Task(own, entry.backbone, entry.digest, labeled, device, settings.out, memory)
        extractor = task.extractor()
        sources: list[Any] = [getattr(each, "images", each) for each in (labeled.train, labeled.test)]  # without masks
        if tokens and max(map(extractor.patch_bytes, sources)) > MOST_BYTES:
            console.print(f"{name} has too many patch tokens for {protocol}; it is skipped", soft_wrap=True)
        elif result := known_result(
            [each for each in known if each.changed == changed(own)],  # the default k and epochs
            kept_as,
            labeled.fingerprint(),
            task.digest,
            extractor.record() | needed,
        ):
            found[protocol] = result
        else:
            missing[protocol] = task
            for source in sources:
                wanted.setdefault(source.fingerprint(), (source, []))[1].append(extractor.pool)
    for source, pools in wanted.values():
        next(iter(missing.values())).extractor().all_features(source, list(dict.fromkeys(pools)))
    for protocol, task in missing.items():
        console.print(f"{entry.name} on {name}: {title(protocol, settings)}", style="dim", soft_wrap=True)
        found[protocol] = jobs[protocol][1](task)
    return [Score(name, entry, each, found[each]) for each in TITLES if each in found]


def title(protocol: str, settings: Evaluate) -> str:
    return TITLES[protocol].format(settings.shots)


def cells(scores: Sequence[Score], settings: Evaluate) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table."""
    protocols = [name for name in TITLES if any(score.protocol == name for score in scores)]
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for score in scores:
        value, low, high = score.percent
        row = rows.setdefault((score.data, score.entry.name), {})
        row[score.protocol] = f"{value:.1f} ± {(high - low) / 2:.1f}"
    head = ["data", "encoder", *(title(name, settings) for name in protocols)]
    return head, [[*names, *(row.get(name, "–") for name in protocols)] for names, row in rows.items()]


def as_table(scores: Sequence[Score], settings: Evaluate) -> Table:
    head, rows = cells(scores, settings)
    table = Table(caption="accuracy or mIoU in % with 95 % interval", box=None, padding=(0, 2, 0, 0))
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i < 2 else "right", overflow="fold", no_wrap=i >= 2)
    for row in rows:
        table.add_row(*row)
    return table


def write_files(scores: Sequence[Score], settings: Evaluate) -> list[Path]:
    """evaluation.md and .csv, and .png where there are curves."""
    paths = [settings.out / f"evaluation{ending}" for ending in (".md", ".csv", ".png")]
    lines = ["# Evaluation", "", *markdown_table(*cells(scores, settings)), ""]
    lines += ["Top-1 accuracy or mIoU in %, with the half width of the 95 % interval."]
    lines += [f"{settings.shots}-shot: the fast linear protocol, mean of {settings.draws} draws."]
    write_text(paths[0], "\n".join(lines) + "\n")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["data", "encoder", "step", "protocol", "percent", "low", "high", "images", "weights"])
    for score in scores:
        entry, result, numbers = score.entry, score.result, [f"{value:.3f}" for value in score.percent]
        writer.writerow([score.data, entry.name, entry.step, result.protocol, *numbers, result.images, result.weights])
    write_text(paths[1], out.getvalue())
    if not settings.all_steps or not scores:
        return paths[:2]
    with replacing(paths[2]) as temporary:
        curves(scores, settings).savefig(temporary, format="png", bbox_inches="tight")
    return paths


@style()
def curves(scores: Sequence[Score], settings: Evaluate) -> Figure:
    """A panel for each dataset and protocol: the runs' checkpoints with intervals, and pixels as a line."""
    panels: dict[tuple[str, str], list[Score]] = {}
    for score in scores:
        panels.setdefault((score.data, score.protocol), []).append(score)
    figure, axes = panel_grid(len(panels))
    for axis, ((data, protocol), some) in zip(axes, panels.items(), strict=True):
        for i, run in enumerate(dict.fromkeys(settings.runs)):
            own = [s for s in some if run in s.entry.runs and s.entry.step is not None]
            if not own:  # its tokens were too many, or its step is not known
                continue
            points = sorted((s.entry.step, *s.percent) for s in own)
            steps, values, lows, highs = zip(*points, strict=True)
            axis.plot(steps, values, "o-", color=look(i)[0], markersize=3, label=run)
            axis.fill_between(steps, lows, highs, color=look(i)[0], alpha=0.15, linewidth=0)
        for score in some:
            if score.entry.name == RAW_PIXELS:
                axis.axhline(score.percent[0], color="gray", linestyle="--", linewidth=1, label=RAW_PIXELS)
        axis.set(title=f"{data}: {title(protocol, settings)} (%)", xlabel="step")
        axis.legend(fontsize=7)
    figure.tight_layout()
    return figure
