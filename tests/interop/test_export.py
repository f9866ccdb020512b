"""Out and in again: each export is opened by its own program, with the code that it gives, to equal features."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from patchmix.interop.backbone import Architecture, Backbone
from patchmix.interop.exporting import FORMATS, export
from patchmix.interop.loading import load_backbone
from patchmix.nn.vit import create_encoder
from patchmix.report.share import export_weights
from patchmix.settings import Export

NAMES = {"timm": "model.safetensors", "torchvision": "tv.safetensors", "huggingface": "folder", "onnx": "model.onnx"}


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(5, 3, 16, 16)


def normalized(images: torch.Tensor, backbone: Backbone) -> torch.Tensor:
    return (images - torch.tensor(backbone.mean).view(3, 1, 1)) / torch.tensor(backbone.std).view(3, 1, 1)


def opened(usage: str, images: torch.Tensor) -> torch.Tensor:
    """Runs the code that the export gives, as its user would."""
    torch.manual_seed(99)  # whatever is not loaded is visibly random
    scope: dict[str, Any] = {"images": images.numpy()}
    exec(usage, scope)
    if "features" in scope:
        return torch.from_numpy(scope["features"])
    with torch.no_grad():
        out: torch.Tensor = scope["model"].eval()(images)
    return out


@pytest.mark.parametrize("format", FORMATS)
def test_round_trip(format: str, backbone: Backbone, images: torch.Tensor, tmp_path: Path) -> None:
    exported = export(backbone, tmp_path / NAMES[format], format)
    assert all(path.is_file() for path in exported.files)
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == sorted(exported.files)  # no temporary files
    expected = backbone.embed(images)
    torch.testing.assert_close(
        opened(exported.usage, normalized(images, backbone)),
        expected,
        atol=1e-4 if format == "onnx" else 1e-5,
        rtol=0,
    )


@pytest.mark.parametrize("format", ["timm", "torchvision", "huggingface"])
def test_back_into_patchmix(format: str, backbone: Backbone, tmp_path: Path) -> None:
    export(backbone, tmp_path / NAMES[format], format)
    again = load_backbone(tmp_path / NAMES[format])
    assert again.digest() == backbone.digest()
    assert (again.architecture, again.mean, again.std) == (backbone.architecture, backbone.mean, backbone.std)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_32", "vit_small_patch16_224"])
def test_names_of_timm_and_of_ours(name: str, tmp_path: Path) -> None:
    encoder = create_encoder(name, depth=1)
    backbone = Backbone(Architecture.of(name, encoder), encoder.state_dict())
    exported = export(backbone, tmp_path / "a.safetensors", "timm")
    size = backbone.architecture.image_size
    images = torch.rand(1, 3, size, size)
    with torch.no_grad():
        expected = backbone.encoder()(images)
    torch.testing.assert_close(opened(exported.usage, images), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_32", "vit_tiny_patch16_96"])
def test_timm_prepares_images_as_we_do(name: str, tmp_path: Path) -> None:
    encoder = create_encoder(name, dim=48, depth=1, heads=3)
    backbone = Backbone(Architecture.of(name, encoder), encoder.state_dict(), mean=(0.4, 0.5, 0.6))
    export(backbone, tmp_path / "hub", "huggingface")
    model: Any = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True).eval()
    transform: Any = timm.data.create_transform(**timm.data.resolve_data_config(model.pretrained_cfg))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (150, 200, 3), dtype=np.uint8))
    with torch.no_grad():
        features = model(transform(picture)[None])
    torch.testing.assert_close(features, backbone.embed([picture]), atol=5e-3, rtol=0)  # roundings of pixels


def test_gray_encoder(tmp_path: Path) -> None:
    encoder = create_encoder("vit_tiny_patch4_16", dim=48, depth=1, heads=3, in_chans=1)
    gray = Backbone(Architecture.of("vit_tiny_patch4_16", encoder), encoder.state_dict())
    exported = export(gray, tmp_path / "a.safetensors", "timm")
    images = torch.rand(2, 3, 16, 16)
    one = normalized(images, gray).mean(dim=1, keepdim=True)
    torch.testing.assert_close(opened(exported.usage, one), gray.embed(images), atol=1e-5, rtol=0)
    export(gray, tmp_path / "hub", "huggingface")
    config = json.loads((tmp_path / "hub" / "config.json").read_text())["pretrained_cfg"]
    (mean,), (std,) = config["mean"], config["std"]
    same = torch.rand(2, 1, 16, 16)  # a gray image
    with torch.no_grad():
        features = gray.encoder()((same - mean) / std)
    torch.testing.assert_close(features, gray.embed(same.expand(-1, 3, -1, -1)), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="torchvision's ViT takes 3 channels, this encoder 1"):
        export(gray, tmp_path / "b.safetensors", "torchvision")


def test_encoder_with_a_convolutional_stem(tmp_path: Path) -> None:
    encoder = create_encoder("vit_tiny_patch4_16", dim=48, depth=1, heads=3, stem="conv").train()
    images = torch.rand(2, 3, 16, 16)
    encoder(images)  # running statistics that are not the initial ones
    backbone = Backbone(Architecture.of("vit_tiny_patch4_16", encoder), encoder.state_dict())
    exported = export(backbone, tmp_path / "a.safetensors", "timm")
    torch.testing.assert_close(
        opened(exported.usage, normalized(images, backbone)), backbone.embed(images), atol=1e-5, rtol=0
    )
    again = load_backbone(tmp_path / "a.safetensors")
    assert again.architecture == backbone.architecture and again.digest() == backbone.digest()
    with pytest.raises(ValueError, match="cannot describe a convolutional stem; export to timm or onnx"):
        export(backbone, tmp_path / "folder", "huggingface")
    with pytest.raises(ValueError, match=r"no place for patch_embed\.proj\.0\.weight"):
        export(backbone, tmp_path / "b.safetensors", "torchvision")


def test_encoder_that_torchvision_can_not_express(tmp_path: Path) -> None:
    encoder = create_encoder("vit_tiny_patch4_16", dim=48, depth=1, heads=3)
    weights = encoder.state_dict() | {"reg_token": torch.zeros(1, 4, 48)}
    backbone = Backbone(Architecture.of("vit_tiny_patch4_16", encoder), weights)
    with pytest.raises(ValueError, match="no place for reg_token"):
        export(backbone, tmp_path / "b.safetensors", "torchvision")


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("vit_base_patch16_siglip_gap_224", "cls_token"),
        ("vit_base_patch16_224_miil", r"blocks\.0\.attn\.qkv\.bias"),
        ("flexivit_small", "a position for its class token"),
    ],
)
def test_encoder_without_what_torchvision_needs(name: str, lacks: str, tmp_path: Path) -> None:
    encoder = create_encoder(name, dim=48, depth=1, heads=3, image_size=32)
    backbone = Backbone(Architecture.of(name, encoder), encoder.state_dict())
    with pytest.raises(
        ValueError, match=f"torchvision's ViT needs {lacks}, which {name} does not have; export to timm"
    ):
        export(backbone, tmp_path / "a.safetensors", "torchvision")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["timm", "torchvision", "huggingface"])
def test_nothing_different_is_overwritten_by_default(format: str, backbone: Backbone, tmp_path: Path) -> None:
    umask = os.umask(0o027)
    os.umask(umask)
    out = tmp_path / NAMES[format]
    files = export(backbone, out, format).files
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}
    before = [path.read_bytes() for path in files]
    changed = {name: tensor + 1 for name, tensor in backbone.weights.items()}
    other = dataclasses.replace(backbone, weights=changed)
    for each in (backbone, other):
        with pytest.raises(ValueError, match=r"exists; give another name.*overwrite"):
            export(each, out, format)
    assert [path.read_bytes() for path in files] == before
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == sorted(files)
    export(other, out, format, overwrite=True)
    assert load_backbone(out).digest() == other.digest()


def test_other_files_are_not_touched(backbone: Backbone, tmp_path: Path) -> None:
    for format in ("timm", "torchvision"):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(ValueError, match="exists; give another name"):
            export(backbone, tmp_path / "notes.txt", format)
        assert (tmp_path / "notes.txt").read_text() == "mine"
        with pytest.raises(ValueError, match="is a folder"):
            export(backbone, tmp_path, format)
    with pytest.raises(ValueError, match="is a file; a Hugging Face export is a folder"):
        export(backbone, tmp_path / "notes.txt", "huggingface")
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json exists"):
        export(backbone, folder, "huggingface")
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_a_failing_write_leaves_the_old_file(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from patchmix.interop import backbone as module

    out = tmp_path / "model.safetensors"
    export(backbone, out, "timm")
    before = out.read_bytes()

    def full_disk(weights: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(module, "save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        export(backbone, out, "timm", overwrite=True)
    assert out.read_bytes() == before and list(tmp_path.iterdir()) == [out]


def test_onnx_has_its_normalization_and_no_paths(backbone: Backbone, tmp_path: Path) -> None:
    import onnx

    export(backbone, tmp_path / "a.onnx", "onnx")
    model = onnx.load(tmp_path / "a.onnx")
    described = {entry.key: entry.value for entry in model.metadata_props}
    assert tuple(json.loads(described["mean"])) == backbone.mean and tuple(json.loads(described["std"])) == backbone.std
    assert b"site-packages" not in (tmp_path / "a.onnx").read_bytes()


def test_onnx_graph_that_differs_is_not_written(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    class Wrong(onnxruntime.InferenceSession):
        def run(self, *arguments: Any) -> Any:
            return [super().run(*arguments)[0] + 1e-3]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Wrong)
    with pytest.raises(ValueError, match=r"differs from torch by 1\.0e-03"):
        export(backbone, tmp_path / "a.onnx", "onnx")
    assert list(tmp_path.iterdir()) == []


def test_onnx_that_is_not_installed(backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "onnx" else real(name, *a))
    with pytest.raises(ValueError, match=r"ONNX export needs onnx; pip install 'patchmix-ssl\[onnx\]'"):
        export(backbone, tmp_path / "a.onnx", "onnx")


def test_unknown_format(backbone: Backbone, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="export format 'tflite' is unknown; it must be one of timm, torchvision"):
        export(backbone, tmp_path / "a", "tflite")


def test_export_prints_what_it_wrote_and_how_to_open_it(
    backbone: Backbone, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "folder"
    backbone.save(run / "encoder.safetensors")
    exported = export_weights(Export(str(run), out, format="huggingface"))
    wrote = [f"wrote {out / name}" for name in ("config.json", "model.safetensors", "README.md")]
    assert capsys.readouterr().out.splitlines() == [*wrote, "", *exported.usage.splitlines()]
    with pytest.raises(ValueError, match="exists; give another name"):
        export_weights(Export("random:vit_tiny_patch4_16", out, format="huggingface"))


def test_run_checkpoint_and_export_agree(trained_run: Path, tmp_path: Path) -> None:
    images = torch.rand(4, 3, 32, 32)
    finished = load_backbone(trained_run)
    features = finished.embed(images)
    assert finished.name == "tiny" and finished.mean == (0.4, 0.5, 0.6)

    checkpoint = load_backbone(trained_run / "checkpoints" / "last")
    assert checkpoint.name == "tiny/step-000000004"
    assert checkpoint.digest() == finished.digest()
    assert checkpoint.architecture == finished.architecture and checkpoint.mean == finished.mean
    momentum = load_backbone(trained_run, encoder="momentum").embed(images)
    assert 1e-6 < (momentum - features).abs().max() < 4  # four steps behind

    scope: dict[str, object] = {}
    exec(export(finished, tmp_path / "hub", "huggingface").usage, scope)
    model = scope["model"]
    assert isinstance(model, torch.nn.Module)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (finished.mean, finished.std))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()((images - mean) / std), features, atol=1e-5, rtol=0)
