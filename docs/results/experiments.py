"""The trainings of docs/results.md, one after the other; the same call continues where it stopped.

    taskset -c 1 python docs/results/experiments.py cifar10 --out runs/experiments views speed without small hour

DATA is a folder with CIFAR-10 as train.parquet and test.parquet. Every training runs on one thread, is evaluated by kNN
and becomes a line of runs.csv. Two of these, one with `--only fast` and one with `--only mocov3`, train pairs side by
side on two cores, so that both have the same load beside them. Group `without` never sees the test images: it trains on
the first 45,000 training images and is tested on the other 5,000.
"""

import argparse
import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COLUMNS = ("group", "name", "seed", "budget", "images", "seconds", "gflops_per_image", "knn", "settings")

# MoCo v3 with everything of `fast` that is not PatchMix: views, encoder, heads, optimizer, batch.
MOCO = "--method mocov3 --momentum 0.99 --head-hidden 512 --head-out 128 --no-frozen-patch-embed"
ENCODER = "--model vit_tiny_patch8_32 --dim 128 --depth 4 --heads 4"

VIEWS = {  # in the order of what they tell
    "flips": "--area 1 1 --jitter 0 --gray 0",
    "all views": "",
    "crops and flips": "--jitter 0 --gray 0",
}

WITHOUT = {  # `fast` with one change
    "fast": "",
    "mocov3": MOCO,
    "twice the learning rate": "--base-lr 4e-3",
    "mocov3, twice the learning rate": f"{MOCO} --base-lr 4e-3",
    "patch stem": "--stem patch",
    "AdamW": "--optim adamw",
    "without regions": "--region-weight 0",
    "without mix-to-origin": "--weights 1 0 0",
    "all plain queries": "--plain-share 1",
    "learned positions": "--positions learned",
    "M = 3": "--num-mix 3",
    "patch 4": "--patch-size 4",
    "crops from a fifth": "--area 0.2 1",
    "small images first": "--image-sizes 24 32",
    "mimetic": "--initialization mimetic",
}


class Training(NamedTuple):
    """A line of runs.csv: the settings are flags of `patchmix pretrain` beside those of `flags`."""

    name: str
    seed: int
    budget: str
    settings: str
    part: slice = slice(None)  # of the training images
    tested_on: slice | None = None  # other training images instead of the test images


def rows(group: str) -> Iterator[Training]:
    """The trainings of a group."""
    if group == "views":  # PatchMix against MoCo v3 at equal time
        for name, settings in VIEWS.items():
            for seed in (0, 1, 2):
                yield Training(f"fast, {name}", seed, "5min", settings)
                yield Training(f"mocov3, {name}", seed, "5min", f"{MOCO} {settings}")
    elif group == "speed":  # what the other recipes reach in four times the time of `views`
        yield Training("paper", 0, "20min", f"--recipe paper {ENCODER}")
        yield Training("mocov3, own settings", 0, "20min", f"--recipe paper --method mocov3 {ENCODER}")
        yield Training("official", 0, "20min", f"--recipe official {ENCODER}")
    elif group == "without":
        for name, settings in WITHOUT.items():
            yield Training(name, 0, "5min", settings, slice(45_000), slice(45_000, None))
    elif group == "small":  # few images, many epochs
        for images in (1_000, 5_000, 20_000):
            yield Training(f"fast, {images} images", 0, "10min", "", slice(images))
            yield Training(f"mocov3, {images} images", 0, "10min", MOCO, slice(images))
    elif group in HOURS:
        yield Training("fast", 0, HOURS[group], "")
        yield Training("mocov3", 0, HOURS[group], MOCO)
    else:
        raise SystemExit(f"group {group!r} is unknown; known: views, speed, without, small, {', '.join(HOURS)}")


HOURS = {"hour": "60min", "day": "8h"}


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("groups", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("runs.csv"), help="the log of all runs")
    parser.add_argument("--only", default="", help="trainings whose name begins like this")
    parser.add_argument("--budget", help="for every training, instead of its own")
    arguments = parser.parse_args(args)
    done = set()
    if arguments.csv.exists():
        with arguments.csv.open(newline="") as file:
            done = {(row["group"], row["name"], int(row["seed"])) for row in csv.DictReader(file)}
    for group in arguments.groups:
        for training in rows(group):
            if (group, training.name, training.seed) in done or not training.name.startswith(arguments.only):
                continue
            training = training._replace(budget=arguments.budget or training.budget)
            folder = arguments.out / group / re.sub(r"\W+", "-", f"{training.name}-{training.seed}")
            found = train(cut(arguments.data, training, arguments.out), folder, flags(training))
            append({"group": group, **training._asdict(), **found}, arguments.csv)


def flags(training: Training) -> list[str]:
    common = f"--budget {training.budget} --seed {training.seed} --workers 0 --monitor-every 0 --resume auto"
    recipe = "" if "--recipe" in training.settings else "--recipe fast"
    return f"{recipe} {common} {training.settings}".split()


def train(data: str, folder: Path, options: list[str]) -> dict[str, float]:
    """Trains and evaluates, or continues to."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "patchmix"]
    subprocess.run([*command, "pretrain", data, "--out", str(folder), *options], env=environment, check=True)
    subprocess.run([*command, "knn", str(folder), "--data", data], env=environment, check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "seconds" in line][-1]
    result = json.loads((folder / "results.jsonl").read_text().splitlines()[-1])

    from patchmix.run import Run
    from patchmix.study.flops import config_flops

    config = Run(folder).config
    return {
        "images": last["step"] * config.train.batch_size,
        "seconds": round(last["seconds"]),
        "gflops_per_image": round((config_flops(config) or 0) / 1e9, 4),
        "knn": round(100 * result["metrics"]["top1"], 2),
    }


def append(row: dict[str, object], file: Path) -> None:
    new = not file.exists()
    with file.open("a", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS, extrasaction="ignore", lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def cut(data: str, training: Training, out: Path) -> str:
    """DATA, or a folder with the part of it that a training takes."""
    import pyarrow.parquet as pq

    part, tested_on = training.part, training.tested_on
    if part == slice(None):
        return data
    folder = out / f"data-{part.stop}-{'validation' if tested_on else 'test'}"
    if not (folder / "test.parquet").exists():
        folder.mkdir(parents=True, exist_ok=True)
        table = pq.read_table(Path(data) / "train.parquet")
        tests = table if tested_on else pq.read_table(Path(data) / "test.parquet")
        for name, rows, which in (("train", table, part), ("test", tests, tested_on or slice(None))):
            start, stop, _ = which.indices(rows.num_rows)
            pq.write_table(rows.slice(start, stop - start), folder / f"{name}.parquet")
    return str(folder)


if __name__ == "__main__":
    main()
