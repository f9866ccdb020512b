"""`patchmix doctor`: what is active on this machine, and what would make runs faster, each with its remedy."""

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import cv2
import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from patchmix.device import cpp_compiler
from patchmix.launch import usable_cores
from patchmix.settings import Doctor
from patchmix.train.allocator import can_ask_for_huge_pages, page_policy

SIGNS = {"ok": "[green]✓[/]", "could be better": "[yellow]![/]", "missing": "[red]✗[/]"}
VERSIONS = ("patchmix-ssl", "torch", "torchvision", "timm", "numpy", "opencv-python-headless", "pillow")
EXTRAS = {"wandb": "wandb", "onnx": "onnx"}  # module: extra
LEAST_FREE_GB = 5.0
Verdict = Literal["ok", "could be better", "missing"]


@dataclass(frozen=True)
class Finding:
    """`remedy` is what to do where the verdict is not "ok"."""

    what: str
    found: str
    remedy: str = ""
    verdict: Verdict = "ok"


def check(fine: bool, what: str, found: str, remedy: str, *, otherwise: Verdict = "could be better") -> Finding:
    return Finding(what, found) if fine else Finding(what, found, remedy, otherwise)


def doctor(settings: Doctor) -> None:
    """Prints everything that a run's speed or success may depend on."""
    print_findings(examine(settings.runs), as_json=settings.as_json)


def examine(runs: Path) -> list[Finding]:
    parts = (versions(), devices(), cores(), memory(), images(), storage(runs), compiling(), processes(), extras())
    return [finding for part in parts for finding in part]


def print_findings(findings: list[Finding], *, as_json: bool = False, console: Console | None = None) -> None:
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1, ensure_ascii=False))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        remedy = f"\n[dim]{escape(finding.remedy)}[/]" if finding.remedy else ""
        table.add_row(SIGNS[finding.verdict], escape(finding.what), escape(finding.found) + remedy)
    (console or Console()).print(table)


def versions() -> Iterator[Finding]:
    found = []
    for name in VERSIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:  # another build of OpenCV, or run from its source
            continue
    yield Finding("versions", f"Python {platform.python_version()}, {', '.join(found)}")


def devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        remedy = "runs use the CPU; for a GPU install its driver and a torch build with CUDA"
        yield check(False, "GPU", "none that torch sees", remedy)
        return
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        yield Finding(f"GPU {number}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GB")
    fast = torch.cuda.is_bf16_supported()
    found = "in hardware; precision auto uses it" if fast else "not in hardware"
    yield check(fast, "bf16", found, "runs are fp32; GPUs since 2020 have it")


def cores() -> Iterator[Finding]:
    usable, threads, wanted = usable_cores(), torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    remedy = f"OMP_NUM_THREADS={wanted} leaves cores idle; unset it, or use them as workers"
    if threads > usable:
        remedy = f"threads wait for each other: set OMP_NUM_THREADS={usable}"
    fine = threads == usable or (threads < usable and wanted is None)
    yield check(fine, "threads", f"{threads} threads on {usable} cores", remedy)
    load = os.getloadavg()[0]
    if load > usable + 0.5:
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
        asked = "; commands that compute ask for them" if policy == "madvise" and fine else ""
        yield check(fine, "huge pages", policy + asked, remedy)


def images() -> Iterator[Finding]:
    build = cv2.getBuildInformation()
    simd = re.search(r"Dispatched code generation:\s*(.+)", build)
    yield Finding("OpenCV", f"{cv2.__version__}, SIMD {simd[1].strip() if simd else 'of its baseline only'}")
    remedy = "pip install --force-reinstall opencv-python-headless, whose wheels have it"
    for name, library in (("JPEG", "libjpeg-turbo"), ("WEBP", "")):
        line = re.search(rf"^\s*{name}:\s*(.+)$", build, flags=re.MULTILINE)
        codec = line[1].strip() if line else "NO"
        yield check(library in codec and not codec.startswith("NO"), name, f"OpenCV: {codec}", remedy)


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
    if torch.cuda.is_available():
        found, remedy = importlib.util.find_spec("triton") and "triton", "pip install triton"
    else:
        found, remedy = cpp_compiler(), "install g++"
    text = f"possible with {found}" if found else "not possible"
    yield check(bool(found), "--compile", text, f"if you want it: {remedy}")


def processes() -> Iterator[Finding]:
    wanted = "nccl" if torch.cuda.is_available() else "gloo"
    fine = dist.is_available() and (dist.is_nccl_available() if wanted == "nccl" else dist.is_gloo_available())
    remedy = f"install a torch build with {wanted}"
    yield check(fine, "several processes", wanted if fine else f"no {wanted}", remedy, otherwise="missing")


def extras() -> Iterator[Finding]:
    for module, extra in EXTRAS.items():
        installed = importlib.util.find_spec(module) is not None
        remedy = f"if you want it: pip install 'patchmix-ssl[{extra}]'"
        yield check(installed, module, "installed" if installed else "not installed", remedy)
