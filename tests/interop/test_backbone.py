"""Any way to name an encoder leads to the same features; a mistake never leads to a random network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from patchmix.config import Config, ModelConfig, ViewsConfig, to_dict
from patchmix.interop import loading
from patchmix.interop.backbone import Backbone
from patchmix.interop.importing import read_entries
from patchmix.interop.loading import load_backbone
from patchmix.methods.options import PatchMixOptions
from patchmix.methods.patchmix import PatchMixMethod
from patchmix.nn.vit import create_encoder


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(5, 3, 16, 16)


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, PatchMixMethod]:
    """A run in the middle: config.yaml and a checkpoint, no encoder.safetensors. Base and momentum differ."""
    model = ModelConfig(name="vit_tiny_patch4_16", dim=48, depth=2, heads=4)
    config = Config(model=model, views=ViewsConfig(mean=(0.1, 0.2, 0.3)))
    method = PatchMixMethod(
        create_encoder("vit_tiny_patch4_16", dim=48, depth=2, heads=4),
        PatchMixOptions(head_hidden=8, head_out=8, num_mix=2),
    )
    with torch.no_grad():
        for parameter in method.encoder.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    folder = tmp_path / "experiment"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text("recipe: test\n")
    state = {"method": method.state_dict(), "optimizer": {}, "step": 40, "config": to_dict(config), "data": "shapes"}
    torch.save(state, folder / "checkpoints" / "step-000000040.pt")
    (folder / "checkpoints" / "last").symlink_to("step-000000040.pt")
    return folder, method.eval()


def features(encoder: torch.nn.Module, images: torch.Tensor, file: Any) -> torch.Tensor:
    """The definition: normalize, forward, class token."""
    mean, std = torch.tensor(file.mean).view(3, 1, 1), torch.tensor(file.std).view(3, 1, 1)
    with torch.no_grad():
        out: torch.Tensor = encoder((images - mean) / std)
    return out


# ---------------------------------------------------------------------------------------------------------- loading


def test_unfinished_run(run, images: torch.Tensor) -> None:
    folder, method = run
    loaded = load_backbone(folder)
    assert loaded.name == "experiment (unfinished, step 40)"
    assert loaded.architecture.heads == 4 and loaded.mean == (0.1, 0.2, 0.3)
    torch.testing.assert_close(loaded.embed(images), features(method.encoder, images, loaded))


def test_momentum_encoder_of_a_run(run, images: torch.Tensor, backbone: Backbone) -> None:
    folder, method = run
    assert method.momentum_copy is not None
    expected = method.momentum_copy.network[0]
    for path in (folder, folder / "checkpoints" / "last"):
        loaded = load_backbone(path, encoder="momentum")
        torch.testing.assert_close(loaded.embed(images), features(expected, images, loaded))
        assert (loaded.embed(images) - load_backbone(folder).embed(images)).abs().max() > 0.01
    backbone.save(folder / "encoder.safetensors")
    assert load_backbone(folder, encoder="momentum").name == "experiment (momentum)"
    assert load_backbone(folder).digest() == backbone.digest()


def test_run_whose_method_has_no_momentum_encoder(run) -> None:
    folder, _ = run
    path = folder / "checkpoints" / "step-000000040.pt"
    state = torch.load(path, weights_only=True)
    state["method"] = {name: t for name, t in state["method"].items() if not name.startswith("momentum_copy")}
    torch.save(state, path)
    load_backbone(folder)
    with pytest.raises(ValueError, match="there is no momentum encoder"):
        load_backbone(folder, encoder="momentum")


def test_finished_run_and_its_file(backbone: Backbone, tmp_path: Path) -> None:
    backbone.save(tmp_path / "mine" / "encoder.safetensors")
    for what in (tmp_path / "mine", str(tmp_path / "mine"), tmp_path / "mine" / "encoder.safetensors"):
        loaded = load_backbone(what)
        assert loaded.name == "mine" and loaded.digest() == backbone.digest()
        assert loaded.origin == {"recipe": "test"}


def test_our_own_file_comes_back_as_it_is(backbone: Backbone, tmp_path: Path) -> None:
    path = tmp_path / "encoder.safetensors"
    backbone.save(path)
    loaded = load_backbone(path)
    assert loaded.digest() == backbone.digest()
    assert loaded.architecture == backbone.architecture and loaded.std == backbone.std
    with pytest.raises(ValueError, match="its encoder has 4 heads; leave heads=3 out"):
        load_backbone(path, heads=3)
    with pytest.raises(ValueError, match="it holds only the base encoder"):
        load_backbone(path, encoder="momentum")


@pytest.mark.parametrize("kind", ["encoder.safetensors", "checkpoint"])
def test_our_own_files_are_read_once(kind: str, run, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = run
    if kind == "encoder.safetensors":
        backbone.save(folder / kind)
    opened: list[Path] = []

    def read(path: Path) -> Any:
        opened.append(path)
        return read_entries(path)

    def no_import(*_: object, **__: object) -> None:
        raise AssertionError("our own weights went through the importer")

    monkeypatch.setattr(loading, "read_entries", read)
    monkeypatch.setattr(loading, "import_checkpoint", no_import)
    load_backbone(folder)
    assert len(opened) == 1


def test_foreign_checkpoint_on_the_fly(make_foreign, tmp_path: Path) -> None:
    foreign = make_foreign("dino")
    torch.save(foreign.checkpoint, tmp_path / "dino.pth")
    loaded = load_backbone(tmp_path / "dino.pth", encoder="base")
    assert loaded.name == "dino" and torch.equal(loaded.weights["norm.weight"], foreign.encoders["base"]["norm.weight"])


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no encoder"):
        load_backbone(tmp_path)
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ValueError, match=r"is a run without encoder or checkpoint yet.*--resume auto"):
        load_backbone(tmp_path)
    with pytest.raises(ValueError, match=r"does not exist; give a run's folder.*write timm:vit_small_patch16_224$"):
        load_backbone("vit_small_patch16_224")
    with pytest.raises(ValueError, match="takes no encoder and no heads"):
        load_backbone("timm:vit_small_patch16_224", heads=12)


# --------------------------------------------------------------------------------------------------------- embedding


def test_token_and_mean(backbone: Backbone, images: torch.Tensor) -> None:
    encoder = backbone.encoder()
    torch.testing.assert_close(backbone.embed(images, batch_size=2), features(encoder, images, backbone))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (backbone.mean, backbone.std))
    with torch.no_grad():
        tokens = encoder.forward_features((images - mean) / std)
    torch.testing.assert_close(backbone.embed(images, pool="mean"), tokens[:, 1:].mean(dim=1))


def test_every_kind_of_image_gives_the_same_features(backbone: Backbone, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
    pictures = [Image.fromarray(one) for one in pixels]
    for i, picture in enumerate(pictures):
        picture.save(tmp_path / f"{i}.png")
    files = [tmp_path / f"{i}.png" for i in range(3)]
    expected = backbone.embed(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255)
    for images in (pixels, torch.from_numpy(pixels), pictures, files, [str(f) for f in files], list(pixels)):
        torch.testing.assert_close(backbone.embed(images), expected)
    torch.testing.assert_close(backbone.embed(files[1]), expected[1:2])


def test_transparent_pixels_are_white_in_files_and_in_pictures(backbone: Backbone, tmp_path: Path) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 4), dtype=np.uint8), "RGBA")
    picture.save(tmp_path / "a.png")
    torch.testing.assert_close(backbone.embed([picture]), backbone.embed([tmp_path / "a.png"]))


def test_pictures_of_16_bits_keep_their_depth(backbone: Backbone, tmp_path: Path) -> None:
    deep = np.random.default_rng(0).integers(0, 1 << 16, (16, 16), dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / "a.png")
    assert torch.equal(backbone.embed([Image.open(tmp_path / "a.png")]), backbone.embed([tmp_path / "a.png"]))


def test_resized_on_the_shorter_side_and_cropped_centrally(backbone: Backbone) -> None:
    wide = torch.rand(2, 3, 40, 100)
    wide[:, :, :, :47], wide[:, :, :, 47:52] = 0, 1  # a hard edge, where cubic interpolation overshoots
    resized = F.interpolate(wide, size=(16, 40), mode="bicubic", antialias=True)
    assert resized.max() > 1
    resized = resized.clamp(0, 1)
    torch.testing.assert_close(backbone.embed(wide), backbone.embed(resized[:, :, :, 12:28]))
    mixed = [np.zeros((20, 30, 3), np.uint8), np.full((64, 16, 3), 255, np.uint8)]
    expected = torch.stack([torch.zeros(3, 16, 16), torch.ones(3, 16, 16)])
    torch.testing.assert_close(backbone.embed(mixed), backbone.embed(expected))


def test_pictures_are_turned_upright(backbone: Backbone, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180°
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    torch.testing.assert_close(backbone.embed([tmp_path / "a.png"]), backbone.embed(pixels[None, ::-1, ::-1]))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.randn(2, 3, 16, 16), r"its floats span -\d.* to \d.*; give RGB in \[0, 1\]"),
        (torch.full((1, 3, 16, 16), torch.nan), "it has NaN or infinite values"),
        (torch.rand(2, 5, 16, 16), r"its shape is \(5, 16, 16\), not \(H, W, 3\) or \(3, H, W\)"),
        (np.zeros((16, 16, 3), np.uint8), r"shape \(16, 16, 3\); expected \(N, C, H, W\) or \(N, H, W, C\)"),
        (np.zeros((1, 16, 16, 3), np.int64), "its values are int64"),
        (np.zeros((1, 0, 16, 3), np.uint8), "has no pixels"),
        ([], "no images"),
        (["missing.png"], r"missing.png can't be read \(No such file or directory\)"),
        ([__file__], "test_backbone.py: not an image"),
        ([3], r"an image: its shape is \(\)"),
    ],
)
def test_images_that_are_none(images: Any, message: str, backbone: Backbone) -> None:
    with pytest.raises(ValueError, match=message):
        backbone.embed(images)


def test_wrong_arguments(backbone: Backbone, images: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="pool is 'max'"):
        backbone.embed(images, pool="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size is 0"):
        backbone.embed(images, batch_size=0)
    for device in ("gpu", "mps", "meta"):
        with pytest.raises(ValueError, match=f"device '{device}' can't be used here"):
            backbone.embed(images, device=device)
