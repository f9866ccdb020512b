"""The folder for the Hugging Face Hub: its card, timm and transformers that open it, and the upload to a fake Hub."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from patchmix.cli import main
from patchmix.evaluate.results import read_results
from patchmix.interop.exporting import export
from patchmix.interop.loading import load_backbone
from patchmix.report.share import model_card


def test_the_card_has_cost_and_results(own_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["knn", str(own_run), "--data", "shapes:80", "--device", "cpu"])
    main(["knn", str(own_run), "--data", "shapes:80", "--device", "cpu", "--k", "5"])
    main(["export", str(own_run), "--out", str(tmp_path / "hub"), "--format", "huggingface", "--license", "cc0-1.0"])
    card = (tmp_path / "hub" / "README.md").read_text()
    header, _, text = card.removeprefix("---\n").partition("---\n")
    assert "license: cc0-1.0\n" in header and "library_name: timm" in header
    for result, name in zip(read_results(own_run), ("kNN", "kNN (k 5)"), strict=True):
        assert f"| {name} | shapes:80 | {result.images:,} | {result.headline} | {result.headline_interval} |" in text
    for fact in ("| trained on | shapes (train) |", "| training images | 64 |", "| optimizer steps | 4 |"):
        assert fact in text
    flops = float(re.findall(r"\| training FLOPs \| (\S+) \|", text)[0])
    assert 4 * 32 * 1e6 < flops < 4 * 32 * 1e8  # 4 steps of 32 images
    assert load_backbone(tmp_path / "hub").digest().startswith(re.findall(r"\| SHA-256 .* \| (\w+) \|", text)[0])


def test_transformers_opens_the_folder(trained_run: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: make test-extras")
    backbone = load_backbone(trained_run)
    export(backbone, tmp_path / "hub", "huggingface")
    model = transformers.AutoModel.from_pretrained(tmp_path / "hub").eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        tokens = model(pixel_values=images).last_hidden_state
        torch.testing.assert_close(tokens[:, 0], backbone.encoder()(images), atol=1e-5, rtol=0)


# ---------------------------------------------------------------------------------------------------------- fake hub


class FakeHub(BaseHTTPRequestHandler):
    """What the upload needs of the Hub's HTTP interface; every file is accepted as a regular one."""

    def do_GET(self) -> None:
        assert isinstance(self.server, Hub)
        self.answer({"id": "me/vit", "siblings": []}, self.server.status)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub = self.server
        assert isinstance(hub, Hub)
        hub.paths.append(self.path)
        if hub.status != 200:
            self.answer({"error": "Invalid username or password."}, hub.status)
        elif self.path == "/api/repos/create":
            hub.created = json.loads(body)
            self.answer({"url": f"{hub.url}/me/vit"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            kinds = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in files]
            self.answer({"files": kinds})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer({"commitUrl": f"{hub.url}/me/vit/commit/0123", "commitOid": "0123", "success": True})
        else:
            self.answer({})

    def answer(self, content: object, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Hub(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHub)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.status = 200
        self.created: dict[str, object] = {}
        self.files: dict[str, bytes] = {}
        self.paths: list[str] = []


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_push_sends_the_folder(own_run: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["push", str(own_run), "me/vit", "--send", "--json", "--private"])
    result = json.loads(capsys.readouterr().out)
    assert result["url"] == f"{hub.url}/me/vit/commit/0123"
    assert hub.created["name"] == "vit" and hub.created["organization"] == "me"
    assert hub.created.get("visibility") == "private" or hub.created.get("private") is True
    assert {"config.json", "model.safetensors", "README.md"} <= set(hub.files)
    for name, content in hub.files.items():
        (tmp_path / name).write_bytes(content)
    assert load_backbone(tmp_path).digest() == load_backbone(own_run).digest()
    assert "patchmix.load" in hub.files["README.md"].decode()


def test_push_sends_nothing_unless_asked(own_run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    main(["push", str(own_run), "me/vit"])
    out = capsys.readouterr().out
    assert "model.safetensors" in out and "nothing was sent" in out
    assert hub.paths == []


@pytest.mark.parametrize(("reason", "remedy"), [("refused", "hf auth login"), ("offline", "check the connection")])
def test_push_says_in_one_line_why_it_failed(
    own_run: Path,
    hub: Hub,
    reason: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub.status = 401
    if reason == "offline":
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    with pytest.raises(SystemExit) as stop:
        main(["push", str(own_run), "me/vit", "--send"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and remedy in error


def test_push_needs_a_name_of_two_parts(own_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["push", str(own_run), "vit"])
    assert "write it as user/name" in capsys.readouterr().err


def test_a_readme_is_not_overwritten_unasked(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(SystemExit):
        main(["export", str(trained_run), "--out", str(tmp_path), "--format", "huggingface"])
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"


def test_the_card_says_where_weights_come_from(trained_run: Path) -> None:
    backbone = load_backbone(trained_run)
    for origin, row in (
        ({"start": {"weights": {"source": "timm:vit"}}}, "| continued from | timm:vit |"),
        ({"format": "dino", "file": "dino.pth"}, "| converted from | dino.pth |"),
    ):
        assert row in model_card(replace(backbone, origin=origin), str(trained_run), "user/name")


def test_a_license_needs_a_card(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", str(trained_run), "--out", str(tmp_path / "a.safetensors"), "--license", "mit"])
    assert "--license is for the model card; add --format huggingface" in capsys.readouterr().err


def test_the_card_has_small_means_and_deviations(trained_run: Path) -> None:
    backbone = replace(load_backbone(trained_run), mean=(0.0312, 0.02, 0.0004), std=(0.0126, 0.01, 0.0003))
    card = model_card(backbone, str(trained_run), "user/name")
    assert "minus [0.0312, 0.02, 0.0004], over [0.0126, 0.01, 0.0003]" in card
