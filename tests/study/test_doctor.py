from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from patchmix.cli import main
from patchmix.config import to_yaml
from patchmix.recipes import RECIPES
from patchmix.study import doctor
from patchmix.study.doctor import Finding, examine, examine_run, print_findings


def one(findings: list[Finding], what: str) -> Finding:
    (found,) = [finding for finding in findings if finding.what == what]
    return found


def test_everything_has_a_verdict_and_what_is_not_well_a_remedy(tmp_path: Path) -> None:
    findings = examine(tmp_path / "runs")
    names = {finding.what for finding in findings}
    assert {"versions", "threads", "workers", "allocator", "runs", "--compile"} <= names
    assert len(names) == len(findings)
    for finding in findings:
        assert finding.found
        assert bool(finding.remedy) == (finding.verdict != "ok"), finding
    assert f"torch {torch.__version__.split('+')[0]}" in one(findings, "versions").found


def test_more_threads_than_cores_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "usable_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    found = one(list(doctor.cores()), "threads")
    assert found.verdict == "could be better" and "OMP_NUM_THREADS=2" in found.remedy
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert one(list(doctor.cores()), "threads").verdict == "ok"


def test_a_full_disk_and_a_folder_that_is_not_ours_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(list(doctor.storage(tmp_path / "new" / "runs")), "runs").found.endswith("writable")
    monkeypatch.setattr(doctor, "LEAST_FREE_GB", 1e9)
    assert one(list(doctor.storage(tmp_path)), "runs").verdict == "could be better"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert one(list(doctor.storage(tmp_path)), "runs").verdict == "missing"


def test_jemalloc_and_a_missing_compiler_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    assert one(list(doctor.memory()), "allocator").found == "libjemalloc.so.2"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "g++" in one(list(doctor.compiling()), "--compile").remedy


def test_a_remedy_keeps_its_brackets() -> None:
    out = io.StringIO()
    print_findings([Finding("a", "b", "pip install 'patchmix-ssl[dev]'", "missing")], Console(file=out, width=200))
    assert "pip install 'patchmix-ssl[dev]'" in out.getvalue()


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--runs", str(tmp_path)])
    assert "allocator" in capsys.readouterr().out
    main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert {"what", "found", "verdict", "remedy"} == set(findings[0])


# -------------------------------------------------------------------------------------------------------------- a run


def write_run(folder: Path, *, steps: int = 1000, until: float = 1.0, settings: Any = None, **curves: Any) -> Path:
    """A run of 100 logged lines and 21 evaluations. A curve is a function of the progress.

    The default is a healthy run: half of its way, kNN at a standstill, nothing to wait for.
    """
    usual = {"batch_size": 64, "area": (0.4, 1.0), "base_lr": 5e-4, "epochs": 300}
    config = RECIPES["paper"]("vit_tiny_patch4_32").replace(**usual | (settings or {}))
    default = {
        "oto": lambda p: 4.0 - 2.0 * min(p / 0.2, 1),
        "images_per_second": lambda p: 100,
        "data_wait": lambda p: 0,
    }
    default |= {"knn": lambda p: 0.5, "rank": lambda p: 30, "lidar": lambda p: 20, "mean_cosine": lambda p: 0.4}
    curves = {name: curve for name, curve in (default | curves).items() if curve is not None}
    monitored = {"knn", "rank", "lidar", "mean_cosine", "neighbors_kept", "knn_train", "knn_margin"} & curves.keys()
    rows: list[dict[str, Any]] = []
    for progress in until * np.arange(101) / 100:
        place = {"step": round(steps * progress), "epoch": progress, "progress": progress}
        values = {name: float(curve(progress)) for name, curve in curves.items() if name not in monitored}
        bounds = {"oto/chance": 4.0, "oto/floor": 0.0}
        rows.append({"kind": "train", **place, **values, **bounds})
        if round(100 * progress / until) % 5 == 0:
            rows.append({"kind": "monitor", **place, **{name: float(curves[name](progress)) for name in monitored}})
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:]) + '{"kind": "tr')
    return folder


def test_a_healthy_run_needs_nothing(tmp_path: Path) -> None:
    findings = examine_run(write_run(tmp_path / "run"))
    assert {finding.verdict for finding in findings} == {"ok"}, findings
    assert one(findings, "training").found == "100 % done: step 1,000, 64,000 images"
    assert one(findings, "features").found == "kNN 0.5, LiDAR 20, effective rank 30, mean cosine 0.4"
    assert one(findings, "oto").found == "50 % of the way from chance to floor after 100 % of the training"
    trend = one(findings, "trend").found.replace("-0.0", "+0.0")
    assert trend == "kNN 50.0; twice the training would give about +0.0 points (± 0.0)"
    assert one(findings, "change first").found == "nothing"


def test_features_are_compared_with_those_of_the_start(tmp_path: Path) -> None:
    guarded = {"neighbors_kept": lambda p: 1 - p, "knn_margin": lambda p: 0.02, "settings": {"encoder_lr": 0.1}}
    for fallen, verdict in ((0.01, "ok"), (0.05, "bad")):
        run = write_run(tmp_path / verdict, knn_train=lambda p, fallen=fallen: 0.5 - fallen * p, **guarded)
        assert (found := one(examine_run(run), "start")).verdict == verdict
    assert found.found == "kNN 50.0 → 45.0 %"
    assert "halve --base-lr (now 0.0005) or --encoder-lr (now 0.1)" in found.remedy


@pytest.mark.parametrize(
    ("steps", "settings", "remedy"),
    [
        (1000, {"area": (0.08, 1.0)}, "--area 0.3 1.0 (now 0.08 1)"),
        (1000, {}, "--momentum 0.98 (now 0.996: keys follow too slowly for 1,000 steps)"),
        (9000, {}, "--base-lr 0.00025 (now 0.0005)"),
        (1000, {"momentum_encoder": False}, "--base-lr 0.00025 (now 0.0005)"),
        (300, {}, "300 steps in all are few"),
        (9000, {"method": "dino"}, "--area 0.6 1.0 (now 0.4 1)"),
        (9000, {"method": "swav"}, "--epsilon 0.03 (now 0.05)"),
        (9000, {"method": "simclr"}, "--batch-size"),
    ],
)
def test_a_loss_at_chance_is_bad_and_has_the_remedy_that_fits(
    steps: int, settings: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", steps=steps, until=0.6, settings=settings, oto=lambda p: 3.84)
    findings = examine_run(run)
    stuck = one(findings, "oto")
    assert stuck.verdict == "bad"
    assert stuck.found == "4 % of the way from chance to floor after 60 % of the training"
    assert remedy in stuck.remedy
    assert one(findings, "change first").found == f"oto: {stuck.remedy}"


def test_the_start_of_a_run_is_not_judged(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", until=0.1, oto=lambda p: 4.1)
    assert one(examine_run(run), "oto").found.endswith("after 10 % of the training: too early to tell")
    (run / "metrics.jsonl").write_text("")
    (finding,) = examine_run(run)
    assert "nothing logged yet" in finding.found


def test_a_loss_that_rises_again_asks_for_a_lower_rate(tmp_path: Path) -> None:
    curve = {"oto": lambda p: 2.0 if p < 0.6 else 3.0}
    found = one(examine_run(write_run(tmp_path / "a", **curve)), "oto")
    assert "25 % of the way" in found.found and "but was at 50 %" in found.found
    assert found.remedy == "halve --base-lr (now 0.0005), or set --clip-grad 1"
    by_plan = write_run(tmp_path / "b", settings={"num_mix": (2, 3), "num_mix_stages": True}, **curve)
    assert one(examine_run(by_plan), "oto").verdict == "ok"


def test_a_solved_contrast_asks_for_a_harder_one(tmp_path: Path) -> None:
    found = one(examine_run(write_run(tmp_path / "run", oto=lambda p: 4.0 - 3.9 * min(p / 0.2, 1))), "oto")
    assert found.verdict == "could be better" and "--temperature (now 0.2)" in found.remedy


def test_a_teacher_that_tells_nothing_apart_is_at_chance(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", settings={"method": "dino"}, oto=lambda p: 4.0)
    text = (run / "metrics.jsonl").read_text().replace('"oto/floor": 0.0', '"oto/floor": 4.0')
    (run / "metrics.jsonl").write_text(text)
    assert one(examine_run(run), "oto").verdict == "bad"


def test_collapse_comes_first(tmp_path: Path) -> None:
    findings = examine_run(write_run(tmp_path / "run", rank=lambda p: 30 if p < 0.5 else 1.2, data_wait=lambda p: 0.3))
    assert one(findings, "features").verdict == "bad" and "effective rank 1.2" in one(findings, "features").found
    assert one(findings, "change first").found.startswith("features: ")


def test_the_gain_of_a_doubling_is_the_slope_over_log_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    noise = {"knn": lambda p: 0.4 + 0.031 * np.log2(max(p, 1e-3)) + 0.001 * rng.normal()}
    found = one(examine_run(write_run(tmp_path / "run", **noise)), "trend")
    gain, error = (float(part) for part in found.found.split("about ")[1].rstrip(")").split(" points (± "))
    assert gain == pytest.approx(3.1, abs=0.4) and 0 < error < 0.5
    assert found.verdict == "could be better" and found.remedy == "train longer: --epochs 600"
    budget = write_run(tmp_path / "budget", settings={"budget": "45min"}, **noise)
    assert one(examine_run(budget), "trend").remedy == "train longer: --budget 90min"


def test_a_gain_within_the_noise_is_none_and_a_loss_is_told(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    noise = write_run(tmp_path / "noise", knn=lambda p: 0.5 + 0.02 * rng.normal())
    assert one(examine_run(noise), "trend").verdict == "ok"
    falls = one(examine_run(write_run(tmp_path / "falls", knn=lambda p: 0.5 - 0.1 * p)), "trend")
    assert falls.verdict == "could be better" and "earlier checkpoint" in falls.remedy


def test_waiting_for_data_and_slowing_down_are_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", data_wait=lambda p: 0.34, images_per_second=lambda p: 100 - 40 * p)
    findings = examine_run(run)
    assert one(findings, "data").found == "34 % of the time spent waiting for images"
    assert "--workers (now 2)" in one(findings, "data").remedy
    assert one(findings, "speed").found == "63.6 images per second, 95.6 at the start"
    assert one(findings, "speed").verdict == "could be better"
    assert one(findings, "change first").found.startswith("data: raise --workers")


def test_a_run_without_labels_is_judged_by_lidar_or_rank(tmp_path: Path) -> None:
    rising = one(examine_run(write_run(tmp_path / "a", knn=None, lidar=lambda p: 10 + 20 * p)), "trend")
    assert (
        "LiDAR 30.0; twice the training would give about +10.4 (± 0.6)" in rising.found
        and "--epochs 600" in rising.remedy
    )
    early = write_run(tmp_path / "early", until=0.001, knn=None, lidar=None, rank=None, mean_cosine=None)
    text = (early / "metrics.jsonl").read_text().replace('"epoch": 0.001', '"epoch": 2.0')  # of 2,000 epochs
    (early / "metrics.jsonl").write_text(text)
    assert one(examine_run(early), "trend").found.endswith("--monitor-every 100 gives 20")
    older = write_run(tmp_path / "b", knn=None, lidar=None, rank=lambda p: 30 - 15 * p)
    assert one(examine_run(older), "trend").verdict == "ok", "the rank of good runs falls, too"


def test_a_real_run_and_folders_that_are_none(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["doctor", str(trained_run), "--json"])
    findings = [Finding(**each) for each in json.loads(capsys.readouterr().out)]
    names = {finding.what for finding in findings}
    assert {"training", "features", "oto", "mto", "data", "trend", "change first"} <= names
    assert "LiDAR" in one(findings, "features").found and "too few" in one(findings, "trend").found
    main(["doctor", str(trained_run)])
    assert "of the way from chance to floor" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "config.yaml").write_bytes((trained_run / "config.yaml").read_bytes())
    for folder, message in ((tmp_path / "none", "there is no configuration"), (tmp_path, "has no metrics.jsonl")):
        with pytest.raises(SystemExit) as stop:
            main(["doctor", str(folder)])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count("\n") == 1 and message in error


def test_an_untrained_network_is_not_called_collapsed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rank=lambda p: 1.2)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[:-1]]
    early = [row for row in rows if row["kind"] == "train" or row["step"] == 0]  # --monitor-every 0, before the end
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in early))
    assert any(row["kind"] == "monitor" for row in early)
    assert "features" not in {finding.what for finding in examine_run(run)}
