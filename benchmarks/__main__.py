"""`python -m benchmarks [NAME …] [--quick]`: runs the benchmarks, prints a verdict a target, writes a dated JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import time
from datetime import datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.result import Result
from patchmix.train.allocator import keep_freed_memory, restart_with_huge_pages

NAMES = ("step", "memory", "views", "loader", "knn", "evaluate", "start", "growth", "scale")
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    restart_with_huge_pages()  # what is measured in this process has the memory that commands have
    keep_freed_memory()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all if none is given")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a first impression")
    parser.add_argument("--threads", type=int, metavar="N", help="of every process; fewer where the machine is busy")
    arguments = parser.parse_args()
    if arguments.threads:
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # for the processes that measure
        torch.set_num_threads(arguments.threads)
    unknown = [name for name in arguments.names if name not in NAMES]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    console = Console()
    began = time.perf_counter()
    results: list[Result] = []
    for name in arguments.names or NAMES:
        console.print(f"{name} …", style="dim")
        for result in importlib.import_module(f"benchmarks.{name}").run(quick=arguments.quick):
            results.append(result)
            console.print(f"  {result.name}: {result.value}", style="dim")  # a long way to the table
    print_results(results, console)
    path = write(results, arguments.quick, time.perf_counter() - began)
    console.print(f"{path}, {time.perf_counter() - began:.0f} s", style="dim")


def print_results(results: list[Result], console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", "measured (lowest–highest)", "target", ""):
        table.add_column(column)
    for result in results:
        verdict = {True: "[green]✓[/]", False: "[red]✗[/]", None: ""}[result.reached]
        table.add_row(result.name, str(result.value), result.target, verdict)
        if result.parts:
            parts = ", ".join(f"{name} {100 * share:.1f} %" for name, share in result.parts.items())
            table.add_row(f"  [dim]{parts}[/]")
    console.print(table)


def write(results: list[Result], quick: bool, seconds: float) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{datetime.now():%Y-%m-%d-%H%M}.json"
    machine = {
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }
    content = {
        "quick": quick,
        "seconds": round(seconds),
        "machine": machine,
        "results": [r.as_dict() for r in results],
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
