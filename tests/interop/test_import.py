"""Other projects' checkpoints: the right tensors come in, every name is accounted for, heads are never wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from patchmix.interop.backbone import Architecture
from patchmix.interop.importing import import_checkpoint, import_weights
from patchmix.interop.layouts import tensors_of
from patchmix.interop.loading import load_backbone
from patchmix.settings import Import


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.pth"


def test_every_format_is_recognized_and_gives_its_encoders(foreign, file: Path) -> None:
    torch.save(foreign.checkpoint, file)
    for which, expected in foreign.encoders.items():
        imported = import_checkpoint(file, encoder=which)
        assert imported.format == foreign.format
        assert imported.backbone.architecture.heads == foreign.heads
        assert imported.backbone.weights.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(imported.backbone.weights[name], tensor), name
        imported.backbone.encoder()  # loads strictly


def test_every_name_is_taken_or_dropped_once(foreign, file: Path) -> None:
    torch.save(foreign.checkpoint, file)
    imported = import_checkpoint(file)
    tensors, others = tensors_of(foreign.checkpoint)
    assert sorted(sum(imported.dropped.values(), imported.taken)) == sorted([*tensors, *others])
    assert len(imported.taken) == len(imported.backbone.weights)
    printed = "\n".join(imported.summary())
    for reason, names in imported.dropped.items():
        assert f"{len(names)}: {reason} ({names[0]}" in printed


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("mocov3", {"the momentum encoder", "projection head", "prediction head", "not weights"}),
        ("mocov3-linear", {"classifier", "not weights"}),
        ("dino", {"the base encoder", "projection head", "not weights"}),
        ("ibot-extracted", {"mask token"}),
        ("mae-full", {"decoder", "mask token", "not weights"}),
        ("timm", {"classifier"}),
    ],
)
def test_reasons(name: str, reasons: set[str], make_foreign, file: Path) -> None:
    torch.save(make_foreign(name).checkpoint, file)
    assert set(import_checkpoint(file).dropped) == reasons


@pytest.mark.parametrize("name", ["a_m3", "a_m2"])
@pytest.mark.parametrize("which", ["base", "momentum"])
def test_golden_tokens(name: str, which: str, golden_folder: Path) -> None:
    folder = golden_folder
    settings, tensors = json.loads((folder / f"{name}.json").read_text()), load_file(folder / f"{name}.safetensors")
    imported = import_checkpoint(folder / f"{name}.pth", encoder=which, heads=settings["heads"])
    assert imported.format == "patchmix-authors"
    assert imported.backbone.architecture.image_size == settings["image_size"]
    with torch.no_grad():
        tokens = imported.backbone.encoder().forward_features(tensors["x1"])
    torch.testing.assert_close(tokens, tensors[f"eval.{which}_encoder.tokens"], atol=1e-5, rtol=1e-5)


def test_wrong_heads_give_other_tokens(golden_folder: Path) -> None:
    """Why heads must be known: everything loads, and nothing is right."""
    tensors = load_file(golden_folder / "a_m3.safetensors")
    backbone = import_checkpoint(golden_folder / "a_m3.pth", encoder="base", heads=6).backbone
    with torch.no_grad():
        tokens = backbone.encoder().forward_features(tensors["x1"])
    assert (tokens - tensors["eval.base_encoder.tokens"]).abs().max() > 0.1


def test_unusual_width_needs_heads(golden_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"dim 48 is none of patchmix-authors.*give heads \(--heads\)"):
        import_checkpoint(golden_folder / "a_m3.pth")


def test_heads_that_do_not_divide_the_width(golden_folder: Path) -> None:
    with pytest.raises(ValueError, match="heads is 5; it must divide the encoder's dim 48"):
        import_checkpoint(golden_folder / "a_m3.pth", heads=5)


def test_other_heads_than_the_project_uses_are_noted(make_foreign, file: Path) -> None:
    torch.save(make_foreign("authors").checkpoint, file)
    imported = import_checkpoint(file, heads=6)
    assert imported.backbone.architecture.heads == 6
    assert "6 heads as given; patchmix-authors itself uses 12 for dim 384" in imported.notes


@pytest.mark.parametrize(("name", "format"), [("mocov3", "mocov3"), ("authors", "patchmix-authors")])
def test_the_position_table_decides_without_arch(name: str, format: str, make_foreign, file: Path) -> None:
    checkpoint = make_foreign(name).checkpoint
    del checkpoint["arch"]
    torch.save(checkpoint, file)
    assert import_checkpoint(file).format == format


def test_bare_dino_backbone_by_name(make_foreign, file: Path) -> None:
    encoder = make_foreign("timm").encoders[None]
    torch.save(encoder, file)
    assert import_checkpoint(file).format == "timm"
    assert import_checkpoint(file, format="dino").backbone.digest() == import_checkpoint(file).backbone.digest()


def test_encoder_that_is_not_there(make_foreign, file: Path) -> None:
    checkpoint = make_foreign("authors").checkpoint
    state = checkpoint["state_dict"]
    state = {name: tensor for name, tensor in state.items() if not name.startswith("momentum")}  # their ViT-T has none
    torch.save(checkpoint | {"state_dict": state}, file)
    import_checkpoint(file)
    with pytest.raises(ValueError, match="no momentum encoder: it holds only the base encoder; use encoder 'base'"):
        import_checkpoint(file, encoder="momentum")
    torch.save(make_foreign("timm").checkpoint, file)
    with pytest.raises(ValueError, match="it holds a single encoder; leave encoder out"):
        import_checkpoint(file, encoder="momentum")


def test_format_that_does_not_fit(make_foreign, file: Path) -> None:
    torch.save(make_foreign("mocov3").checkpoint, file)
    with pytest.raises(ValueError, match=r"not of format mae: it holds state_dict/.*base_encoder.*but no encoder"):
        import_checkpoint(file, format="mae")
    with pytest.raises(ValueError, match=r"not of format dinov2: it holds state_dict/.*base_encoder.*but no encoder"):
        import_checkpoint(file, format="dinov2")
    with pytest.raises(ValueError, match="format 'moco' is unknown; it must be one of patchmix-authors, mocov3"):
        import_checkpoint(file, format="moco")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            "blocks.0.ls1.gamma",
            "1 names are neither of a plain ViT nor known extras of format timm: blocks.0.ls1.gamma",
        ),
        ("reg_token", "reg_token"),
        ("fc_norm.weight", "fine-tuned with mean pooling"),
        ("patch_embed.proj.0.weight", "convolutional stem"),
    ],
)
def test_unknown_names_are_errors(extra: str, message: str, make_foreign, file: Path) -> None:
    torch.save(make_foreign("timm").checkpoint | {extra: torch.ones(384)}, file)
    with pytest.raises(ValueError, match=message):
        import_checkpoint(file)


def test_missing_and_misshapen_tensors(make_foreign, file: Path) -> None:
    state = make_foreign("timm").checkpoint
    torch.save({name: tensor for name, tensor in state.items() if name != "blocks.0.attn.qkv.bias"}, file)
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.qkv\.bias is missing"):
        import_checkpoint(file)
    torch.save(state | {"blocks.0.mlp.fc1.bias": torch.ones(7)}, file)
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.fc1\.bias is 7, not 1536"):
        import_checkpoint(file)
    torch.save({name: tensor for name, tensor in state.items() if name != "cls_token"}, file)
    with pytest.raises(ValueError, match="there is no cls_token"):
        import_checkpoint(file)


def test_positions_without_the_class_token_compute_the_same(make_foreign, file: Path) -> None:
    state = make_foreign("timm").encoders[None]
    state["pos_embed"][:, 0] = 0
    torch.save(state | {"pos_embed": state["pos_embed"][:, 1:].clone()}, file)
    imported = import_checkpoint(file)
    assert torch.equal(imported.backbone.weights["pos_embed"], state["pos_embed"])
    torch.save(state | {"pos_embed": torch.ones(1, 7, 384)}, file)
    with pytest.raises(ValueError, match="pos_embed has 7 entries, which is not a square grid"):
        import_checkpoint(file)


def test_image_size_is_inferred_and_can_be_changed(make_foreign, file: Path) -> None:
    torch.save(make_foreign("dino").checkpoint, file)
    assert import_checkpoint(file).backbone.architecture.image_size == 32
    larger = import_checkpoint(file, image_size=64)
    assert larger.backbone.architecture.name == "vit_small_patch16_64"
    assert larger.backbone.encoder()(torch.randn(1, 3, 64, 64)).shape == (1, 384)
    with pytest.raises(ValueError, match="image size 50 is not a multiple of the patch size 16"):
        import_checkpoint(file, image_size=50)


def test_half_precision_becomes_float32(make_foreign, file: Path) -> None:
    state = make_foreign("timm").encoders[None]
    torch.save({name: tensor.half() for name, tensor in state.items()}, file)
    imported = import_checkpoint(file)
    assert {tensor.dtype for tensor in imported.backbone.weights.values()} == {torch.float32}
    assert "float16 weights were converted to float32" in imported.notes


def test_names_follow_the_size(file: Path) -> None:
    from patchmix.interop.importing import _timm_name

    assert _timm_name(384, 12, 2, 32) == "vit_small_patch2_32"
    assert _timm_name(768, 12, 16, 224) == "vit_base_patch16_224"
    assert _timm_name(1024, 24, 16, 384) == "vit_large_patch16_384"
    assert _timm_name(48, 2, 4, 16) == "vit_tiny_patch4_16"


def test_heads_and_normalization_of_a_timm_folder(make_foreign, tmp_path: Path) -> None:
    state = make_foreign("timm").encoders[None]
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    bare = import_checkpoint(tmp_path / "model.safetensors")
    assert bare.backbone.architecture.heads == 6 and any("ImageNet's mean and std are assumed" in n for n in bare.notes)
    config: dict[str, Any] = {"architecture": "vit_small_patch16_224", "model_args": {"num_heads": 12, "depth": 1}}
    config["pretrained_cfg"] = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    described = import_checkpoint(tmp_path / "model.safetensors")
    assert described.backbone.architecture.heads == 12 and described.backbone.mean == described.backbone.std == (
        0.5,
        0.5,
        0.5,
    )


@pytest.mark.parametrize("in_chans", [1, 5])
def test_a_timm_folder_of_other_channels(in_chans: int, tmp_path: Path) -> None:
    shape = Architecture("vit_tiny_patch4_16", 16, 4, in_chans, 48, 1, 3)
    encoder = shape.create().eval()
    save_file(encoder.state_dict(), tmp_path / "model.safetensors")
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 48, "depth": 1, "num_heads": 3, "in_chans": in_chans}
    config: dict[str, Any] = {"architecture": "vit_tiny_patch16_224", "model_args": sizes}
    config["pretrained_cfg"] = {"mean": [0.4], "std": [0.2]} if in_chans == 1 else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    backbone = load_backbone(tmp_path)
    if in_chans == 1:
        gray = torch.rand(2, 1, 16, 16)
        with torch.no_grad():
            features = encoder((gray - 0.4) / 0.2)
        torch.testing.assert_close(backbone.embed(gray), features)
        return
    images = torch.rand(2, 5, 16, 16)
    with pytest.raises(ValueError, match="mean and std have 3 and 3 values, the images 5 channels; give one for each"):
        backbone.embed(images)
    given = replace(backbone, mean=(0.5,) * 5, std=(0.5,) * 5)
    assert given.embed(images).shape == (2, 48)
    with pytest.raises(ValueError, match=r"its shape is \(16, 16, 3\), not \(H, W, 5\)"):
        given.embed([Image.new("RGB", (16, 16))])


def test_torchvision_names(tmp_path: Path) -> None:
    import torchvision

    model = torchvision.models.VisionTransformer(
        image_size=16, patch_size=4, num_layers=2, num_heads=4, hidden_dim=48, mlp_dim=192
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    state = model.state_dict()
    published = {n.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): t for n, t in state.items()}
    torch.save(published, tmp_path / "published.pth")
    torch.save(state, tmp_path / "vit.pth")
    imported = import_checkpoint(tmp_path / "vit.pth", heads=4)
    assert import_checkpoint(tmp_path / "published.pth", heads=4).backbone.digest() == imported.backbone.digest()
    assert imported.format == "torchvision" and imported.dropped == {
        "classifier": ["heads.head.weight", "heads.head.bias"]
    }
    model.heads = torch.nn.Identity()
    images = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(imported.backbone.encoder()(images), model(images), atol=1e-5, rtol=1e-5)


def test_our_own_file_needs_no_import(backbone, tmp_path: Path) -> None:
    backbone.save(tmp_path / "encoder.safetensors")
    with pytest.raises(ValueError, match="was written by patchmix and needs no import: every command takes it"):
        import_checkpoint(tmp_path / "encoder.safetensors")


def test_numbers_of_the_old_numpy_are_read(make_foreign, file: Path) -> None:
    torch.save(make_foreign("dino").checkpoint, file, _use_new_zipfile_serialization=False)
    content = file.read_bytes()
    assert b"cnumpy._core.multiarray\nscalar" in content
    file.write_bytes(content.replace(b"cnumpy._core.multiarray\nscalar", b"cnumpy.core.multiarray\nscalar"))
    assert import_checkpoint(file).format == "dino"


def test_import_writes_the_encoder_and_prints_what_became_of_each_name(
    make_foreign, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign, out = make_foreign("dino"), tmp_path / "imported"
    torch.save(foreign.checkpoint, file)
    import_weights(Import(file, out, encoder="base", heads=12, image_size=64))
    loaded = load_backbone(out)
    assert torch.equal(loaded.weights["norm.weight"], foreign.encoders["base"]["norm.weight"])
    assert loaded.architecture.heads == 12 and loaded.architecture.image_size == 64
    printed = capsys.readouterr().out
    for line in ("format   dino", "the momentum encoder (teacher/", "12 heads as given", f"wrote    {out}"):
        assert line in printed
    with pytest.raises(ValueError, match="exists; give another name"):
        import_weights(Import(file, out))
    import_weights(Import(file, out, format="dino", overwrite=True))
    assert load_backbone(out).architecture.image_size == 32
