"""Every command and every Python example in README and docs is run, with sizes that take seconds.

A command keeps its verb and options. Only its data (named sets and folders become small generated ones), the length of
training and the sizes of networks are replaced; runs and files that a page takes for granted are put in place first.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from patchmix.build import METHODS
from patchmix.cli import main
from patchmix.data.sources import open_source
from patchmix.interop.loading import load_backbone
from patchmix.study.ablation import rows_of
from tests.evaluate.detection.conftest import write_split

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

NAMED_SETS = {"imagenet", "cifar10", "cifar100", "shapes", "shapes:5000", "../shared/data/cifar10"}
SMALL_RUN = [
    *("--image-size", "32", "--patch-size", "8", "--dim", "24", "--depth", "4", "--heads", "2"),
    *("--batch-size", "32", "--local-crops", "0", "--monitor-bank", "64", "--monitor-queries", "32"),
]
SMALL_HEADS = ["--head-hidden", "32", "--head-out", "16"]
REPLACED = {"--epochs": "1", "--budget": "1s", "--batch-size": "32", "--workers": "0"}
NOT_OURS = ("pip ", "make ", "git ", "cd ")  # set-up, which other checks cover


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands(page: Path) -> list[str]:
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    return [line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith(("#", *NOT_OURS))]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete small run, a folder of photos, one of labelled photos, and a foreign checkpoint."""
    folder = tmp_path_factory.mktemp("docs")
    run = ["pretrain", "shapes:64", "--out", str(folder / "run"), "--recipe", "demo", "--epochs", "1"]
    main([*run, "--workers", "0", *SMALL_RUN, *SMALL_HEADS])
    source = open_source("shapes:96")
    for i in range(96):
        image = cv2.resize(source.load(i), (40, 40))[:, :, ::-1]
        for path in (folder / "photos" / f"{i}.jpg", folder / "labelled" / f"class{i % 3}" / f"{i}.png"):
            path.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path), np.ascontiguousarray(image))
    for name, i in (("a", 0), ("b", 1)):
        shutil.copy(folder / "photos" / f"{i}.jpg", folder / "photos" / f"{name}.jpg")
    torch.save(load_backbone(folder / "run" / "encoder.safetensors").weights, folder / "checkpoint.pth")
    return folder


def prepare(words: list[str], template: Path) -> None:
    """Puts in place what a page takes for granted."""
    for name in ("photos", "labelled", "checkpoint.pth"):
        if not Path(name).exists():
            (shutil.copytree if (template / name).is_dir() else shutil.copy)(template / name, name)
    if "coco" in words and not Path("coco").exists():
        for split in ("train2017", "val2017"):
            write_split(Path("coco"), split, 4)
    verb = words[0]
    if verb not in ("pretrain", "ablate", "import"):
        outs = {words[i + 1] for i, word in enumerate(words[:-1]) if word == "--out"}
        for word in words[1:]:
            if word.startswith("runs/") and word not in outs and not Path(word).exists():
                shutil.copytree(template / "run", word, symlinks=True)


def shortened(words: list[str]) -> list[str]:
    """The same command with small data and a short training."""
    small = ["shapes:64" if word in NAMED_SETS else word for word in words]
    for i, word in enumerate(small[:-1]):
        if word in REPLACED:
            small[i + 1] = REPLACED[word]
    verb = small[0]
    if verb == "pretrain":
        method = small[small.index("--method") + 1] if "--method" in small else "patchmix"
        small += SMALL_RUN + (SMALL_HEADS if method == "patchmix" else [])
        small += [] if "--workers" in small else ["--workers", "0"]
        small += [] if {"--epochs", "--budget"} & set(small) else ["--epochs", "1"]
    elif verb == "ablate":
        small += [*SMALL_RUN, *SMALL_HEADS]
        small += [] if "--workers" in small else ["--workers", "0"]
        small += [] if {"--epochs", "--budget"} & set(small) else ["--epochs", "1"]
        if "--rows" not in small:  # one of them
            small += ["--rows", rows_of(small[1], METHODS)[-1].name]
    elif verb in ("linear", "finetune"):
        small += [] if "--epochs" in small else ["--epochs", "1"]
        small += [] if "--workers" in small else ["--workers", "0"]
    elif verb == "detect" and not {"--eval-only", "--predict"} & set(small):
        small += ["--epochs", "1", "--batch-size", "2", "--image-size", "64", "--pictures", "1"]
        small += ["--channels", "16", "--head-dim", "32", "--window", "0"]
    elif verb == "bench":
        small += ["--steps", "1", "--workers", "0"]
        small += [*SMALL_RUN, *SMALL_HEADS]
    elif verb == "demo":
        small += ["--budget", "1s"]
    return small


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands(page: Path, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATCHMIX_CACHE", str(tmp_path / "cache"))
    for command in commands(page):
        words = shlex.split(command)
        if words[0] == "torchrun":
            run_torchrun(words, template)
            continue
        assert words[0] == "patchmix", f"{page.name}: {command}"
        prepare(words[1:], template)
        run_here(shortened(words[1:]))


def run_here(words: list[str]) -> None:
    """In this process; `--help` leaves by SystemExit(0), a failure by another code."""
    try:
        main(words)
    except SystemExit as stop:
        if stop.code not in (0, None):
            raise AssertionError(f"patchmix {shlex.join(words)} ended with exit code {stop.code}") from stop


def run_torchrun(words: list[str], template: Path) -> None:
    start = words.index("patchmix") + 1
    prepare(words[start:], template)
    launcher = [sys.executable, "-m", "torch.distributed.run", *words[1:start]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, *shortened(words[start:])],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_examples(page: Path, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "python"):
        for word in re.findall(r"\"(runs/[^\"]+)\"", block):
            if not Path(word).exists():
                shutil.copytree(template / "run", word, symlinks=True)
        prepare(["python"], template)
        exec(compile(block, page.name, "exec"), {"__name__": "docs"})


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+?)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} → {target}"


def test_the_reference_lists_the_options_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert page == script.render(), "docs/reference.md is out of date; write it again with `make reference`"
    assert "| |\n" not in page.replace("| command | |\n", "").replace("| default | |\n", ""), "an option has no help"
