"""The detector: its losses, gradients, parameter groups, and its file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from patchmix.evaluate.detection.detect import DetectMethod
from patchmix.evaluate.detection.model import (
    Detector,
    DetectorFile,
    RegionPooling,
    Shape,
    build_detector,
    load_detector,
)
from patchmix.interop.backbone import Architecture, Backbone
from patchmix.settings import Detect
from patchmix.train.optimizer import groups_with_head, set_hyperparameters

SMALL = Shape(image_size=64, window=2, global_blocks=2, channels=16, head_dim=16, smallest_anchor=8)


def small_detector(file: Backbone, classes: int = 3, **options: Any) -> Detector:
    weights = options.pop("encoder_weights", file.weights)
    return build_detector(file.architecture, classes, SMALL, encoder_weights=weights, rois_per_image=16, **options)


def one_object(side: int = 64) -> dict[str, Tensor]:
    masks = torch.zeros(1, side, side, dtype=torch.uint8)
    masks[0, 10:40, 8:50] = 1
    return {"boxes": torch.tensor([[8.0, 10.0, 50.0, 40.0]]), "labels": torch.tensor([2]), "masks": masks}


def no_object(side: int = 64) -> dict[str, Tensor]:
    masks = torch.zeros(0, side, side, dtype=torch.uint8)
    return {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64), "masks": masks}


@pytest.mark.parametrize("targets", [[one_object(), no_object()], [no_object(), no_object()]], ids=["some", "none"])
def test_every_parameter_has_a_gradient(encoder_file: Backbone, targets: list[dict[str, Tensor]]) -> None:
    """Also where a batch has no object at all: with many processes a missing gradient would make all of them wait."""
    method = DetectMethod(small_detector(encoder_file).train())
    out = method((torch.randn(2, 3, 64, 64), [(64, 48), (40, 64)], targets))
    assert next(iter(out)) == "loss"
    parts = {name: value for name, value in out.items() if name != "loss"}
    assert set(parts) == {"objectness", "rpn_box_reg", "classifier", "box_reg", "mask"}
    torch.testing.assert_close(out["loss"], sum(parts.values()))
    out["loss"].backward()
    assert [name for name, p in method.named_parameters() if p.grad is None] == []
    assert all(torch.isfinite(p.grad).all() for p in method.parameters() if p.grad is not None)


def test_bf16_gives_nearly_the_same_losses(encoder_file: Backbone) -> None:
    method = DetectMethod(small_detector(encoder_file).train())
    batch = (torch.randn(1, 3, 64, 64), [(64, 64)], [one_object()])
    losses = []
    for enabled in (False, True):
        torch.manual_seed(0)  # the samplers of proposals draw
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            losses.append(float(method(batch)["loss"].detach()))
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
    assert losses[1] != losses[0]


def test_detections_stay_inside_what_is_seen(encoder_file: Backbone) -> None:
    detector = small_detector(encoder_file).eval()
    detector.roi_heads.score_thresh = 0.0
    with torch.no_grad():
        found = detector(torch.randn(1, 3, 64, 64), [(40, 56)])
    assert isinstance(found, list)
    boxes = found[0]["boxes"]
    assert len(boxes) and boxes[:, 2].max() <= 56 and boxes[:, 3].max() <= 40
    assert found[0]["masks"].shape[1:] == (1, 28, 28)


def test_a_small_image_on_the_canvas_does_not_change_later_ones(encoder_file: Backbone) -> None:
    """torchvision's pooling guesses strides from the first images it sees; jitter makes those as small as a tenth."""
    images, later = torch.randn(1, 3, 64, 64), [(64, 64)]
    found = []
    for first in ([(7, 6)], later):
        detector = small_detector(encoder_file).eval()
        detector.load_state_dict(_with_scores(encoder_file))
        with torch.no_grad():
            detector(images, first)
            found.append(detector(images, later)[0])
    assert len(found[0]["boxes"])
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name])


def _with_scores(file: Backbone) -> dict[str, Tensor]:
    torch.manual_seed(1)
    detector = small_detector(file)
    torch.nn.init.normal_(detector.roi_heads.box_predictor.cls_score.weight)
    return detector.state_dict()


def test_regions_are_pooled_where_they_are() -> None:
    """Maps that hold their own x, y and stride: what is pooled is the region itself, at the stride for its size."""
    levels = {}
    for level, stride in enumerate((4, 8, 16, 32)):
        centers = (torch.arange(1024 // stride) + 0.5) * stride
        x, y = torch.meshgrid(centers, centers, indexing="xy")
        levels[str(level)] = torch.stack([x, y, torch.full_like(x, stride)])[None].repeat(2, 1, 1, 1)
        levels[str(level)][1] += 2000
    boxes = [
        torch.tensor([[40.0, 60.0, 140.0, 130.0], [300.0, 300.0, 524.0, 524.0], [200.0, 100.0, 901.0, 800.0]]),
        torch.tensor([[500.0, 500.0, 620.0, 640.0], [64.0, 64.0, 71.0, 75.0]]),
    ]
    pooled = RegionPooling(7, middle=224.0)(levels, boxes, [(10, 10), (10, 10)])
    pooled[3:] -= 2000
    assert pooled[:, 2, 3, 3].round().tolist() == [4, 16, 32, 8, 4]
    every = torch.cat(boxes)
    torch.testing.assert_close(pooled[:, :2, 3, 3], (every[:, :2] + every[:, 2:]) / 2)
    step = (every[:, 2] - every[:, 0]) / 7
    torch.testing.assert_close(pooled[:, 0, 0, 6] - pooled[:, 0, 0, 0], 6 * step)
    assert RegionPooling(7, middle=224.0)(levels, [every[:0]], [(10, 10)]).shape == (0, 3, 7, 7)


def test_the_encoders_weights_arrive(encoder_file: Backbone) -> None:
    detector = small_detector(encoder_file)
    inside = detector.backbone.tokens.encoder.state_dict()
    assert set(encoder_file.weights) - set(inside) == {"norm.weight", "norm.bias"}
    assert all(torch.equal(inside[name], encoder_file.weights[name]) for name in inside)


def test_one_channel_encoders_work() -> None:
    gray = Architecture("vit_tiny_patch16_32", 32, 16, 1, 24, 4, 3)
    detector = build_detector(gray, 2, SMALL).eval()
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        (found,) = detector(image, [(64, 64)])
        (same,) = detector(image.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1), [(64, 64)])
    assert len(found["boxes"]) > 0
    torch.testing.assert_close(found["boxes"], same["boxes"], rtol=0, atol=1e-3)


def test_patches_are_resampled(encoder_file: Backbone) -> None:
    """A patch of twice the side, each pixel four times, gets the token of the small patch."""
    shape = dataclasses.replace(SMALL, patch_size=32)
    larger = build_detector(encoder_file.architecture, 2, shape, encoder_weights=encoder_file.weights)
    encoder = larger.backbone.tokens.encoder
    assert larger.backbone.tokens.patch_size == 32
    assert torch.equal(encoder.pos_embed, encoder_file.weights["pos_embed"])
    flat = torch.full((1, 3, 32, 32), 0.7)
    small = encoder_file.encoder().patch_embed.proj(flat[..., :16, :16])
    torch.testing.assert_close(encoder.patch_embed.proj(flat), small, atol=1e-3, rtol=1e-3)


def test_parameters_of_the_real_detector() -> None:
    """ViT-B/16 with FPN for COCO's 80 classes: 115.5 M, of which 96.0 M are ViT and pyramid."""
    with torch.device("meta"):
        detector = build_detector(Architecture("vit_base_patch16_224", 224, 16, 3, 768, 12, 12), 80, Shape())
    assert sum(p.numel() for p in detector.parameters()) == 115_479_797
    assert sum(p.numel() for p in detector.rpn.parameters()) == 2 * (9 * 256 * 256 + 256) + 257 * 3 * 5
    convolutions = 8 * (9 * 256 * 256 + 2 * 256)
    box = 256 * 49 * 1024 + 1024 + 1025 * (81 + 4 * 81)
    mask = 4 * 256 * 256 + 256 + 257 * 81
    assert sum(p.numel() for p in detector.roi_heads.parameters()) == convolutions + box + mask


# ----------------------------------------------------------------------------------------------------------- training


def test_layers_decay_towards_the_input(encoder_file: Backbone) -> None:
    detector = small_detector(encoder_file)
    groups = groups_with_head(detector, detector.backbone.tokens.encoder, 0.5)
    optimizer = torch.optim.AdamW(groups, lr=0.0)
    set_hyperparameters(optimizer, lr=1.0, weight_decay=0.1)
    found = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert len(found) == len(list(detector.parameters()))
    named = {name: found[id(p)] for name, p in detector.named_parameters()}
    inside = "backbone.tokens.encoder."
    assert named[inside + "blocks.3.mlp.fc1.weight"] == (0.5, 0.1)
    assert named[inside + "blocks.0.attn.qkv.weight"] == (0.5**4, 0.1)
    assert named[inside + "blocks.0.attn.qkv.bias"] == (0.5**4, 0.0)
    assert named[inside + "patch_embed.proj.weight"] == (0.5**5, 0.1)
    assert named[inside + "pos_embed"] == named[inside + "cls_token"] == (0.5**5, 0.0)
    assert named["roi_heads.mask_predictor.mask_fcn_logits.weight"] == (1.0, 0.1)
    assert named["backbone.merge.layer_blocks.0.1.weight"] == (1.0, 0.0)


def test_the_defaults_of_a_shape_are_those_of_the_settings() -> None:
    assert {name: getattr(Detect(""), name) for name in vars(Shape())} == vars(Shape())


# ----------------------------------------------------------------------------------------------------------- the file


def detector_file(file: Backbone) -> DetectorFile:
    classes = {3: "disc", 7: "rectangle", 90: "Ω"}
    return DetectorFile(
        file.architecture, SMALL, classes, small_detector(file).state_dict(), (0.1, 0.2, 0.3), file.std, {"a": 1}
    )


def test_a_file_comes_back_as_it_was(encoder_file: Backbone, tmp_path: Path) -> None:
    file = detector_file(encoder_file)
    file.save(tmp_path / "d.safetensors")
    back = load_detector(tmp_path / "d.safetensors")
    assert dataclasses.replace(back, weights={}) == dataclasses.replace(file, weights={})
    assert back.digest() == file.digest()
    with torch.no_grad():
        images = torch.randn(1, 3, 64, 64)
        assert torch.equal(back.detector().backbone(images)["0"], file.detector().backbone(images)["0"])


def test_files_of_version_0_1(encoder_file: Backbone, tmp_path: Path) -> None:
    """They name their pyramid: fpn is the one that is left."""
    file = detector_file(encoder_file)
    for pyramid in ("fpn", "simple"):
        header = json.loads(file.header())
        header["shape"]["pyramid"] = pyramid
        metadata = {"patchmix-detector": json.dumps(header)}
        save_file(file.weights, tmp_path / f"{pyramid}.safetensors", metadata=metadata)
    assert load_detector(tmp_path / "fpn.safetensors").digest() == file.digest()
    with pytest.raises(ValueError, match=r"the pyramid .simple. of version 0\.1, which was removed; train it again"):
        load_detector(tmp_path / "simple.safetensors")


def test_files_that_are_no_detectors(encoder_file: Backbone, tmp_path: Path) -> None:
    encoder_file.save(tmp_path / "encoder.safetensors")
    with pytest.raises(ValueError, match=r"encoder\.safetensors is not a detector; give a detector\.safetensors"):
        load_detector(tmp_path / "encoder.safetensors")
    with pytest.raises(ValueError, match="holds no detector"):
        load_detector(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        load_detector(tmp_path / "nothing")
    file = detector_file(encoder_file)
    name = "roi_heads.box_predictor.cls_score.weight"
    for change, message in (
        ({name: torch.zeros(7, 16)}, f"{name} is 7 × 16, not 4 × 16"),
        ({"more": torch.zeros(1)}, "more is unknown"),
    ):
        dataclasses.replace(file, weights=file.weights | change).save(tmp_path / "x.safetensors")
        with pytest.raises(ValueError, match=message):
            load_detector(tmp_path / "x.safetensors")
    rest = {key: tensor for key, tensor in file.weights.items() if "box_predictor" not in key}
    dataclasses.replace(file, weights=rest).save(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"box_predictor.*is missing"):
        load_detector(tmp_path / "x.safetensors")
    for header in ("{", '{"architecture": {}}', "[]"):
        save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors", metadata={"patchmix-detector": header})
        with pytest.raises(ValueError, match="damaged metadata"):
            load_detector(tmp_path / "x.safetensors")
