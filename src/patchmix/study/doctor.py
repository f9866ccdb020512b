"""`patchmix doctor`: what would make runs faster on this machine, or what to change in a run, each with its remedy."""

import ctypes
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from patchmix.config import Config, read_config
from patchmix.device import cpp_compiler, has_bf16
from patchmix.evaluate.monitor import below_start, collapse_warning
from patchmix.launch import usable_cores
from patchmix.settings import Doctor
from patchmix.train.allocator import can_ask_for_huge_pages, page_policy
from patchmix.train.log import read_metrics

SIGNS = {"ok": "[green]✓[/]", "could be better": "[yellow]![/]", "missing": "[red]✗[/]", "bad": "[red]✗[/]"}
VERSIONS = ("patchmix-ssl", "torch", "torchvision", "timm", "numpy", "opencv-python-headless", "pillow")
LEAST_FREE_GB = 5.0
FEW_STEPS = 500
STUCK, SOLVED = 0.05, 0.95  # of the way from chance to floor
FALLEN = 0.1  # of that way, from the best so far
MOST_WAIT = 0.05  # of the time
SLOWER = 0.8  # of the speed at the start
LEAST_GAIN = 1.0  # points of kNN, LiDAR or effective rank
LEAST_EVALUATIONS = 4  # to fit a line to
MEASURES = {"knn": "kNN", "lidar": "LiDAR", "rank": "effective rank"}  # of quality, the best first
Verdict = Literal["ok", "could be better", "missing", "bad"]
Rows = Sequence[dict[str, Any]]  # of metrics.jsonl


@dataclass(frozen=True)
class Finding:
    """`remedy` is what to do where the verdict is not "ok"."""

    what: str
    found: str
    remedy: str = ""
    verdict: Verdict = "ok"


def check(fine: bool, what: str, found: str, remedy: str, *, otherwise: Verdict = "could be better") -> Finding:
    return Finding(what, found) if fine else Finding(what, found, remedy, otherwise)


def doctor(settings: Doctor) -> list[Finding]:
    """Prints what a run's speed or success may depend on, or how one run goes."""
    findings = examine(settings.runs) if settings.folder is None else examine_run(settings.folder)
    print_findings(findings)
    return findings


def examine(runs: Path) -> list[Finding]:
    return [*versions(), *devices(), *cores(), *memory(), *storage(runs), *compiling()]


def print_findings(findings: list[Finding], console: Console | None = None) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        remedy = f"\n[dim]{escape(finding.remedy)}[/]" if finding.remedy else ""
        table.add_row(SIGNS[finding.verdict], escape(finding.what), escape(finding.found) + remedy)
    (console or Console()).print(table)


def versions() -> Iterator[Finding]:
    found = [f"Python {platform.python_version()}"]
    for name in VERSIONS:
        with suppress(importlib.metadata.PackageNotFoundError):  # another build of OpenCV, or run from its source
            found.append(f"{name} {importlib.metadata.version(name)}")
    yield Finding("versions", ", ".join(found))


def devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        remedy = "runs use the CPU; for a GPU install its driver and a torch build with CUDA"
        yield check(False, "GPU", "none that torch sees", remedy)
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        yield Finding(f"GPU {number}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GB")
    fast = has_bf16(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    found = "in hardware; precision auto uses it" if fast else "not in hardware"
    yield check(fast, "bf16", found, "runs are fp32; GPUs since 2020 and CPUs with AVX-512 BF16 or AMX have it")


def cores() -> Iterator[Finding]:
    usable, threads, wanted = usable_cores(), torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    idle = f"OMP_NUM_THREADS={wanted} leaves cores idle; unset it, or use them as workers"
    remedy = f"threads wait for each other: set OMP_NUM_THREADS={usable}" if threads > usable else idle
    fine = threads == usable or (threads < usable and wanted is None)
    yield check(fine, "threads", f"{threads} threads on {usable} cores", remedy)
    if (load := os.getloadavg()[0]) > usable + 0.5:
        remedy = "other programs compete for the cores and slow runs down"
        yield check(False, "load", f"{load:.1f} on {usable} cores", remedy)
    found = "--workers 1 suits training on the CPU, where the step needs the cores itself"
    if torch.cuda.is_available():  # all cores but one feed the GPUs
        found = f"--workers {max(1, min(16, (usable - 1) // torch.cuda.device_count()))} suits this GPU"
    yield Finding("workers", found)


def memory() -> Iterator[Finding]:
    preloaded = os.environ.get("LD_PRELOAD", "")
    if "jemalloc" in preloaded or "tcmalloc" in preloaded:
        yield Finding("allocator", Path(preloaded.split(":")[0]).name)
    elif sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        yield Finding("allocator", "glibc; runs on the CPU keep freed memory (mallopt)")
    else:
        remedy = "freed memory goes back to the system at every step; preload jemalloc where there is one"
        yield check(False, "allocator", "the system's own", remedy)
    policy = page_policy()
    if policy is not None:
        fine = policy == "always" or (policy == "madvise" and can_ask_for_huge_pages())
        wanted = "madvise" if policy == "never" else "always"
        remedy = f"as root: echo {wanted} > /sys/kernel/mm/transparent_hugepage/enabled"
        note = "; commands that compute ask for them" if policy == "madvise" and fine else ""
        yield check(fine, "huge pages", policy + note, remedy)


def storage(runs: Path) -> Iterator[Finding]:
    existing = next(folder for folder in (runs, *runs.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free / 2**30
    if not os.access(existing, os.W_OK):
        remedy = "give --out a folder that you may write to"
        yield check(False, "runs", f"no permission to write in {existing}", remedy, otherwise="missing")
    else:
        remedy = "a checkpoint of ViT-B takes 1.6 GB; free some space, or give --out another disk"
        yield check(free >= LEAST_FREE_GB, "runs", f"{free:.1f} GB free in {existing}, writable", remedy)
    if Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm").free / 2**30
        remedy = "workers may run out of it: start the container with --shm-size=8g, or use --workers 0"
        yield check(shared >= 1.0, "shared memory", f"{shared:.1f} GB", remedy)


def compiling() -> Iterator[Finding]:
    found = "triton" if torch.cuda.is_available() else cpp_compiler()  # torch for CUDA brings triton
    text = f"possible with {found}" if found else "not possible"
    yield check(found is not None, "--compile", text, "if you want it: install g++")


def examine_run(folder: Path) -> list[Finding]:
    """How a run goes, the most serious first, and what to change first."""
    config, path = read_config(folder), folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder} has no metrics.jsonl; give the folder of a run that has begun to train")
    rows = read_metrics(path)
    steps, evaluations = ([row for row in rows if row["kind"] == kind] for kind in ("train", "monitor"))
    if not steps:
        return [Finding("training", f"nothing logged yet; the first line comes after {config.runtime.log_every} steps")]
    last = steps[-1]
    images = f"step {last['step']:,}, {last['step'] * config.train.batch_size:,} images"
    findings = [Finding("training", f"{100 * last['progress']:.0f} % done: {images}")]
    for part in (representation, start, contrasts, waiting, trend, speed):
        findings += part(config, steps, evaluations)
    worst = [finding for verdict in ("bad", "could be better") for finding in findings if finding.verdict == verdict]
    first = f"{worst[0].what}: {worst[0].remedy}" if worst else "nothing"
    return [*findings, Finding("change first", first)]


def representation(config: Config, steps: Rows, evaluations: Rows) -> Iterator[Finding]:
    if evaluations and evaluations[-1]["step"]:  # an untrained network looks collapsed
        values, names = evaluations[-1], {**MEASURES, "mean_cosine": "mean cosine"}
        found = ", ".join(f"{names[key]} {values[key]:.3g}" for key in names if values.get(key) is not None)
        collapsed = collapse_warning(values)
        yield check(collapsed is None, "features", collapsed or found, unstick(config, steps), otherwise="bad")


def start(config: Config, steps: Rows, evaluations: Rows) -> Iterator[Finding]:
    """Of a run from other weights: whether its features are as good as theirs."""
    compared = [row for row in evaluations if row.get("neighbors_kept") is not None]
    if len(compared) > 1:
        below = below_start({"start": compared[0], "last": compared[-1]})
        remedy = f"halve --base-lr (now {config.optim.base_lr:g}) or --encoder-lr (now {config.optim.encoder_lr:g})"
        yield check(below is None, "start", below or "the features are not below those", remedy, otherwise="bad")


def contrasts(config: Config, steps: Rows, evaluations: Rows) -> Iterator[Finding]:
    """How far each term of the loss is on its way from chance to floor, now and at best."""
    progress, options = steps[-1]["progress"], config.method.options
    for term in loss_terms(steps):
        ways = np.array([way(row, term) for row in steps if row.get(term) is not None])
        window = max(1, len(ways) // 10)
        means = np.convolve(ways, np.ones(window) / window, mode="valid")
        now, best = means[-1], means.max()
        found = f"{100 * now:.0f} % of the way from chance to floor after {100 * progress:.0f} % of the training"
        if progress < config.warmup + 0.1:
            yield Finding(term, f"{found}: too early to tell")
        elif now < STUCK:
            yield Finding(term, found, unstick(config, steps), "bad")
        elif best - now > FALLEN and not _staged(config):
            remedy = f"halve --base-lr (now {config.optim.base_lr:g}), or set --clip-grad 1"
            yield Finding(term, f"{found}, but was at {100 * best:.0f} %", remedy, "could be better")
        elif now > SOLVED and hasattr(options, "temperature"):
            remedy = f"it teaches little any more: lower --temperature (now {options.temperature:g}) or --area"
            yield Finding(term, found, remedy, "could be better")
        else:
            yield Finding(term, found)


def unstick(config: Config, steps: Rows) -> str:
    """What to change where nothing is learned: the likeliest cause that the run's settings have."""
    options, (smallest, largest) = config.method.options, config.views.area
    total = round(steps[-1]["step"] / max(steps[-1]["progress"], 1e-9))
    momentum = getattr(options, "momentum", 0.0) if getattr(options, "momentum_encoder", True) else 0.0
    least = 0.6 if config.method.name in ("dino", "ibot") else 0.3  # docs/methods.md says why
    if total < FEW_STEPS:
        return f"train longer: {total:,} steps in all are few"
    if config.method.name == "swav" and options.epsilon > 0.03:
        return f"set --epsilon 0.03 (now {options.epsilon:g})"
    if smallest < least:
        return f"take weaker crops, --area {least} 1.0 (now {smallest:g} {largest:g}), and weaker --jitter"
    if (1 - momentum) * total < 10:
        return f"set --momentum {1 - 20 / total:.2g} (now {momentum:g}: keys follow too slowly for {total:,} steps)"
    return f"set --base-lr {config.optim.base_lr / 2:g} (now {config.optim.base_lr:g}), or take a larger --batch-size"


def waiting(config: Config, steps: Rows, evaluations: Rows) -> Iterator[Finding]:
    waited = np.mean([row["data_wait"] for row in steps[len(steps) // 2 :]])
    remedy = f"raise --workers (now {config.runtime.workers}) or --cache-gb, or write shards (patchmix shards)"
    yield check(waited <= MOST_WAIT, "data", f"{100 * waited:.0f} % of the time spent waiting for images", remedy)


def trend(config: Config, steps: Rows, evaluations: Rows) -> Iterator[Finding]:
    """Fits a line to the later half of the evaluations over log2(images); its slope is the gain of a doubling."""
    key = next((key for key in MEASURES if any(row.get(key) is not None for row in evaluations)), "rank")
    factor, unit = (100, " points") if key == "knn" else (1, "")
    trained = [row for row in evaluations if row["step"] and row.get(key) is not None]
    later = trained[len(trained) // 2 :]
    if len(later) < LEAST_EVALUATIONS:
        every = steps[-1]["epoch"] / max(steps[-1]["progress"], 1e-9) / 20
        few = f"too few evaluations to see a trend ({len(trained)})"
        yield Finding("trend", f"{few}; --monitor-every {every:.3g} gives 20")
        return
    values = [factor * row[key] for row in later]
    (gain, _), covariance = np.polyfit(np.log2([row["step"] for row in later]), values, 1, cov=True)
    error = 2 * float(np.sqrt(covariance[0, 0]))
    found = f"{MEASURES[key]} {values[-1]:.1f}; twice the training would give about {gain:+.1f}{unit} (± {error:.1f})"
    flat = abs(gain) < max(error, LEAST_GAIN)
    if gain < 0:  # LiDAR and rank of features that get better may fall
        remedy = f"halve --base-lr (now {config.optim.base_lr:g}), or use an earlier checkpoint"
        yield check(flat or key != "knn", "trend", found, remedy)
    else:
        minutes, epochs = config.budget_minutes, config.train.epochs
        length = f"--epochs {2 * epochs:g}" if minutes is None else f"--budget {2 * minutes:g}min"
        yield check(flat, "trend", found, f"train longer: {length}")


def speed(config: Config, steps: Rows, evaluations: Rows) -> Iterator[Finding]:
    speeds = [row["images_per_second"] for row in steps][1:]  # the first has warm-up in it
    fifth = len(speeds) // 5
    if fifth and not _staged(config):
        before, after = np.median(speeds[:fifth]), np.median(speeds[-fifth:])
        found = f"{after:.3g} images per second, {before:.3g} at the start"
        remedy = "an image takes longer than before: look for other programs, heat, full memory; patchmix doctor"
        yield check(after >= SLOWER * before, "speed", found, remedy)


def loss_terms(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The loss's parts that have a chance level, in the order in which they were logged."""
    return list(dict.fromkeys(key.removesuffix("/chance") for row in rows for key in row if key.endswith("/chance")))


def way(row: dict[str, Any], term: str) -> float:
    """0 at chance, 1 at the floor; 0 where both are the same, as for a teacher that tells nothing apart."""
    chance, floor = row[f"{term}/chance"], row[f"{term}/floor"]
    return (chance - row[term]) / (chance - floor) if chance - floor > 1e-3 * abs(chance) else 0.0


def _staged(config: Config) -> bool:
    """Whether the training gets harder or slower by plan."""
    train, options = config.train, config.method.options
    stages = [getattr(options, "num_mix_stages", False), len(getattr(options, "mix_blocks", ())) > 1]
    return any(stages) or bool(train.image_sizes) or train.token_dropout[0] != train.token_dropout[1]
