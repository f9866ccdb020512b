"""What is active on this machine, and what would help: one finding a line, each with its remedy."""

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
from patchmix.train.allocator import can_ask_for_huge_pages, page_policy

Verdict = Literal["ok", "could be better", "missing"]
SIGNS: dict[Verdict, str] = {"ok": "[green]✓[/]", "could be better": "[yellow]![/]", "missing": "[red]✗[/]"}
EXTRAS = {"wandb": "wandb", "onnx": "onnx"}
LEAST_FREE_GB = 5.0


@dataclass(frozen=True)
class Finding:
    what: str
    found: str
    verdict: Verdict = "ok"
    remedy: str = ""  # what to do where it is not "ok"


def examine(runs: Path = Path("runs")) -> list[Finding]:
    """Everything that a run's speed or success may depend on."""
    parts = (versions(), devices(), cores(), memory(), images(), storage(runs), compiling(), processes(), extras())
    return [finding for part in parts for finding in part]


def versions() -> Iterator[Finding]:
    names = ("patchmix-ssl", "torch", "torchvision", "timm", "numpy", "opencv-python-headless", "pillow")
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:  # another build of OpenCV, or run from its source
            continue
    yield Finding("versions", f"Python {platform.python_version()}, {', '.join(found)}")


def devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        remedy = "runs take the CPU; for a GPU install its driver and a torch build with CUDA"
        yield Finding("GPU", "none that torch sees", "could be better", remedy)
        return
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        yield Finding(f"GPU {number}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GB")
    if torch.cuda.is_bf16_supported():
        yield Finding("bf16", "in hardware; precision auto uses it")
    else:
        yield Finding("bf16", "not in hardware", "could be better", "runs are fp32; a GPU from 2020 on has it")


def cores() -> Iterator[Finding]:
    usable = usable_cores()
    threads = torch.get_num_threads()
    found = f"{threads} threads on {usable} cores"
    if threads > usable:
        remedy = f"threads wait for each other: set OMP_NUM_THREADS={usable}"
        yield Finding("threads", found, "could be better", remedy)
    elif threads < usable and "OMP_NUM_THREADS" in os.environ:
        remedy = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} leaves cores idle; unset it, or use them as workers"
        yield Finding("threads", found, "could be better", remedy)
    else:
        yield Finding("threads", found)
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if busy > usable + 0.5:
        remedy = "other programs compete for the cores: a run is slower than it could be by more than their share"
        yield Finding("load", f"{busy:.1f} on {usable} cores", "could be better", remedy)
    yield Finding("workers", f"--workers {suggested_workers(usable)} suits {_device_word()}")


def usable_cores() -> int:
    """Those that this process may use; in a container fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def suggested_workers(cores: int) -> int:
    """A GPU is fed by all cores but one; on a CPU, where the step needs the cores itself, one worker hides its wait."""
    return max(1, min(16, (cores - 1) // max(1, torch.cuda.device_count()))) if torch.cuda.is_available() else 1


def _device_word() -> str:
    return "this GPU" if torch.cuda.is_available() else "training on the CPU"


def memory() -> Iterator[Finding]:
    preloaded = os.environ.get("LD_PRELOAD", "")
    if "jemalloc" in preloaded or "tcmalloc" in preloaded:
        yield Finding("allocator", Path(preloaded.split(":")[0]).name)
    elif _has_mallopt():
        yield Finding("allocator", "glibc; runs on the CPU keep freed memory (mallopt)")
    else:
        remedy = "freed memory goes back to the system at every step; preload jemalloc where there is one"
        yield Finding("allocator", "the system's own", "could be better", remedy)
    policy = page_policy()
    if policy == "never" or (policy == "madvise" and not can_ask_for_huge_pages()):
        better = "madvise" if policy == "never" else "always"
        remedy = f"as root: echo {better} > /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding("huge pages", policy, "could be better", remedy)
    elif policy is not None:
        asked = "; commands that compute ask for them" if policy == "madvise" else ""
        yield Finding("huge pages", policy + asked)


def _has_mallopt() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return hasattr(ctypes.CDLL(None), "mallopt")
    except OSError:
        return False


def images() -> Iterator[Finding]:
    build = cv2.getBuildInformation()
    simd = re.search(r"Dispatched code generation:\s*(.+)", build)
    yield Finding("OpenCV", f"{cv2.__version__}, SIMD {simd[1].strip() if simd else 'of its baseline only'}")
    yield Finding("OpenCV threads", f"{cv2.getNumThreads()} here; 1 in each worker")
    for name, library in (("JPEG", "libjpeg-turbo"), ("WEBP", "")):
        line = re.search(rf"^\s*{name}:\s*(.+)$", build, flags=re.MULTILINE)
        known = line[1].strip() if line else "NO"
        if known.startswith("NO") or library not in known:
            remedy = "pip install --force-reinstall opencv-python-headless, whose wheels have it"
            yield Finding(name, f"OpenCV: {known}", "could be better", remedy)
        else:
            yield Finding(name, f"OpenCV: {known}; Pillow: {_pillow_codec(name)}")


def _pillow_codec(name: str) -> str:
    if name == "JPEG":
        return "libjpeg-turbo" if pillow.check("libjpeg_turbo") else "libjpeg"
    return "yes" if pillow.check("webp") else "no"


def storage(runs: Path) -> Iterator[Finding]:
    existing = next(folder for folder in (runs, *runs.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free / 2**30
    if not os.access(existing, os.W_OK):
        yield Finding(
            "runs", f"no right to write in {existing}", "missing", "give --out a folder that you may write to"
        )
    elif free < LEAST_FREE_GB:
        remedy = "a checkpoint of ViT-B takes 1.6 GB; free some space, or give --out another disk"
        yield Finding("runs", f"{free:.1f} GB free in {existing}", "could be better", remedy)
    else:
        yield Finding("runs", f"{free:.0f} GB free, writable")
    if Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm").free / 2**30
        if shared < 1.0:
            remedy = "workers may run out of it: start the container with --shm-size=8g, or take --workers 0"
            yield Finding("shared memory", f"{shared:.2f} GB", "could be better", remedy)
        else:
            yield Finding("shared memory", f"{shared:.0f} GB")


def compiling() -> Iterator[Finding]:
    if torch.cuda.is_available():
        has_triton = importlib.util.find_spec("triton") is not None
        remedy = "" if has_triton else "--compile needs it: pip install triton"
        yield Finding("--compile", "triton" if has_triton else "no triton", "ok" if has_triton else "missing", remedy)
    elif compiler := cpp_compiler():
        yield Finding("--compile", f"possible with {compiler}")
    else:
        yield Finding(
            "--compile", "no C++ compiler", "could be better", "install g++, if you want --compile on the CPU"
        )


def processes() -> Iterator[Finding]:
    if not dist.is_available():
        yield Finding("several processes", "not in this torch", "missing", "install a torch build with distributed")
        return
    known = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available(), "mpi": dist.is_mpi_available()}
    there = [name for name, available in known.items() if available]
    wanted = "nccl" if torch.cuda.is_available() else "gloo"
    if wanted in there:
        yield Finding("several processes", ", ".join(there))
    else:
        yield Finding(
            "several processes", ", ".join(there) or "none", "missing", f"install a torch build with {wanted}"
        )


def extras() -> Iterator[Finding]:
    for module, extra in EXTRAS.items():
        if importlib.util.find_spec(module) is not None:
            yield Finding(module, "installed")
        else:
            yield Finding(
                module, "not installed", "could be better", f"if you want it: pip install 'patchmix-ssl[{extra}]'"
            )


def print_findings(findings: list[Finding], *, as_json: bool = False, console: Console | None = None) -> None:
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1, ensure_ascii=False))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        remedy = f"\n[dim]{escape(finding.remedy)}[/]" if finding.remedy else ""
        table.add_row(SIGNS[finding.verdict], escape(finding.what), escape(finding.found) + remedy)
    (console or Console()).print(table)
