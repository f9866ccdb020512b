"""The trainings of docs/results.md, one after the other; the same call continues where it stopped.

    taskset -c 1 python docs/results/experiments.py cifar10 --out runs/experiments validation seeds hour

DATA is CIFAR-10 in any form that `patchmix pretrain` reads. Every training runs on one thread, is evaluated by kNN and
becomes a line of runs.csv. The group `validation` never sees the test images: it trains on the first 45,000 training
images and is tested on the other 5,000.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

COLUMNS = ("group", "name", "seed", "budget", "images", "seconds", "gflops_per_image", "knn", "settings")

# MoCo v3 with everything of `fast` that is not PatchMix: views, encoder, heads, optimizer, batch.
MOCO = "--method mocov3 --momentum 0.99 --head-hidden 512 --head-out 128 --no-frozen-patch-embed"


def rows(group: str) -> Iterator[tuple[str, int, str, str]]:
    """(name, seed, budget, settings) of each training of a group."""
    if group == "validation":  # one change at a time
        for name, settings in VALIDATION.items():
            yield name, 0, "5min", settings
    elif group == "seeds":  # the claim: PatchMix against MoCo v3 at equal time
        for seed in (0, 1, 2):
            yield "fast", seed, "10min", ""
            yield "mocov3", seed, "10min", MOCO
    elif group == "hour":
        yield "fast", 0, "60min", ""
        yield "mocov3", 0, "60min", MOCO
    elif group == "day":
        yield "fast", 0, "8h", ""
    else:
        raise SystemExit(f"group {group!r} is unknown; known: validation, seeds, hour, day")


VALIDATION = {
    "fast": "",
    "mocov3": MOCO,
    "patch stem": "--stem patch",
    "without regions": "--region-weight 0",
    "M = 3": "--num-mix 3",
    "all plain queries": "--plain-share 1",
    "learned positions": "--positions learned",
    "patch 4": "--patch-size 4",
    "small images first": "--image-sizes 24 32",
    "mimetic": "--initialization mimetic",
}


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("groups", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("runs.csv"), help="the log of all runs")
    parser.add_argument("--budget", help="for every training, instead of its own")
    arguments = parser.parse_args(args)
    done = set()
    if arguments.csv.exists():
        with arguments.csv.open(newline="") as file:
            done = {(row["group"], row["name"], int(row["seed"])) for row in csv.DictReader(file)}
    for group in arguments.groups:
        data = split(arguments.data, arguments.out) if group == "validation" else arguments.data
        for name, seed, budget, settings in rows(group):
            if (group, name, seed) in done:
                continue
            budget = arguments.budget or budget
            folder = arguments.out / group / f"{name.replace(' ', '-')}-{seed}"
            found = train(data, folder, flags(seed, budget, settings))
            row = {"group": group, "name": name, "seed": seed, "budget": budget, "settings": settings, **found}
            append(row, arguments.csv)


def flags(seed: int, budget: str, settings: str) -> list[str]:
    common = f"--recipe fast --budget {budget} --seed {seed} --workers 0 --monitor-every 0 --resume auto"
    return [*common.split(), *settings.split()]


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
        writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def split(data: str, out: Path) -> str:
    """The first 45,000 training images and the other 5,000, as a folder with train.parquet and test.parquet."""
    import pyarrow.parquet as pq

    folder = out / "validation-data"
    if not (folder / "test.parquet").exists():
        folder.mkdir(parents=True, exist_ok=True)
        table = pq.read_table(Path(data) / "train.parquet")
        pq.write_table(table.slice(0, 45_000), folder / "train.parquet")
        pq.write_table(table.slice(45_000), folder / "test.parquet")
    return str(folder)


if __name__ == "__main__":
    main()
