"""The trackers with their real libraries, offline (`make test-extras`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import patchmix
from patchmix.train.log import read_metrics
from tests.conftest import SMALL_RUN


def train(out: Path, **tracker: str) -> list[dict[str, Any]]:
    """A short run; its rows of training."""
    small = {"recipe": "demo", "model": "vit_tiny_patch8_32", "epochs": 2, "batch_size": 32, "workers": 0}
    patchmix.pretrain("shapes:64", out, **small, **SMALL_RUN, **tracker)
    return [row for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "train"]


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb: make test-extras")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    rows = train(tmp_path / "run", wandb="birds")
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    assert b"train/loss" in content and b"base_lr" in content
    assert content.count(b"train/loss") >= len(rows)


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow: make test-extras")
    uri = f"file://{tmp_path / 'mlruns'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    rows = train(tmp_path / "run", mlflow="birds")
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("birds")
    (run,) = client.search_runs([experiment.experiment_id])
    logged = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in logged] == [(row["step"], row["loss"]) for row in rows]
    assert {"train/oto.chance", "monitor/rank"} <= set(run.data.metrics)
    assert run.data.params["train.batch_size"] == "32" and run.info.status == "FINISHED"


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    pytest.importorskip("trackio", reason="needs trackio: make test-extras")
    from trackio.sqlite_storage import SQLiteStorage

    rows = train(tmp_path / "run", trackio="birds")
    logged = SQLiteStorage.get_logs("birds", "run")
    losses = [row["train/loss"] for row in logged if "train/loss" in row]
    assert losses == pytest.approx([row["loss"] for row in rows])
