"""The trainings of docs/results.md, one after the other; the same call continues where it stopped.

    taskset -c 1 python docs/results/experiments.py cifar10 --out runs/experiments views speed without small hour

DATA is a folder with CIFAR-10 as train.parquet and test.parquet. Every training runs on one thread, is evaluated by kNN
and becomes a line of the log. It takes as many images as its settings process in its minutes; how many they process in
a second is measured first, in fp32, for a minute of CPU time, and kept in speeds.csv beside the log. So other programs
change no result, unless they run while speeds are measured (`--measure` does only that). CPUs that compute in bf16 need
half the time for as many images, and reach the same up to rounding. Groups `without`, `rates`, `methods`, `mixes`,
`flips` and `sizes` never see the test images: their kNN is of each training image by all others.
"""

import argparse
import csv
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

COLUMNS = ("group", "name", "seed", "budget", "images", "seconds", "gflops_per_image", "knn", "linear", "finetune",
           "settings")  # fmt: skip

# `patchmix`, whose --budget and speed are by CPU time of its process instead of the clock's.
PATCHMIX = """
import time, types
from patchmix.train import watch
watch.time = types.SimpleNamespace(monotonic=time.process_time, perf_counter=time.process_time)
from patchmix.cli import main
main()
"""

HEADS = "--head-hidden 512 --head-out 128"
PROTOTYPES = "--head-hidden 512 --head-out 2048"
METHODS = {  # with `fast`'s views, encoder, optimizer, batch and, in those that have one, momentum
    "patchmix": "",
    "mocov3": f"--method mocov3 --momentum 0.9 {HEADS} --no-frozen-patch-embed",
    "simclr": f"--method simclr --temperature 0.5 {HEADS}",
    "byol": f"--method byol --momentum 0.9 {HEADS}",
    "swav": f"--method swav --prototypes 300 --queue-length 1024 --epsilon 0.03 {HEADS}",
    "dino": f"--method dino --momentum 0.9 {PROTOTYPES}",
    "ibot": f"--method ibot --momentum 0.9 {PROTOTYPES}",
    "sdmp": f"--method sdmp --momentum 0.9 {HEADS} --no-frozen-patch-embed",
    "regioncl": f"--method regioncl --momentum 0.9 {HEADS}",
}
MOCO = METHODS["mocov3"]
ENCODER = "--model vit_tiny_patch8_32 --dim 128 --depth 4 --heads 4"

VIEWS = {  # in the order of what they tell
    "flips": "--area 1 1 --jitter 0 --gray 0",
    "all views": "",
    "crops and flips": "--jitter 0 --gray 0",
}

WITHOUT = {  # `fast` with a change
    "fast": "",
    "mocov3": MOCO,
    "without regions": "--region-weight 0",
    "without mix-to-origin": "--weights 1 0 0",
    "patch stem": "--stem patch",
    "AdamW": "--optim adamw",
    "all plain queries": "--plain-share 1",
    "learned positions": "--positions learned",
    "M = 3": "--num-mix 3",
    "patch 4": "--patch-size 4",
    "crops from a fifth": "--area 0.2 1",
    "small images first": "--image-sizes 24 32",
    "smaller images first": "--image-sizes 16 24 32",
    "patch 4, smaller images first": "--patch-size 4 --image-sizes 16 24 32",
    "mocov3, small images first": f"{MOCO} --image-sizes 24 32",
    "mimetic": "--initialization mimetic",
    "token dropout": "--token-dropout 0.5 0",
    "local crops": "--local-crops 2 --local-size 16 --local-area 0.1 0.4",
    "symmetric": "--directions symmetric",
    "directions of the paper": "--directions paper",
    "M = 1, 2, 3": "--num-mix 1 2 3 --num-mix-stages",
    "blocks first": "--mix-blocks 2 1",
    "ramp": "--mixed-ramp 0.3",
    "half of the mixes": "--mixed-share 0.5",
    "fixed positions": "--positions fixed-sincos",
    "mix-to-mix": "--weights 0.5 0.25 0.25 --normalize-mix-to-mix",
    "no momentum encoder": "--no-momentum-encoder",
    "momentum 0.99": "--momentum 0.99",
    "momentum 0.8": "--momentum 0.8",
}
MIXES = {  # in `fast` without regions, which only whole patches have
    f"mix {mix}": f"--mix {mix} --region-weight 0"
    for mix in ("patchmix", "mixup", "cutmix", "cutmix+mixup", "resizemix", "regionswap")
}
RATES = {  # the best --base-lr of one seed in `rates` with momentum 0.99, where it is not 2e-3 as in `fast`
    "simclr": "4e-3",
    "swav": "1e-3",
    "mix patchmix": "1e-3",
    "mix regionswap": "1e-3",
    "mix cutmix+mixup": "1e-3",
}


class Training(NamedTuple):
    """A line of runs.csv: the settings are flags of `patchmix pretrain` beside those of `flags`."""

    name: str
    seed: int
    budget: str
    settings: str
    part: slice = slice(None)  # of the training images
    tested: bool = True  # with the test images; otherwise each training image by the others
    evaluations: tuple[str, ...] = ("knn",)


def rows(group: str) -> Iterator[Training]:
    """The trainings of a group."""
    if group == "views":  # PatchMix against MoCo v3 at equal time
        for name, settings in VIEWS.items():
            for seed in (0, 1, 2):
                yield Training(f"fast, {name}", seed, "5min", settings)
                yield Training(f"mocov3, {name}", seed, "5min", f"{MOCO} {settings}")
    elif group == "speed":  # what the other recipes reach in four times the time of `views`, and `fast` in a sixteenth
        yield Training("fast", 0, "75s", "")
        for seed in (0, 1, 2):
            for name, method in PAIR.items():
                yield Training(f"{name}, 20 minutes", seed, "20min", method)
        for seed in (0, 1, 2):
            simclr = f"{METHODS['simclr']} --base-lr {RATES['simclr']}"
            yield Training("simclr, 20 minutes", seed, "20min", simclr)
        yield Training("paper", 0, "20min", f"--recipe paper {ENCODER}")
        yield Training("mocov3, own settings", 0, "20min", f"--recipe paper --method mocov3 {ENCODER}")
        yield Training("official", 0, "20min", f"--recipe official {ENCODER}")
    elif group == "without":
        for seed in (0, 1, 2):
            for name, settings in WITHOUT.items():
                yield Training(name, seed, "5min", settings, tested=False)
    elif group in CHOICES:  # three seeds with the learning rate that was best in one
        for seed in (0, 1, 2):
            for name, settings in CHOICES[group].items():
                rate = f"--base-lr {RATES[name]}" if name in RATES else ""
                yield Training(name, seed, "5min", f"{settings} {rate}".strip(), tested=False)
    elif group == "rates":
        for lr in ("1e-3", "2e-3", "4e-3"):
            for name, settings in {**METHODS, **MIXES}.items():
                yield Training(f"{name}, lr {lr}", 0, "5min", f"{settings} --base-lr {lr}".strip(), tested=False)
    elif group == "flips":  # all methods where the only augmentation is a flip
        for name, settings in METHODS.items():
            yield Training(name, 0, "5min", f"{settings} {VIEWS['flips']}".strip(), tested=False)
    elif group == "small":  # few images, many epochs
        for seed in (0, 1, 2):
            for images in (1_000, 5_000, 20_000):
                for name, method in COMPARED.items():
                    label = f"{name}, {images} images"
                    yield Training(label, seed, "10min", METHODS[method], slice(images), True, FROZEN)
    elif group == "labels":  # the same, then trained with their labels; and that from nothing
        finetune = "finetune --epochs 8 --base-lr 1e-3 --batch-size 128"  # of 20,000 images, see `repeated`
        for seed in (0, 1, 2):
            for images in (1_000, 5_000, 20_000):
                for name, method in COMPARED.items():
                    label = f"{name}, {images} images"
                    yield Training(label, seed, "10min", METHODS[method], slice(images), True, (finetune,))
                scratch = (f"{finetune} --layer-decay 1",)
                yield Training(f"supervised, {images} images", seed, "1s", "", slice(images), True, scratch)
    elif group in ("sizes", "bf16"):  # of images and patches, chosen without the test images; the same, tested
        for seed in (0, 1, 2):
            for name, method in PAIR.items():
                for label, sizes in SIZES.items():
                    settings = f"{method} {sizes} --precision bf16".strip()
                    yield Training(f"{name}{label}", seed, "10min", settings, tested=group == "bf16")
    elif group == "hour":
        for name, method in PAIR.items():
            yield Training(name, 0, "60min", method, evaluations=FROZEN)
    elif group == "long":  # finer patches, which pay in longer training
        settings = f"{SIZES[', patch 4']} --precision bf16"
        for name, method in PAIR.items():
            yield Training(f"{name}, patch 4", 0, "60min", f"{method} {settings}".strip(), evaluations=FROZEN)
    elif group == "photos":  # DATA is a folder of photos instead, of 64 px or more
        settings = "--model vit_tiny_patch8_64 --dim 128 --depth 4 --heads 4 --image-sizes 32 48 64"
        for name, method in PAIR.items():
            yield Training(name, 0, "45min", f"{method} {settings}".strip(), evaluations=FROZEN)
    else:
        raise SystemExit(f"group {group!r} is unknown; known: {', '.join(GROUPS)}")


SIZES = {  # fractions where speeds.csv has speeds of both methods that were measured in turn
    "": "--image-sizes 1",
    ", smaller images first": "--image-sizes 0.5 0.75 1",
    ", patch 4": "--patch-size 4 --image-sizes 16 24 32",
}
PAIR = {"fast": "", "mocov3": MOCO}
FROZEN = ("knn", "linear --protocol fast")  # evaluations of the encoder as it is
COMPARED = {"fast": "patchmix", "mocov3": "mocov3", "sdmp": "sdmp"}
CHOICES = {"methods": METHODS, "mixes": MIXES}
KEPT = {"labels": "small", "bf16": "sizes"}  # whose trainings these evaluate
UNTESTED = {"without", "rates", "methods", "mixes", "flips", "sizes"}
GROUPS = ("views", "speed", "without", "rates", *CHOICES, "flips", "small", "labels", "sizes", "bf16", "hour", "long",
          "photos")  # fmt: skip


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("groups", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--csv", type=Path, help="the log of all runs; by default OUT/runs.csv")
    parser.add_argument("--measure", action="store_true", help="measure the speeds, and train nothing")
    parser.add_argument("--only", default="", help="trainings whose 'NAME, seed S' begins so")
    parser.add_argument("--budget", help="for every training, instead of its own")
    parser.add_argument("--settings", default="", help="flags for every training, after its own")
    arguments = parser.parse_args(args)
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = arguments.csv or arguments.out / "runs.csv"
    speeds = log.with_name("speeds.csv")
    done = {(row["group"], row["name"], int(row["seed"])) for row in read(log)}
    wanted = [
        (group, each._replace(budget=arguments.budget or each.budget,
                              settings=f"{each.settings} {arguments.settings}".strip()))
        for group in arguments.groups
        for each in rows(group)
        if (group, each.name, each.seed) not in done and f"{each.name}, seed {each.seed}".startswith(arguments.only)
    ]  # fmt: skip
    for _, training in wanted:
        if speed_key(training) not in {row["settings"] for row in read(speeds)}:
            speed = images_per_second(cut(arguments.data, training, arguments.out), arguments.out, training)
            append({"settings": speed_key(training), "images_per_second": round(speed)}, speeds)
    for group, training in [] if arguments.measure else wanted:
        if twin := next((row for row in read(log) if is_same(row, group, training)), None):
            append({**twin, "group": group, "name": training.name}, log)
            continue
        folder = arguments.out / KEPT.get(group, group) / re.sub(r"\W+", "-", f"{training.name}-{training.seed}")
        speed = next(int(row["images_per_second"]) for row in read(speeds) if row["settings"] == speed_key(training))
        labeled = cut(arguments.data, training, arguments.out)
        data = cut(arguments.data, training._replace(tested=False), arguments.out) if group == "bf16" else labeled
        found = train(data, folder, flags(training, speed, data), labeled, training.evaluations)
        row = {"group": group, **training._asdict(), **found}
        append({column: row.get(column) for column in COLUMNS}, log)


def is_same(row: dict[str, str], group: str, training: Training) -> bool:
    """Whether another group without test images has this training."""
    values = (str(training.seed), training.budget, training.settings)
    return {group, row["group"]} <= UNTESTED and (row["seed"], row["budget"], row["settings"]) == values


def flags(training: Training, speed: float, data: str) -> list[str]:
    """As many epochs of the data as the budget is enough for."""
    from patchmix.config import parse_minutes
    from patchmix.data.sources import open_source

    images = parse_minutes(training.budget) * 60 * speed
    epochs = images / len(open_source(data, "train", cache_bytes=0))
    common = f"--epochs {epochs:.4g} --seed {training.seed} --workers 0 --monitor-every 0 --resume auto"
    return f"{recipe(training)} {common} {training.settings}".split()


def recipe(training: Training) -> str:
    return "" if "--recipe" in training.settings else "--recipe fast"


def speed_key(training: Training) -> str:
    """The settings without the learning rate, which does not change the speed."""
    return re.sub(r" ?--base-lr \S+", "", training.settings)


def patchmix(*args: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", PATCHMIX, *args], env=environment, check=True)


def images_per_second(data: str, out: Path, training: Training) -> float:
    """In fp32, of a training of a minute, all stages of its schedules included."""
    with tempfile.TemporaryDirectory(dir=out) as folder:
        short = "--precision fp32 --budget 60s --workers 0 --log-every 2 --monitor-every 0 --monitor-bank 500"
        options = f"{recipe(training)} {short} --monitor-queries 100 {speed_key(training)}"
        patchmix("pretrain", data, "--out", f"{folder}/run", *options.split())
        speeds = [line["images_per_second"] for line in lines(Path(folder) / "run") if "images_per_second" in line]
    return statistics.harmonic_mean(speeds[2:])  # without the first steps, which are slower


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train(data: str, folder: Path, options: list[str], labeled: str, evaluations: tuple[str, ...]) -> dict[str, float]:
    """Trains and evaluates, or continues to."""
    patchmix("pretrain", data, "--out", str(folder), *options)
    for evaluation in evaluations:
        verb, *how = evaluation.split()
        images = repeated(Path(labeled)) if verb == "finetune" else labeled
        patchmix(verb, str(folder), "--data", images, "--workers", "0", *how)
    last = next((line for line in reversed(lines(folder)) if "seconds" in line), {"step": 0, "seconds": 0})
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]

    from patchmix.run import Run
    from patchmix.study.flops import config_flops

    config = Run(folder).config
    return {
        "images": last["step"] * config.train.batch_size,
        "seconds": round(last["seconds"]),
        "gflops_per_image": round((config_flops(config) or 0) / 1e9, 4),
        **{each["protocol"].removesuffix("-fast"): round(100 * each["metrics"]["top1"], 2) for each in results},
    }


def read(file: Path) -> list[dict[str, str]]:
    if not file.exists():
        return []
    with file.open(newline="") as text:
        return list(csv.DictReader(text))


def append(row: dict[str, Any], file: Path) -> None:
    new = not file.exists()
    with file.open("a", newline="") as text:
        writer = csv.DictWriter(text, list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def cut(data: str, training: Training, out: Path) -> str:
    """DATA, or a folder with the part of it that a training takes."""
    import pyarrow.parquet as pq

    if training.tested and training.part == slice(None):
        return data
    folder = out / f"data-{training.part.stop or 'all'}-{'test' if training.tested else 'each-other'}"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(pq.read_table(Path(data) / "train.parquet")[training.part], folder / "train.parquet")
        if training.tested:
            pq.write_table(pq.read_table(Path(data) / "test.parquet"), folder / "test.parquet")
        (folder / "done").touch()
    return str(folder)


def repeated(data: Path) -> str:
    """DATA with its training images again and again, 20,000 in all: fine-tuning tests after each epoch."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = data.with_name(f"{data.name}-repeated")
    if not (folder / "done").exists():
        folder.mkdir(exist_ok=True)
        images = pq.read_table(data / "train.parquet")
        pq.write_table(pa.concat_tables([images] * max(1, 20_000 // len(images))), folder / "train.parquet")
        pq.write_table(pq.read_table(data / "test.parquet"), folder / "test.parquet")
        (folder / "done").touch()
    return str(folder)


if __name__ == "__main__":
    main()
