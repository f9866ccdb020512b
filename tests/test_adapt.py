"""`patchmix adapt`: what is taken from the weights, what stays as it is, and the guard that compares with the start."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.optim import param_groups_layer_decay

import patchmix
from patchmix.cli import main
from patchmix.config import read_config
from patchmix.data.sources import open_source
from patchmix.evaluate.monitor import FEWEST_KEPT, Guard, guard_verdict
from patchmix.interop.backbone import fitted
from patchmix.interop.loading import load_backbone
from patchmix.nn.vit import create_encoder
from patchmix.progress import OUTPUT
from patchmix.report.page import read_record, verdict
from patchmix.train.checkpoint import load_checkpoint
from patchmix.train.optimizer import build_optimizer, set_hyperparameters
from tests.conftest import SMALL_RUN

SMALL = {k: v for k, v in SMALL_RUN.items() if k not in ("dim", "depth", "mean")}
SMALL |= {"epochs": 2, "batch_size": 32, "workers": 0, "device": "cpu", "drop_path": 0.0}


SMALL_CONV = {k: v for k, v in SMALL.items() if k != "stem"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images without labels."""
    folder = tmp_path_factory.mktemp("photos")
    source = open_source("shapes:64")
    for i in range(64):
        cv2.imwrite(str(folder / f"{i}.png"), source.load(i))
    return folder


# ----------------------------------------------------------------------------------------------- weights that fit


def test_weights_are_resampled_as_timm_does_and_untouched_at_their_own_size() -> None:
    sizes: dict[str, Any] = {"dim": 24, "depth": 1, "heads": 2}
    small = create_encoder("vit_tiny_patch8_32", **sizes)
    torch.nn.init.normal_(small.pos_embed)
    weights = small.state_dict()
    same = fitted(weights, create_encoder("vit_tiny_patch8_32", **sizes))
    assert all(torch.equal(same[name], tensor) for name, tensor in weights.items())
    for name, in_chans, patch, pixels in [
        ("vit_tiny_patch8_48", 3, 8, 48),
        ("vit_tiny_patch4_32", 3, 4, 32),
        ("vit_tiny_patch8_32", 1, 8, 32),
        ("vit_tiny_patch4_48", 5, 4, 48),
    ]:
        encoder = create_encoder(name, in_chans=in_chans, **sizes)
        encoder.load_state_dict(fitted(weights, encoder))
        arguments = {"img_size": pixels, "patch_size": patch, "embed_dim": 24, "depth": 1, "num_heads": 2}
        cfg = {"state_dict": weights, "num_classes": 0, "hf_hub_id": None, "url": "", "custom_load": False}
        theirs = timm.create_model(
            "vit_tiny_patch16_224",
            pretrained=True,
            num_classes=0,
            in_chans=in_chans,
            pretrained_cfg_overlay=cfg,
            **arguments,
        )
        images = torch.rand(2, in_chans, pixels, pixels)
        torch.testing.assert_close(encoder.eval()(images), theirs.eval()(images))


def test_gray_weights_do_not_become_colored() -> None:
    weights = create_encoder("vit_tiny_patch8_32", in_chans=1, dim=24, depth=1, heads=2).state_dict()
    with pytest.raises(ValueError, match="take 1 channels, which can't become 3"):
        fitted(weights, create_encoder("vit_tiny_patch8_32", dim=24, depth=1, heads=2))


# ------------------------------------------------------------------------------------------------- learning rates


def test_layer_decay_is_timms_and_the_encoder_starts_after_the_heads() -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = create_encoder("vit_tiny_patch8_32", dim=24, depth=3, heads=2)
            self.head = torch.nn.Linear(24, 5)

    both = Both()
    optimizer = build_optimizer(both, encoder=both.encoder, encoder_lr=0.1, layer_decay=0.5, head_warmup=0.2)
    expected = {id(p): 1.0 for p in both.head.parameters()}
    for group in param_groups_layer_decay(both.encoder, layer_decay=0.5):
        expected |= {id(p): 0.1 * 0.5 * group["lr_scale"] for p in group["params"]}
    found = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    assert found == expected
    assert found[id(both.encoder.blocks[2].attn.qkv.weight)] == 0.05
    assert found[id(both.encoder.cls_token)] == 0.1 * 0.5**4

    heads, encoder = (
        next(g for g in optimizer.param_groups if any(p is wanted for p in g["params"]))
        for wanted in (both.head.weight, both.encoder.blocks[2].attn.qkv.weight)
    )
    for progress, rise in {0.0: 0.0, 0.1: 0.0, 0.2: 0.0, 0.3: 0.5, 0.4: 1.0, 0.9: 1.0}.items():
        set_hyperparameters(optimizer, lr=2.0, weight_decay=0.1, progress=progress)
        assert heads["lr"] == 2.0 and encoder["lr"] == pytest.approx(2.0 * 0.05 * rise)


# ------------------------------------------------------------------------------------------------------------ runs


def test_adapt_takes_model_and_normalization_from_the_weights(trained_run: Path, tmp_path: Path) -> None:
    run = patchmix.adapt(trained_run, "shapes:64", tmp_path / "a", image_size=48, freeze_blocks=2, **SMALL)
    config, start = read_config(run.path), load_backbone(trained_run)
    assert config.model.name == "vit_tiny_patch8_32" and config.model.image_size == 48 and config.model.dim == 24
    assert config.views.mean == start.mean == (0.4, 0.5, 0.6)
    adapted = run.load()
    assert adapted.architecture.image_size == 48
    below = ("patch_embed.", "cls_token", "blocks.0.", "blocks.1.")
    frozen = {name for name in start.weights if name.startswith(below)}
    assert all(torch.equal(adapted.weights[name], start.weights[name]) for name in frozen)
    moved = {name for name, tensor in adapted.weights.items() if name not in frozen | {"pos_embed"}}
    assert all(not torch.equal(adapted.weights[name], start.weights[name]) for name in moved if "weight" in name)
    assert torch.equal(adapted.weights["pos_embed"], fitted(start.weights, adapted.encoder())["pos_embed"])
    record = adapted.origin["start"]
    assert record["weights"]["source"] == str(trained_run) and record["weights"]["digest"] == start.digest()
    assert {"knn_train", "rank", "neighbors_kept"} <= record["start"].keys() and record["start"]["neighbors_kept"] == 1


def test_only_the_heads_learn_in_their_warm_up(trained_run: Path, tmp_path: Path) -> None:
    run = patchmix.adapt(trained_run, "shapes:64", tmp_path / "a", head_warmup=0.99, **SMALL)
    start = load_backbone(trained_run)
    assert run.load().digest() == start.digest()
    state = load_checkpoint(run.path / "checkpoints" / "last")
    heads = {name: tensor for name, tensor in state["method"].items() if name.startswith("predictor.0.")}
    fresh = patchmix.adapt(trained_run, "shapes:64", tmp_path / "b", head_warmup=0.99, **SMALL | {"epochs": 0.5})
    less = load_checkpoint(fresh.path / "checkpoints" / "last")["method"]
    assert heads and all(not torch.equal(tensor, less[name]) for name, tensor in heads.items())


def test_a_frozen_stem_keeps_its_statistics(tmp_path: Path) -> None:
    model = {"recipe": "demo", "model": "vit_tiny_patch8_32", "stem": "conv", "dim": 24, "depth": 2, "heads": 2}
    start = patchmix.pretrain("shapes:64", tmp_path / "start", **SMALL | model).load()
    warm = patchmix.adapt(tmp_path / "start", "shapes:64", tmp_path / "a", **SMALL_CONV, head_warmup=0.99)
    assert warm.load().digest() == start.digest()  # running statistics included
    run = patchmix.adapt(tmp_path / "start", "shapes:64", tmp_path / "b", **SMALL_CONV, freeze_blocks=1)
    state = load_checkpoint(run.path / "checkpoints" / "last")["method"]
    for name, tensor in start.weights.items():
        if name.startswith(("patch_embed.", "blocks.0.")):
            assert torch.equal(state[f"encoder.{name}"], tensor), name
            assert torch.equal(state[f"momentum_copy.network.0.{name}"], tensor), name
    free = patchmix.adapt(tmp_path / "start", "shapes:64", tmp_path / "c", **SMALL_CONV).load()
    assert not torch.equal(
        free.weights["patch_embed.proj.1.running_mean"], start.weights["patch_embed.proj.1.running_mean"]
    )


@pytest.mark.parametrize("data", ["shapes:2048", "photos"])
def test_a_run_that_goes_wrong_says_so_and_keeps_the_best(
    data: str, photos: Path, trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"base_lr": 30.0, "encoder_lr": 1.0, "layer_decay": 1.0, "head_warmup": 0.0, "warmup_epochs": 0.0}
    wrong |= {"epochs": 3} if data == "photos" else {"epochs": 0.5, "batch_size": 64, "monitor_bank": 2048}
    run = patchmix.adapt(trained_run, photos if data == "photos" else data, tmp_path / "a", **SMALL | wrong)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("warning: the run ends below its start (") and "encoder.safetensors is" in last
    exported, best = load_file(run.encoder_path), load_file(run.path / "best.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in best.items())
    kept = run.load().origin
    assert f"step {kept['step']}," in last or (kept["step"] == 0 and "the starting weights" in last)
    assert last.removeprefix("warning: ") == guard_verdict(kept["start"])
    said, good = verdict(read_record(run.path))
    assert "the run ends below its start (" in said and not good  # in the report
    newest = load_backbone(run.path / "checkpoints" / "last")
    assert newest.digest() != run.load().digest()


def test_a_resumed_run_ends_in_the_same_weights_and_knows_its_start(trained_run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(trained_run, tmp_path / "weights", symlinks=True)
    settings = SMALL | {"keep_checkpoints": 9, "checkpoint_epochs": 0.5}
    whole = patchmix.adapt(moved, "shapes:64", tmp_path / "whole", **settings)
    (tmp_path / "cut").mkdir()
    shutil.copytree(whole.path / "checkpoints", tmp_path / "cut" / "checkpoints", symlinks=True)
    shutil.copy(whole.path / "best.safetensors", tmp_path / "cut")
    for step in (3, 4):
        (tmp_path / "cut" / "checkpoints" / f"step-{step:09d}.pt").unlink()
    shutil.rmtree(moved)  # a resumed run needs its own files only
    again = patchmix.adapt(moved, "shapes:64", tmp_path / "cut", resume="auto", **settings)
    assert again.load().digest() == whole.load().digest()
    ends = [load_checkpoint(run.path / "checkpoints" / "last")["start"] for run in (whole, again)]
    assert all(torch.equal(ends[0].pop(name), ends[1].pop(name)) for name in ("neighbors", "correct"))
    assert ends[0] == ends[1] and "knn_margin" in ends[0]["last"]


@pytest.mark.parametrize("kept", [True, False])
def test_the_best_weights_follow_into_another_folder(
    kept: bool, photos: Path, trained_run: Path, tmp_path: Path
) -> None:
    wrong = {"base_lr": 30.0, "encoder_lr": 1.0, "layer_decay": 1.0, "head_warmup": 0.0, "warmup_epochs": 0.0}
    settings = SMALL | wrong | {"epochs": 3, "keep_checkpoints": 9}
    first = patchmix.adapt(trained_run, photos, tmp_path / "a", **settings)
    assert first.load().origin["step"] == 0
    if not kept:
        (first.path / "best.safetensors").unlink()
    middle = first.path / "checkpoints" / "step-000000002.pt"
    second = patchmix.adapt(trained_run, photos, tmp_path / "b", resume=middle, **settings)
    assert (second.load().origin["step"] == 0) == kept


def test_pretrain_says_where_the_weights_expect_another_normalization(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"model": "same", "recipe": "demo", "epochs": 0.5, "init_from": str(trained_run)}
    patchmix.pretrain("shapes:64", tmp_path / "a", **SMALL | sizes)
    assert "warning: the weights expect mean (0.4, 0.5, 0.6), std" in capsys.readouterr().out
    monkeypatch.setenv(OUTPUT, "quiet")
    patchmix.pretrain("shapes:64", tmp_path / "b", **SMALL | sizes)
    assert "warning: the weights expect mean (0.4, 0.5, 0.6), std" in capsys.readouterr().out


def test_mistakes(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in {
        ("adapt", "nothing", "shapes:64"): "does not exist",
        ("adapt", str(trained_run)): "DATA is missing",
        ("adapt", str(trained_run), "shapes:64", "--freeze-blocks", "9", "--batch-size", "8"): "the model has 4 blocks",
        ("pretrain", "shapes:64", "--recipe", "adapt"): "needs weights to start from; give --init-from WEIGHTS",
    }.items():
        with pytest.raises(SystemExit) as stop:
            main([*arguments, "--out", str(tmp_path / "x")])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and message in error and error.count("\n") == 1, error


# ----------------------------------------------------------------------------------------------------------- guard


def test_kept_neighbors_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(50, 4, generator=generator)
    after = before + 0.5 * torch.randn(50, 4, generator=generator)

    def neighbors(features: torch.Tensor) -> list[set[int]]:
        vectors = features.double().numpy()
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return [set([j for j in np.argsort(-vectors @ v) if j != i][:20]) for i, v in enumerate(vectors)]

    expected = np.mean([len(a & b) / 20 for a, b in zip(neighbors(before), neighbors(after), strict=True)])
    compared = Guard({}, lambda step: None)
    assert compared.neighbors_kept(before) == 1.0 and compared.neighbors_kept(before * 3) == 1.0
    assert 0.4 < expected < 0.9 and compared.neighbors_kept(after) == pytest.approx(expected)
    assert Guard(compared.state, compared.keep).neighbors_kept(after) == pytest.approx(expected)  # as after a resume


def test_guard_with_labels() -> None:
    kept: list[int] = []
    guard = Guard({}, kept.append)
    for step, knn in [(0, 0.50), (10, 0.55), (20, 0.53), (30, 0.49)]:
        warned = guard(step, {"knn_train": knn, "rank": 5.0, "neighbors_kept": 0.0, "lidar": 1.0})
        assert (warned is not None) == (knn < 0.5)
    assert kept == [0, 10] and warned == "the features are below those of the start: kNN 50.0 → 49.0 %"
    assert guard_verdict(guard.state) == (
        "the run ends below its start (kNN 50.0 → 49.0 %): encoder.safetensors is that of step 10, the best point "
        "(not step 30)"
    )
    assert guard(40, {"knn_train": 0.56}) is None and kept == [0, 10, 40] and guard_verdict(guard.state) is None


def test_margin_is_the_noise_of_a_paired_comparison() -> None:
    generator = np.random.default_rng(0)
    before, flipped = generator.random(400) < 0.6, generator.random(400) < 0.1
    after = before ^ flipped
    compared = Guard({}, lambda step: None)
    assert compared.margin(torch.from_numpy(before)) == 0.0
    draws = generator.integers(400, size=(4000, 400))  # a bootstrap over images
    spread = (after[draws].mean(axis=1) - before[draws].mean(axis=1)).std()
    assert compared.margin(torch.from_numpy(after)) == pytest.approx(1.96 * spread, rel=0.05)


def test_guard_leaves_noise_alone() -> None:
    guard = Guard({}, lambda step: None)
    guard(0, {"knn_train": 0.50, "knn_margin": 0.0})
    assert guard(1, {"knn_train": 0.49, "knn_margin": 0.02}) is None and guard_verdict(guard.state) is None
    assert guard(2, {"knn_train": 0.47, "knn_margin": 0.02}) is not None and guard_verdict(guard.state) is not None


def test_guard_without_labels() -> None:
    kept: list[int] = []
    guard = Guard({}, kept.append)
    few, some = FEWEST_KEPT / 2, 2 * FEWEST_KEPT
    for step, rank, share in [(0, 20.0, 1.0), (1, 90.0, few), (2, 21.0, some), (2, 19.0, 0.9), (3, 15.0, 0.9)]:
        guard(step, {"rank": rank, "neighbors_kept": share})
        assert (guard_verdict(guard.state) is None) == (step in (0, 2))
    assert kept == [0, 2] and "effective rank 20.0 → 15.0" in str(guard_verdict(guard.state))
