"""Every evaluation as `torchrun --nproc-per-node 2 -m patchmix …`: one process's numbers, written and printed once.

What the maths allows: an image's features do not depend on who computes them, but for fp32's rounding in batches of
other sizes, so that kNN, the fast linear protocol and a detector's detections are the same. Training averages the
gradients of both halves of a batch: the same weights to rounding, where nothing random is drawn in a process (dropped
paths, Mixup's pairs, the proposals that a detector's loss samples).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from patchmix import distributed
from patchmix.cli import main
from patchmix.data.shapes import shapes_source
from patchmix.evaluate.linear import linear
from patchmix.evaluate.results import read_results
from patchmix.files import run_lock
from patchmix.interop.backbone import Backbone
from patchmix.settings import Linear
from patchmix.train.checkpoint import Checkpoints, load_checkpoint
from tests.evaluate.conftest import make_backbone
from tests.evaluate.detection.conftest import write_split
from tests.evaluate.test_segment import write_scenes

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(autouse=True)
def fp32(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on CPUs that compute in bf16, whose rounding is too coarse to tell that the results are the same."""
    folder = tmp_path_factory.mktemp("fp32")
    (folder / "sitecustomize.py").write_text("import torch\ntorch.cpu.get_capabilities = dict\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))  # of the other processes
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)


@pytest.fixture
def labeled(tmp_path: Path) -> Path:
    """61 training and 31 test images of ten classes, as files: nothing that two processes can share evenly."""
    for split, images in (("train", 61), ("test", 31)):
        source = shapes_source("train" if split == "train" else "test", images)
        for i in range(images):
            path = tmp_path / "labeled" / split / f"class{i % 10}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(source.load(i)).save(path)
    return tmp_path / "labeled"


@pytest.fixture
def encoder(backbone: Backbone, tmp_path: Path) -> Path:
    backbone.save(tmp_path / "encoder.safetensors")
    return tmp_path / "encoder.safetensors"


def by_one_and_by_two(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, Path]:
    """The command here and under torchrun; the folders of both, with the same files and one result in each."""
    one, two = folder / "one", folder / "two"
    main([*words, "--out", str(one)])
    printed = capsys.readouterr().out
    done = subprocess.run(
        [*TORCHRUN, "-m", "patchmix", *words, "--out", str(two)],
        env=os.environ | ENVIRONMENT | {"PATCHMIX_CACHE": str(folder / "other-cache")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("weights ") == printed.count("weights ") == 1, done.stdout
    assert files(two) == files(one)
    assert len(read_results(one)) == len(read_results(two)) == 1
    return one, two


def files(folder: Path) -> list[str]:
    """TensorBoard's have a time and a process in their names."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(name.partition(".tfevents")[0] for name in names)


def assert_same_results(one: Path, two: Path) -> None:
    (left,), (right,) = read_results(one), read_results(two)
    assert (left.metrics, left.images, left.settings, left.weights) == (
        right.metrics,
        right.images,
        right.settings,
        right.weights,
    )


def train_losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for path in folder.rglob("metrics.jsonl") for line in path.read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "train"]


def test_knn_without_torchrun(encoder: Path, labeled: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As torchrun starts them, without its seconds."""
    words = ["knn", str(encoder), "--data", str(labeled), "--k", "1", "5", "20"]
    main([*words, "--out", str(tmp_path / "one")])
    capfd.readouterr()
    place = ENVIRONMENT | {"WORLD_SIZE": "2", distributed.RENDEZVOUS: (tmp_path / "store").as_uri()}
    place["PATCHMIX_CACHE"] = str(tmp_path / "other-cache")
    command = [sys.executable, "-m", "patchmix", *words, "--out", str(tmp_path / "two")]
    processes = [subprocess.Popen(command, env=os.environ | place | {"RANK": rank}) for rank in "01"]
    assert [process.wait(120) for process in processes] == [0, 0]
    assert capfd.readouterr().out.count("weights ") == 1
    assert_same_results(tmp_path / "one", tmp_path / "two")
    assert len(list((tmp_path / "other-cache" / "features").glob("[!.]*"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("words", [["knn"], ["linear", "--protocol", "fast", "--epochs", "20"]], ids=["knn", "fast"])
def test_frozen_features(
    words: list[str], encoder: Path, labeled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [words[0], str(encoder), "--data", str(labeled), *words[1:]]
    assert_same_results(*by_one_and_by_two(words, tmp_path, capsys))


@pytest.mark.slow
def test_linear(encoder: Path, labeled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["linear", str(encoder), "--data", str(labeled), "--epochs", "5", "--batch-size", "20", "--workers", "0"]
    one, two = by_one_and_by_two(words, tmp_path, capsys)
    assert_same_results(one, two)
    left, right = (_method(folder) for folder in (one, two))
    for name in ("head.weight", "head.bias"):
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=1e-7)
    assert train_losses(two) == pytest.approx(train_losses(one), abs=1e-6)


def _method(folder: Path) -> dict[str, Any]:
    (checkpoints,) = folder.glob("*/checkpoints")
    last = Checkpoints(checkpoints).last
    assert last is not None
    state: dict[str, Any] = load_checkpoint(last)["method"]
    return state


@pytest.mark.slow
def test_finetune(encoder: Path, labeled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["finetune", str(encoder), "--data", str(labeled), "--epochs", "3", "--batch-size", "20", "--workers", "1"]
    one, two = by_one_and_by_two([*words, "--mixup", "0", "--cutmix", "0", "--drop-path", "0"], tmp_path, capsys)
    assert_same_results(one, two)
    for name in ("model", "model_ema"):
        left, right = (load_file(next(folder.glob(f"*/{name}.safetensors"))) for folder in (one, two))
        for key in left:
            torch.testing.assert_close(left[key], right[key], rtol=0, atol=1e-5, msg=key)
    assert train_losses(two) == pytest.approx(train_losses(one), abs=1e-5)


@pytest.mark.slow
def test_finetune_with_all_that_is_random(
    encoder: Path, labeled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["finetune", str(encoder), "--data", str(labeled), "--epochs", "1", "--batch-size", "20", "--workers", "0"]
    by_one_and_by_two(words, tmp_path, capsys)


@pytest.mark.slow
def test_detect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = tmp_path / "encoder.safetensors"
    make_backbone(depth=4).save(encoder)  # the pyramid takes four blocks
    write_split(tmp_path / "coco", "train2017", 9)
    write_split(tmp_path / "coco", "val2017", 5)
    words = ["detect", str(encoder), "--data", str(tmp_path / "coco"), "--workers", "0"]
    words += ["--epochs", "1", "--batch-size", "4", "--image-size", "64"]
    words += ["--channels", "16", "--head-dim", "16", "--smallest-anchor", "8", "--rois-per-image", "16"]
    words += ["--evaluate-every", "0"]
    one, _ = by_one_and_by_two(words, tmp_path / "training", capsys)
    words = ["detect", str(one), "--data", str(tmp_path / "coco"), "--eval-only", "--workers", "0"]
    one, two = by_one_and_by_two(words, tmp_path / "evaluation", capsys)
    assert_same_results(one, two)
    for kind in ("bbox", "segm"):
        left, right = (json.loads((folder / f"detections.{kind}.json").read_text()) for folder in (one, two))
        assert left == right and len({entry["image_id"] for entry in left}) == 5


@pytest.mark.slow
def test_segment(encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_scenes(tmp_path / "scenes" / "images", tmp_path / "scenes" / "masks", 11)
    words = ["segment", str(encoder), "--data", str(tmp_path / "scenes"), "--workers", "0", "--epochs", "3"]
    words += ["--batch-size", "4", "--ignore-index", "300", "--pictures", "1"]  # every pixel counts, in every process
    one, two = by_one_and_by_two(words, tmp_path, capsys)
    assert train_losses(two) == pytest.approx(train_losses(one), abs=1e-4)
    (left,), (right,) = read_results(one), read_results(two)
    assert left.metrics == pytest.approx(right.metrics, abs=0.01) and left.images == right.images == 2


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "words",
    [["detect", "detector", "--predict", "image.png"], ["report", "run"], ["show", "mix"], ["export", "run"], ["demo"]],
    ids=lambda words: words[0],
)
def test_what_one_process_does_is_refused_to_two(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "runs in one process, but 2 were started; start it without torchrun" in line
    assert not list(tmp_path.iterdir())


def test_two_of_the_same_training_at_a_time_are_refused(backbone: Backbone, labeled: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings = Linear("", str(labeled), epochs=1, batch_size=20, out=out, device="cpu", workers=0)
    first = linear(settings, backbone)
    (folder,) = out.glob("linear-*")
    with run_lock(folder), pytest.raises(ValueError, match=r"linear-\w+ is in use by process \d+ on"):
        linear(settings, backbone)
    assert linear(settings, backbone).metrics == first.metrics
