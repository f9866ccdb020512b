from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
import torch
from rich.console import Console

from patchmix.cli import main
from patchmix.study import doctor
from patchmix.study.doctor import Finding, examine, print_findings


def one(findings: list[Finding], what: str) -> Finding:
    (found,) = [finding for finding in findings if finding.what == what]
    return found


def test_everything_has_a_verdict_and_what_is_not_well_a_remedy(tmp_path: Path) -> None:
    findings = examine(tmp_path / "runs")
    names = {finding.what for finding in findings}
    assert {"versions", "threads", "workers", "allocator", "JPEG", "WEBP", "runs", "--compile"} <= names
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


def test_an_extra_that_is_not_installed_is_named_with_its_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EXTRAS", {"no_such_module": "wandb"})
    out = io.StringIO()
    print_findings(list(doctor.extras()), console=Console(file=out, width=200))
    assert "pip install 'patchmix-ssl[wandb]'" in out.getvalue()


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--runs", str(tmp_path)])
    assert "allocator" in capsys.readouterr().out
    main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert {"what", "found", "verdict", "remedy"} == set(findings[0])
