"""Every command and every Python example of README and docs is run, with data and networks that take seconds.

Which: all lines of blocks marked ```bash and all blocks marked ```python. Each page is read from top to bottom and
starts in an empty folder. In a bash block, comments and lines that begin with pip, make, git or cd are left out. Blocks
with another mark (```sh, ```py, ```text) are not run: commands for several machines, parts of a program, output.

How: a command keeps its verb and its options. Only this is different from what the reader types:

- PLACEHOLDERS: photos/, labeled/, coco, pets and checkpoint.pth exist. So does each runs/NAME that a command reads and
  no command before it has written: it is a copy of one small trained run.
- NAMED_SETS: data sets that would have to be downloaded are replaced by 64 generated images. The generated sets
  themselves have 600 training and 200 test images.
- SMALLER: options that make the training short and the networks small; the fast protocols take few steps.

`pytest -s tests/test_docs.py` prints every command, and what was run for it.
"""

from __future__ import annotations

import doctest
import importlib.util
import itertools
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
import yaml

from patchmix.build import METHODS
from patchmix.cli import main
from patchmix.data import shapes
from patchmix.data.sources import open_source
from patchmix.evaluate import attentive, segment, sweep
from patchmix.interop.loading import load_backbone
from patchmix.methods.options import DISTILLATION, METHOD_OPTIONS
from patchmix.report.ablation_table import rows_of
from tests.evaluate.detection.conftest import write_split
from tests.evaluate.test_segment import write_scenes

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LEFT_OUT = ("#", "pip ", "make ", "git ", "cd ")  # comments; setting up, which needs no test here

PLACEHOLDERS = ("photos", "labeled", "coco", "pets", "checkpoint.pth")
NAMED_SETS = {"imagenet", "cifar10", "cifar100", "shapes", "shapes:5000"}
FEW_IMAGES = "shapes:64"


# By verb: where a command has the option, its value becomes this one; otherwise the option is added.
SMALL_NETWORK = {
    "--image-size": "32",
    "--patch-size": "8",
    "--dim": "24",
    "--depth": "1",
    "--heads": "2",
    "--head-hidden": "32",
    "--head-out": "16",
    "--local-crops": "0",
    "--batch-size": "32",
    "--workers": "0",
    "--monitor-bank": "64",
    "--monitor-queries": "32",
}
SIZES = ("--image-size", "--patch-size", "--dim", "--depth", "--heads")  # adapt has those of its weights
SMALLER: dict[str, dict[str, str]] = {
    "pretrain": {"--epochs": "1", **SMALL_NETWORK},
    "adapt": {"--epochs": "1", **{option: SMALL_NETWORK[option] for option in SMALL_NETWORK if option not in SIZES}},
    "ablate": {"--epochs": "1", **SMALL_NETWORK},
    "linear": {"--epochs": "1", "--workers": "0"},
    "finetune": {"--epochs": "1", "--workers": "0"},
    "detect": {
        "--epochs": "1",
        "--batch-size": "2",
        "--image-size": "64",
        "--pictures": "1",
        "--workers": "0",
        "--channels": "16",
        "--head-dim": "32",
        "--window": "0",
    },
    "segment": {"--epochs": "1", "--batch-size": "4", "--pictures": "1", "--workers": "0"},
    "evaluate": {"--shots": "2", "--draws": "1"},
    "bench": {"--steps": "1", **SMALL_NETWORK},
    "demo": {"--budget": "1s"},
    "plan": {"--dim": "24", "--depth": "1", "--heads": "2", "--workers": "0"},
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """The words of each command, without the comment behind it."""
    lines = [line.strip() for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line and not line.startswith(LEFT_OUT)]


def smaller(words: list[str]) -> list[str]:
    """The same command with small data, a small network and a short training; `words` begin with the verb."""
    small = [FEW_IMAGES if word in NAMED_SETS else word for word in words]
    options = dict(SMALLER.get(small[0], {}))
    if {"--eval-only", "--predict"} & set(small):
        options = {}  # a trained detector, as it is
    if "fast" in small and small[0] == "segment":
        del options["--batch-size"]
    if "--budget" in small:
        options = {"--budget": "1s"} | {option: value for option, value in options.items() if option != "--epochs"}
    at = small.index("--image-sizes") + 1 if "--image-sizes" in small else len(small)
    while at < len(small) and small[at].isdigit():
        small[at], at = str(min(32, int(small[at]))), at + 1
    if "distill" in small:
        options = {option: value for option, value in options.items() if not option.startswith("--head-")}
    if small[0] == "ablate" and "--rows" not in small:
        options["--rows"] = rows_of(small[1], METHODS)[-1].name  # one of them
    for option, value in options.items():
        if option in small:
            small[small.index(option) + 1] = value
        else:
            small += [option, value]
    return small


@pytest.fixture(scope="module")
def placeholders(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all PLACEHOLDERS, and the trained run as `run`."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(trained_run, folder / "run", symlinks=True)
    source = open_source("shapes:96")
    for i in range(96):
        image = np.ascontiguousarray(cv2.resize(source.load(i), (40, 40))[:, :, ::-1])
        for name in (f"photos/{i}.jpg", f"labeled/class{i % 3}/{i}.png"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(folder / name), image)
    for name, i in (("a", 0), ("b", 1)):
        shutil.copy(folder / "photos" / f"{i}.jpg", folder / "photos" / f"{name}.jpg")
    for split in ("train2017", "val2017"):
        write_split(folder / "coco", split, 4)
    write_scenes(folder / "pets" / "images", folder / "pets" / "annotations" / "trimaps", 40)
    torch.save(load_backbone(folder / "run").weights, folder / "checkpoint.pth")
    return folder


def put_in_place(placeholders: Path, runs: list[str]) -> None:
    for name in PLACEHOLDERS:
        if not Path(name).exists():
            (shutil.copytree if (placeholders / name).is_dir() else shutil.copy)(placeholders / name, name)
    for run in runs:
        if not Path(run).exists():
            shutil.copytree(placeholders / "run", run, symlinks=True)


def runs_read_by(words: list[str]) -> list[str]:
    """What of runs/ a command expects to be there: all that is not the value of --out."""
    return [word for before, word in itertools.pairwise(words) if word[:5] == "runs/" and before != "--out"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands(page: Path, placeholders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATCHMIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shapes, "TRAIN_LENGTH", 600)
    monkeypatch.setattr(shapes, "TEST_LENGTH", 200)
    for module, name in ((sweep, "_LEAST_STEPS"), (attentive, "_LEAST_STEPS"), (segment, "FAST_STEPS")):
        monkeypatch.setattr(module, name, 10)
    for words in commands(page):
        assert words[0] in ("patchmix", "torchrun"), f"{page.name}: {shlex.join(words)} is no command of ours"
        start = words.index("patchmix") + 1
        put_in_place(placeholders, runs_read_by(words[start:]))
        launcher, arguments = words[:start], smaller(words[start:])
        print(f"\n{page.name}: {shlex.join(words)}\n  as {shlex.join([*launcher, *arguments])}", flush=True)
        if launcher == ["patchmix"]:
            run_here(arguments)
        else:
            run_torchrun(launcher[1:], arguments)


def run_here(words: list[str]) -> None:
    """In this process; `--help` leaves by SystemExit(0), a failure by another code."""
    try:
        main(words)
    except SystemExit as stop:
        if stop.code not in (0, None):
            raise AssertionError(f"patchmix {shlex.join(words)} ended with exit code {stop.code}") from stop


def run_torchrun(options: list[str], words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, *words],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_examples(page: Path, placeholders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "python"):
        put_in_place(placeholders, re.findall(r"\"(runs/[^\"]+)\"", block))
        exec(compile(block, page.name, "exec"), {"__name__": "docs"})


def test_the_pages_have_commands_and_examples() -> None:
    """So that a change of the marks of blocks does not leave everything out."""
    assert len([words for page in PAGES for words in commands(page)]) > 30
    assert len([block for page in PAGES for block in blocks(page, "python")]) >= 3


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", page.read_text(encoding="utf-8")):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name} → {target}"
            assert not anchor or anchor in anchors(linked), f"{page.name} → {target}#{anchor}"


def documented_modules() -> list[str]:
    """The modules whose docstrings make docs/api.md."""
    names = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return sorted({name if find_module(name) else name.rpartition(".")[0] for name in names})


def find_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


def test_examples_in_docstrings() -> None:
    results = [doctest.testmod(importlib.import_module(name)) for name in documented_modules()]
    assert sum(result.attempted for result in results) >= 8
    assert not any(result.failed for result in results)


def test_workflows_run_what_make_runs() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            matrix = job.get("strategy", {}).get("matrix", {}).get("target", [])
            for command in [step["run"] for step in job["steps"] if "run" in step]:
                words = command.split()
                named = matrix if "matrix.target" in command else words[1:2]
                assert words[0] == "make" and named and set(named) <= targets, f"{path.name}: {command}"


def test_files_that_the_pages_name_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w/.]+)`", page.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{page.name} → {name}"


def test_every_method_is_described_with_a_link_to_its_options() -> None:
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    for name in METHOD_OPTIONS:
        assert re.search(rf"^\*\*\[`{name}`\]\(reference\.md#{name}\)\*\*", text, re.MULTILINE), name


def test_the_reference_lists_the_options_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert page == script.render(), "docs/reference.md is out of date; write it again with `make reference`"
    rows = re.findall(r"^\| `.*$", page, flags=re.MULTILINE)
    assert len(rows) > 200
    assert not [row for row in rows if not re.search(r"\| [^a-z |][^|]*\. \|$", row)]


def test_help_prints_the_texts_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each in one line, if the terminal is wide enough."""
    monkeypatch.setenv("COLUMNS", "1000")
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for title, section in re.findall(r"^### ([\w -]+)\n(.*?)(?=^##|\Z)", page, flags=re.MULTILINE | re.DOTALL):
        method = ["--method", title] if title in METHOD_OPTIONS | DISTILLATION else []
        run_here([*(title.split()[1:] or ["pretrain", *method]), "--help"])
        shown = capsys.readouterr().out
        for text in re.findall(r"\| ([^|]+\.) \|$", section, flags=re.MULTILINE):
            assert text in shown, f"{title}: {text}"
