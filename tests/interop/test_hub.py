"""Weights by name, from a stand-in of the hub on this machine: what is fetched, what is refused, what is random."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import timm
import torch
from safetensors.torch import save

from patchmix.interop.backbone import Backbone
from patchmix.interop.exporting import export
from patchmix.interop.loading import load_backbone

COMMIT = "c0ffee" + 34 * "0"
TINY = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


class Hub:
    """Answers as the hub does for files of models: HEAD with commit and SHA-256, GET with the bytes."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}  # "user/name/file"
        self.stated: dict[str, str] = {}  # SHA-256 of those whose true one is not told
        self.downloads: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self, body: bool = True) -> None:
                user, name, _, _, *path = self.path.strip("/").split("?")[0].split("/")  # user/name/resolve/REVISION/…
                place = "/".join([user, name, *path])
                known = place in outer.files
                self.send_response(200 if known else 404)
                data = outer.files.get(place, b"")
                if not known:
                    repository = any(file.startswith(f"{user}/{name}/") for file in outer.files)
                    self.send_header("X-Error-Code", "EntryNotFound" if repository else "RepoNotFound")
                self.send_header("X-Repo-Commit", COMMIT)
                digest = outer.stated.get(place, hashlib.sha256(data).hexdigest())
                self.send_header("ETag", f'"{digest}"')
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if body:
                    outer.downloads.append(place)
                    self.wfile.write(data)

            def do_HEAD(self) -> None:
                self.do_GET(body=False)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    hub = Hub()
    threading.Thread(target=hub.server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


@pytest.fixture(scope="module")
def published() -> dict[str, torch.Tensor]:
    """What timm has on the hub: a whole model with its classifier."""
    torch.manual_seed(3)
    return {name: tensor.clone() for name, tensor in timm.create_model("vit_tiny_patch16_224").state_dict().items()}


@pytest.mark.parametrize("name", [TINY, TINY.partition(".")[0]])
def test_a_timm_name_means_pretrained_weights(name: str, hub: Hub, published: dict[str, torch.Tensor]) -> None:
    place = f"timm/{TINY}/model.safetensors"
    hub.files[place] = save(published)
    loaded = load_backbone(f"timm:{name}")
    assert loaded.name == TINY and loaded.mean == (0.5, 0.5, 0.5)  # not ImageNet's
    assert set(loaded.weights) == set(published) - {"head.weight", "head.bias"}
    assert all(torch.equal(tensor, published[key]) for key, tensor in loaded.weights.items())
    digest = hashlib.sha256(hub.files[place]).hexdigest()
    assert loaded.origin["repository"] == f"timm/{TINY}" and loaded.origin["commit"] == COMMIT
    assert loaded.origin["sha256"] == digest
    load_backbone(f"timm:{name}")
    assert hub.downloads == [place]  # once


def test_offline_is_one_line_and_the_cache_is_enough(
    hub: Hub, published: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files[f"timm/{TINY}/model.safetensors"] = save(published)
    first = load_backbone(f"timm:{TINY}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert load_backbone(f"timm:{TINY}").digest() == first.digest()
    with pytest.raises(
        ValueError, match=r"can't be reached; fetch it .* `hf download timm/vit_small.*give DIR instead"
    ):
        load_backbone("timm:vit_small_patch16_224.dino")


def test_a_wrong_digest_is_refused(hub: Hub, published: dict[str, torch.Tensor]) -> None:
    place = f"timm/{TINY}/model.safetensors"
    hub.files[place], hub.stated[place] = save(published), 64 * "a"
    with pytest.raises(ValueError, match=r"is damaged: its SHA-256 is .*the hub states aaaaaaaaaaaa…; remove"):
        load_backbone(f"timm:{TINY}")


def test_only_safetensors_are_fetched(hub: Hub) -> None:
    hub.files[f"timm/{TINY}/pytorch_model.bin"] = b"\x80"
    with pytest.raises(ValueError, match=r"has no model\.safetensors; only safetensors are fetched"):
        load_backbone(f"timm:{TINY}")
    assert hub.downloads == []


def test_what_was_exported_comes_back_from_the_hub(hub: Hub, backbone: Backbone, tmp_path: Path) -> None:
    for file in export(backbone, tmp_path / "out", "huggingface").files:
        hub.files[f"me/mine/{file.name}"] = file.read_bytes()
    loaded = load_backbone("hf://me/mine")
    assert loaded.digest() == backbone.digest() and loaded.architecture == backbone.architecture
    assert loaded.mean == backbone.mean and loaded.name == "me/mine"
    assert loaded.origin["repository"] == "me/mine" and len(loaded.origin["sha256"]) == 64
    assert load_backbone("hf://me/mine@main").digest() == backbone.digest()


def test_timm_layout_of_another_author(hub: Hub, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **sizes)
    config = {"architecture": "vit_tiny_patch16_224", "model_args": sizes, "pretrained_cfg": {"mean": [0.1, 0.2, 0.3]}}
    hub.files["you/vit/model.safetensors"] = save(model.state_dict())
    hub.files["you/vit/config.json"] = json.dumps(config).encode()
    loaded = load_backbone("hf://you/vit")
    assert loaded.mean == (0.1, 0.2, 0.3) and loaded.architecture.heads == 4
    model.reset_classifier(0)
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(loaded.encoder()(images), model.eval()(images))
    hub.files["you/odd/model.safetensors"] = hub.files["you/vit/model.safetensors"]
    hub.files["you/odd/config.json"] = json.dumps(config | {"model_args": sizes | {"act_layer": "relu"}}).encode()
    with pytest.raises(ValueError, match="model_args has act_layer, which"):
        load_backbone("hf://you/odd")


def test_mistakes_in_names(hub: Hub) -> None:
    for source, message in {
        "timm:vit_smal_patch16_224": r"timm has no model vit_smal_patch16_224; did you mean timm:vit_small_patch16_224",
        "timm:vit_small_patch16_224.dinx": r"timm has no weights vit_small_patch16_224\.dinx; it has .*dino",
        "timm:vit_tiny_patch4_32": r"timm has no model vit_tiny_patch4_32",
        "timm:nope": r"timm has no model nope; timm\.list_models\(\) lists them$",
        "timm:vit_base_patch16_gap_224": r"no pretrained weights \(random:vit_base_patch16_gap_224",
        "random:vit_smal_patch16_224": r"neither vit_.*nor a timm model",
        "hf://nobody/nothing": r"nobody/nothing is not on the hub, or private",
        "hf://a/b/c": r"not the name of a repository",
    }.items():
        with pytest.raises(ValueError, match=message) as error:
            load_backbone(source)
        assert "\n" not in str(error.value)


def test_a_random_network_says_so_and_is_always_the_same() -> None:
    before = torch.random.get_rng_state()
    one = load_backbone("random:vit_tiny_patch4_32")
    assert one.name == "vit_tiny_patch4_32 (random)" and one.origin["random"]
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(7)
    assert load_backbone("random:vit_tiny_patch4_32").digest() == one.digest()
