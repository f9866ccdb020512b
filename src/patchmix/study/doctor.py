"""`patchmix doctor`: what is active on this machine, and what would make runs faster, each with its remedy."""

from __future__ import annotations

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
from PIL import features as pillow
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


@dataclass(frozen=True)
class Finding:
    """`remedy` is what to do where the verdict is not "ok"."""

    what: str
    found: str
    remedy: str = ""
    verdict: Literal["ok", "could be better", "missing"] = "ok"


def better(what: str, found: str, remedy: str) -> Finding:
    return Finding(what, found, remedy, "could be better")


def missing(what: str, found: str, remedy: str) -> Finding:
    return Finding(what, found, remedy, "missing")


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
        yield better("GPU", "none that torch sees", remedy)
        return
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        yield Finding(f"GPU {number}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GB")
    if torch.cuda.is_bf16_supported():
        yield Finding("bf16", "in hardware; precision auto uses it")
    else:
        yield better("bf16", "not in hardware", "runs are fp32; GPUs since 2020 have it")


def cores() -> Iterator[Finding]:
    usable, threads = usable_cores(), torch.get_num_threads()
    found = f"{threads} threads on {usable} cores"
    if threads > usable:
        yield better("threads", found, f"threads wait for each other: set OMP_NUM_THREADS={usable}")
    elif threads < usable and "OMP_NUM_THREADS" in os.environ:
        remedy = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} leaves cores idle; unset it, or use them as workers"
        yield better("threads", found, remedy)
    else:
        yield Finding("threads", found)
    load = os.getloadavg()[0]
    if load > usable + 0.5:
        yield better("load", f"{load:.1f} on {usable} cores", "other programs compete for the cores and slow runs down")
    if torch.cuda.is_available():  # all cores but one feed the GPUs
        workers = max(1, min(16, (usable - 1) // torch.cuda.device_count()))
        yield Finding("workers", f"--workers {workers} suits this GPU")
    else:
        yield Finding("workers", "--workers 1 suits training on the CPU, where the step needs the cores itself")


def memory() -> Iterator[Finding]:
    preloaded = os.environ.get("LD_PRELOAD", "")
    if "jemalloc" in preloaded or "tcmalloc" in preloaded:
        yield Finding("allocator", Path(preloaded.split(":")[0]).name)
    elif sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        yield Finding("allocator", "glibc; runs on the CPU keep freed memory (mallopt)")
    else:
        remedy = "freed memory goes back to the system at every step; preload jemalloc where there is one"
        yield better("allocator", "the system's own", remedy)
    policy = page_policy()
    if policy == "never" or (policy == "madvise" and not can_ask_for_huge_pages()):
        wanted = "madvise" if policy == "never" else "always"
        yield better("huge pages", policy, f"as root: echo {wanted} > /sys/kernel/mm/transparent_hugepage/enabled")
    elif policy is not None:
        asked = "; commands that compute ask for them" if policy == "madvise" else ""
        yield Finding("huge pages", policy + asked)


def images() -> Iterator[Finding]:
    build = cv2.getBuildInformation()
    simd = re.search(r"Dispatched code generation:\s*(.+)", build)
    yield Finding("OpenCV", f"{cv2.__version__}, SIMD {simd[1].strip() if simd else 'of its baseline only'}")
    yield Finding("OpenCV threads", f"{cv2.getNumThreads()} here; 1 in each worker")
    turbo = "libjpeg-turbo" if pillow.check("libjpeg_turbo") else "libjpeg"
    webp = "yes" if pillow.check("webp") else "no"
    for name, library, in_pillow in (("JPEG", "libjpeg-turbo", turbo), ("WEBP", "", webp)):
        line = re.search(rf"^\s*{name}:\s*(.+)$", build, flags=re.MULTILINE)
        codec = line[1].strip() if line else "NO"
        if codec.startswith("NO") or library not in codec:
            remedy = "pip install --force-reinstall opencv-python-headless, whose wheels have it"
            yield better(name, f"OpenCV: {codec}", remedy)
        else:
            yield Finding(name, f"OpenCV: {codec}; Pillow: {in_pillow}")


def storage(runs: Path) -> Iterator[Finding]:
    existing = next(folder for folder in (runs, *runs.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free / 2**30
    if not os.access(existing, os.W_OK):
        yield missing("runs", f"no permission to write in {existing}", "give --out a folder that you may write to")
    elif free < LEAST_FREE_GB:
        remedy = "a checkpoint of ViT-B takes 1.6 GB; free some space, or give --out another disk"
        yield better("runs", f"{free:.1f} GB free in {existing}", remedy)
    else:
        yield Finding("runs", f"{free:.0f} GB free, writable")
    if Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm").free / 2**30
        if shared < 1.0:
            remedy = "workers may run out of it: start the container with --shm-size=8g, or use --workers 0"
            yield better("shared memory", f"{shared:.2f} GB", remedy)
        else:
            yield Finding("shared memory", f"{shared:.0f} GB")


def compiling() -> Iterator[Finding]:
    if torch.cuda.is_available():
        if importlib.util.find_spec("triton") is not None:
            yield Finding("--compile", "triton")
        else:
            yield missing("--compile", "no triton", "--compile needs it: pip install triton")
    elif compiler := cpp_compiler():
        yield Finding("--compile", f"possible with {compiler}")
    else:
        yield better("--compile", "no C++ compiler", "install g++, if you want --compile on the CPU")


def processes() -> Iterator[Finding]:
    if not dist.is_available():
        yield missing("several processes", "not in this torch", "install a torch build with distributed")
        return
    known = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available(), "mpi": dist.is_mpi_available()}
    backends = [name for name, available in known.items() if available]
    wanted = "nccl" if torch.cuda.is_available() else "gloo"
    if wanted in backends:
        yield Finding("several processes", ", ".join(backends))
    else:
        found = ", ".join(backends) or "none"
        yield missing("several processes", found, f"install a torch build with {wanted}")


def extras() -> Iterator[Finding]:
    for module, extra in EXTRAS.items():
        if importlib.util.find_spec(module) is not None:
            yield Finding(module, "installed")
        else:
            yield better(module, "not installed", f"if you want it: pip install 'patchmix-ssl[{extra}]'")
