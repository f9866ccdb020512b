"""Semantic segmentation against plain loops and scikit-learn, on generated shapes whose masks are known."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from sklearn.metrics import accuracy_score, confusion_matrix, jaccard_score

from patchmix.cli import main
from patchmix.data.contract import Source
from patchmix.data.views import CenterCrop, View
from patchmix.evaluate import segment as module
from patchmix.evaluate.features import FeatureExtractor, Features
from patchmix.evaluate.masks import IGNORED, Masked, open_masks, read_names
from patchmix.evaluate.results import Result, read_results
from patchmix.evaluate.segment import (
    MaskedViews,
    Segmenter,
    WholeView,
    bootstrap,
    center_mask,
    count_pixels,
    segment,
    segmentation_metrics,
)
from patchmix.interop.backbone import Backbone
from patchmix.nn.vit import patch_tokens
from patchmix.settings import Segment
from patchmix.train.checkpoint import Checkpoints, load_checkpoint
from tests.evaluate.conftest import make_backbone, write_image
from tests.evaluate.detection.conftest import write_split

BACKGROUND, RECTANGLE, DISC, BORDER = 4, 7, 9, 255  # indices in the files
GRAY = {BACKGROUND: 100, RECTANGLE: 240, DISC: 10, BORDER: 100}


def scene(seed: int) -> npt.NDArray[np.uint8]:
    """A mask (H, W) with a rectangle and a disc, each with an ignored border; sizes differ."""
    random = np.random.default_rng(seed)
    mask = np.full(((40, 56), (48, 32))[seed % 2], BACKGROUND, np.uint8)
    y, x = random.integers(2, 10, 2).tolist()
    cv2.rectangle(mask, (x, y), (x + 16, y + 14), RECTANGLE, -1)
    cv2.rectangle(mask, (x, y), (x + 16, y + 14), BORDER, 1)
    center = (mask.shape[1] - 10, mask.shape[0] - 10)
    cv2.circle(mask, center, 8, DISC, -1)
    cv2.circle(mask, center, 8, BORDER, 1)
    return mask


def write_scenes(images: Path, masks: Path, count: int, first: int = 0) -> None:
    for i in range(first, first + count):
        mask = scene(i)
        gray = np.vectorize(GRAY.get)(mask).astype(np.uint8)
        write_image(images / f"{i}.png", np.repeat(gray[:, :, None], 3, axis=2))
        write_image(masks / f"{i}.png", mask)


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    root = tmp_path / "scenes"
    write_scenes(root / "images/train", root / "masks/train", 12)
    write_scenes(root / "images/test", root / "masks/test", 5, first=100)
    return root


def evaluate(backbone: Backbone, data: Path, **options: Any) -> Result:
    usual = {"epochs": 20, "workers": 0, "device": "cpu", "pictures": 0}
    usual |= {} if options.get("protocol") == "fast" else {"batch_size": 6}
    return segment(Segment("", data, **(usual | options)), backbone)


# -------------------------------------------------------------------------------------------------------------- scores


def by_hand(truth: npt.NDArray[Any], predicted: npt.NDArray[Any], classes: int) -> tuple[float, float]:
    """mIoU and pixel accuracy from a confusion matrix, filled pixel by pixel."""
    matrix = np.zeros((classes, classes))
    for t, p in zip(truth.tolist(), predicted.tolist(), strict=True):
        if t != IGNORED:
            matrix[t, p] += 1
    ious = []
    for k in range(classes):
        union = matrix[k].sum() + matrix[:, k].sum() - matrix[k, k]
        if union:
            ious.append(matrix[k, k] / union)
    return float(np.mean(ious)), float(np.trace(matrix) / matrix.sum())


def test_scores_are_those_of_a_confusion_matrix_and_of_scikit_learn(
    scenes: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = open_masks(scenes, ignored=(255,))
    assert isinstance(data.test, Masked)
    random = torch.Generator().manual_seed(3)
    answers: list[torch.Tensor] = []

    def predict(model: Any, task: Any, views: Any) -> torch.Tensor:
        """Random, and right in a half of the pixels."""
        truth = views[1][0].long()
        noise = torch.randint(3, truth.shape, generator=random)
        answers.append(torch.where(torch.rand(truth.shape, generator=random) < 0.5, truth.clamp_min(0), noise))
        return answers[-1]

    monkeypatch.setattr(module, "predict", predict)
    model = Segmenter(backbone.encoder(any_image_size=True), 3, blocks=[-1], frozen=True)
    task: Any = type("Task", (), {"settings": Segment("", scenes, workers=0), "device": torch.device("cpu")})
    counts = count_pixels(model, task, WholeView(data.test, 32, 8))
    truth = np.concatenate([data.test.mask(i).ravel() for i in range(5)])
    predicted = torch.cat([answer.flatten() for answer in answers]).numpy()
    counted = truth != IGNORED
    assert 0 < counted.sum() < len(truth)
    found = {name: float(value) for name, value in segmentation_metrics(counts.sum(dim=0)).items()}
    assert (found["miou"], found["pixel_accuracy"]) == pytest.approx(by_hand(truth, predicted, 3), abs=1e-12)
    assert found["miou"] == pytest.approx(jaccard_score(truth[counted], predicted[counted], average="macro"))
    assert found["pixel_accuracy"] == pytest.approx(accuracy_score(truth[counted], predicted[counted]))
    matrix = confusion_matrix(truth[counted], predicted[counted])
    assert counts.sum(dim=0).tolist() == [np.diag(matrix).tolist(), matrix.sum(1).tolist(), matrix.sum(0).tolist()]


def test_a_class_that_neither_occurs_nor_is_predicted_does_not_count() -> None:
    counts = torch.tensor([[6, 0, 2], [8, 0, 2], [6, 0, 4]])
    assert float(segmentation_metrics(counts)["miou"]) == pytest.approx((6 / 8 + 2 / 4) / 2)


def test_the_interval_is_that_of_images_drawn_with_replacement() -> None:
    torch.manual_seed(1)
    truth = torch.randint(20, 60, (30, 3))
    found = (truth * torch.rand(30, 1)).long()  # images differ much more than classes
    counts = torch.stack([found, truth, truth], dim=1)
    draws = torch.randint(30, (2000, 30))
    plain = torch.stack([segmentation_metrics(counts[rows].sum(dim=0))["miou"] for rows in draws])
    expected = torch.quantile(plain, torch.tensor([0.025, 0.975]).double())
    assert bootstrap(counts)["miou"] == pytest.approx(expected.tolist(), abs=0.01)
    low, high = bootstrap(counts.repeat(4, 1, 1))["miou"]
    assert high - low == pytest.approx(float(expected[1] - expected[0]) / 2, rel=0.15)  # 4 × as many images


# --------------------------------------------------------------------------------------------------- tokens and views


def test_tokens_of_several_blocks_and_of_any_size() -> None:
    encoder = make_backbone(depth=3).encoder(any_image_size=True)
    images = torch.randn(2, 3, 32, 32)
    last = encoder.forward_features(images)[:, 1:].view(2, 4, 4, 24)
    torch.testing.assert_close(patch_tokens(encoder, images, [-1]), last)
    both = patch_tokens(encoder, images, [-1, 0])
    assert both.shape == (2, 4, 4, 48)
    torch.testing.assert_close(both[..., 24:], last)
    torch.testing.assert_close(both[..., :24], patch_tokens(encoder, images, [0]))
    assert patch_tokens(encoder, torch.randn(1, 3, 40, 64), [2]).shape == (1, 5, 8, 24)
    model = Segmenter(encoder, 5, blocks=[0, 1], frozen=True)
    assert len(encoder.blocks) == 2
    assert model(torch.randn(2, 3, 40, 64), (37, 61)).shape == (2, 5, 37, 61)


def test_masks_follow_their_images_through_crops_and_flips(scenes: Path) -> None:
    data = open_masks(scenes, ignored=(255,))
    assert isinstance(data.train, Masked)
    views = MaskedViews(data.train, View(32, (0.25, 1.0), jitter=0.0, gray=0.0, blur=0.0), seed=0)
    indices = np.arange(12)
    seen = set()
    for epoch in range(3):
        pixels, masks = views([data.train.load(i) for i in range(12)], epoch=epoch, indices=indices)
        assert pixels.shape == (12, 32, 32, 3) and masks.shape == (12, 32, 32)
        for label, gray in enumerate((100, 240, 10)):
            inside = np.stack([cv2.erode((m == label).astype(np.uint8), np.ones((5, 5))) for m in masks]).astype(bool)
            assert np.abs(pixels[inside].astype(int) - gray).max(initial=0) < 20
            seen |= {label} if inside.any() else set()
        assert (masks == IGNORED).any()
    assert seen == {0, 1, 2}


def test_whole_images_keep_their_masks_and_get_whole_patches(scenes: Path) -> None:
    data = open_masks(scenes, ignored=())
    assert isinstance(data.test, Masked) and data.test.classes == ("class 4", "class 7", "class 9", "class 255")
    pixels, masks = WholeView(data.test, 64, 8)([data.test.load(0)], epoch=0, indices=np.array([0]))
    assert pixels.shape == (1, 64, 88, 3) and masks.shape == (1, 40, 56)
    assert np.array_equal(masks[0], np.searchsorted([4, 7, 9, 255], scene(100)))


# ------------------------------------------------------------------------------------------------------------ training


def encoder_of(folder: Path) -> dict[str, torch.Tensor]:
    (trained,) = folder.glob("segment-*")
    last = Checkpoints(trained / "checkpoints").last
    assert last is not None
    start = "encoder.encoder."
    return {k.removeprefix(start): v for k, v in load_checkpoint(last)["method"].items() if k.startswith(start)}


def test_the_linear_layer_learns_the_encoder_does_not(scenes: Path, backbone: Backbone, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = evaluate(backbone, scenes, out=out, pictures=2, blocks=(0, 1), image_size=64, epochs=30)
    assert result.metrics["miou"] > 0.7 and result.metrics["pixel_accuracy"] > 0.9
    low, high = result.interval("miou")
    assert low <= result.metrics["miou"] <= high and high - low > 0.001
    rows = result.details["classes"]
    assert np.mean([row["iou"] for row in rows]) == pytest.approx(result.metrics["miou"])
    assert sum(row["pixels"] for row in rows) == sum((scene(100 + i) != 255).sum() for i in range(5))
    assert all(torch.equal(value, backbone.weights[name]) for name, value in encoder_of(out).items())
    (kept,) = read_results(out)
    assert kept.headline == f"{100 * result.metrics['miou']:.2f}" and kept.headline_interval is not None
    pictures = sorted(out.glob("segment-*/pictures/*.png"))
    assert [path.name for path in pictures] == ["100.png", "104.png"]
    height, width = cv2.imread(str(pictures[0])).shape[:2]
    assert (height, width) == (6 * 40 + 20, 6 * 3 * (56 + 4))  # enlarged, with a line of names
    again = evaluate(backbone, scenes, out=out, pictures=2, blocks=(0, 1), image_size=64, epochs=30)
    assert again.metrics == result.metrics and len(list(out.glob("segment-*"))) == 1


def test_fine_tuning_changes_the_encoder(scenes: Path, backbone: Backbone, tmp_path: Path) -> None:
    result = evaluate(backbone, scenes, out=tmp_path / "out", finetune=True, epochs=2)
    assert result.protocol == "segment-finetune" and result.settings["lr"] == 5e-4
    changed = [name for name, value in encoder_of(tmp_path / "out").items() if (value != backbone.weights[name]).any()]
    assert {"patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.1.mlp.fc2.weight"} <= set(changed)


def test_encoders_of_gray_images_and_batches_without_a_counted_pixel() -> None:
    model = Segmenter(make_backbone(in_chans=1).encoder(any_image_size=True), 2, blocks=[-1], frozen=True)
    masks = torch.full((2, 32, 32), IGNORED)
    loss = module.SegmentMethod(model)((torch.randn(2, 3, 32, 32), masks))["loss"]
    loss.backward()
    assert loss.item() == 0.0


# ------------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (("images/train", "masks/train"), ("images/val", "masks/val")),
        (("images/training", "annotations/training"), ("images/validation", "annotations/validation")),
        (("train", "trainannot"), ("test", "testannot")),
    ],
)
def test_layouts_with_splits(train: tuple[str, str], test: tuple[str, str], tmp_path: Path) -> None:
    write_scenes(*(tmp_path / part for part in train), 4)
    write_scenes(*(tmp_path / part for part in test), 2, first=50)
    data = open_masks(tmp_path, ignored=(255,))
    assert (len(data.train), data.classes, data.tested_on) == (4, 3, "test split")
    assert isinstance(data.test, Masked) and data.test.key(0) == "50.png" and len(data.test) == 2
    expected = np.select([scene(50) == 4, scene(50) == 7, scene(50) == 9], [0, 1, 2], IGNORED)
    assert np.array_equal(data.test.mask(0), expected)


def test_camvid_has_two_splits_to_test_on(tmp_path: Path) -> None:
    for split, first in (("train", 0), ("val", 20), ("test", 40)):
        write_scenes(tmp_path / split, tmp_path / f"{split}annot", 2, first)
    for split, name in ((None, "20.png"), ("test", "40.png")):
        held = open_masks(tmp_path, ignored=(255,), test=split).test
        assert held is not None and held.key(0) == name


def test_pets_as_it_is_published_and_undivided_folders(tmp_path: Path) -> None:
    write_scenes(tmp_path / "images", tmp_path / "annotations" / "trimaps", 10)
    with pytest.raises(ValueError, match="no folders for splits, so no split 'val'; leave out --test"):
        open_masks(tmp_path, ignored=(255,), test="val")
    undivided = open_masks(tmp_path, ignored=(255,))
    assert undivided.test is not None and (len(undivided.train), len(undivided.test)) == (8, 2)
    assert undivided.tested_on == "a fifth held out"
    assert not {undivided.train.key(i) for i in range(8)} & {undivided.test.key(i) for i in range(2)}
    (tmp_path / "annotations" / "trainval.txt").write_text("# a comment\n0 1 1 1\n3 1 1 1\n5 2 1 2\n")
    (tmp_path / "annotations" / "test.txt").write_text("7 1 1 1\n")
    divided = open_masks(tmp_path, ignored=(255,))
    assert [divided.train.key(i) for i in range(3)] == ["0.png", "3.png", "5.png"]
    assert divided.test is not None and [divided.test.key(i) for i in range(1)] == ["7.png"]
    assert divided.fingerprint() != undivided.fingerprint() != open_masks(tmp_path, ignored=(4,)).fingerprint()


def test_class_names(scenes: Path, tmp_path: Path) -> None:
    file = tmp_path / "names.txt"
    file.write_text("4 back ground\n7 rectangle\n9 disc\n11 never seen\n")
    assert open_masks(scenes, ignored=(255,), names=file).train.classes == (
        *("back ground", "rectangle", "disc", "never seen"),
    )
    file.write_text("sky\n2 poles\n")
    assert read_names(file) == {0: "sky", 1: "2 poles"}


def panoptic_from_instances(root: Path, split: str) -> None:
    """The rectangle and the disc of `write_split` as segments; what is neither stays void."""
    dataset = json.loads((root / f"annotations/instances_{split}.json").read_text())
    annotations = []
    (root / f"annotations/panoptic_{split}").mkdir()
    for entry in dataset["images"]:
        colors = np.zeros((entry["height"], entry["width"], 3), np.uint8)
        colors[2:20, 3:30] = (1, 2, 3)
        colors[30:40, 10:20] = (200, 0, 0)
        Image.fromarray(colors).save(root / f"annotations/panoptic_{split}" / entry["file_name"])
        segments = [
            {"id": 1 + 2 * 256 + 3 * 65536, "category_id": 7, "area": 486, "bbox": [3, 2, 27, 18], "iscrowd": 0},
            {"id": 200, "category_id": 3, "area": 100, "bbox": [10, 30, 10, 10], "iscrowd": 0},
        ]
        annotations.append({"image_id": entry["id"], "file_name": entry["file_name"], "segments_info": segments})
    (root / f"annotations/panoptic_{split}.json").write_text(json.dumps(dataset | {"annotations": annotations}))


def test_coco_instances_and_panoptic_segments_are_semantic_classes(tmp_path: Path, backbone: Backbone) -> None:
    for split in ("train2017", "val2017"):
        write_split(tmp_path, split, 4)
    data = open_masks(tmp_path, ignored=(255,))
    assert data.train.classes == ("background", "disc", "rectangle", "never seen") and len(data.train) == 4
    assert isinstance(data.test, Masked)
    mask, pixels = data.test.mask(1), data.test.load(1)
    assert np.array_equal(mask == 2, pixels[:, :, 0] == 250) and np.array_equal(mask == 1, pixels[:, :, 0] == 5)
    assert evaluate(backbone, tmp_path, epochs=1, batch_size=4).images == 4
    for split in ("train2017", "val2017"):
        panoptic_from_instances(tmp_path, split)
    data = open_masks(tmp_path, ignored=(255,))
    assert data.train.classes == ("disc", "rectangle", "never seen") and isinstance(data.test, Masked)
    mask = data.test.mask(0)
    assert (mask[2:20, 3:30] == 1).all() and (mask[30:40, 10:20] == 0).all() and mask[0, 0] == IGNORED
    with pytest.raises(ValueError, match="leave out --class-names"):
        open_masks(tmp_path, ignored=(), names=tmp_path / "names.txt")
    (tmp_path / "annotations/panoptic_val2017/0.png").unlink()
    with pytest.raises(ValueError, match=r"panoptic_val2017/0\.png: not an image"):
        data.test.mask(0)
    file = tmp_path / "annotations/panoptic_val2017.json"
    file.write_text(file.read_text().replace("never seen", "another"))
    with pytest.raises(ValueError, match=r"panoptic_val2017\.json has other categories than panoptic_train2017"):
        open_masks(tmp_path, ignored=())


# ------------------------------------------------------------------------------------------------------------ mistakes


def smaller_mask(root: Path) -> None:
    write_image(root / "masks/train/3.png", scene(3)[1:])


def colored_mask(root: Path) -> None:
    write_image(root / "masks/test/101.png", np.zeros((48, 32, 3), np.uint8))


def index_of_the_test_only(root: Path) -> None:
    write_image(root / "masks/test/101.png", np.full((48, 32), 77, np.uint8))


def no_masks(root: Path) -> None:
    shutil.rmtree(root / "masks/test")
    (root / "masks/test").mkdir()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (smaller_mask, [], "3.png is 32 × 47 px, the image 32 × 48; give masks of their images' size"),
        (colored_mask, [], "masks/test/101.png is not a mask (its mode is RGB)"),
        (index_of_the_test_only, [], "101.png has index 77, but there are 3 classes, 4 … 9; set --class-names"),
        (lambda root: None, ["--class-names", "two.txt"], "has index 9, but there are 2 classes, 0 … 1"),
        (lambda root: (root / "masks/train/5.png").unlink(), [], "images/train/5 has no mask; expected"),
        (
            lambda root: shutil.rmtree(root / "masks/test") or (root / "masks/test").mkdir(),
            [],
            "test has no masks; put",
        ),
        (lambda root: shutil.rmtree(root / "masks"), [], "has no images with masks; expected images/train"),
        (lambda root: (root / "masks/train/0.png").write_bytes(b"no"), [], "masks/train/0.png is not a mask"),
        (lambda root: None, ["--ignore-index", "4", "7", "255"], "have the classes [9], without the ignored"),
        (lambda root: None, ["--test", "val"], "has no split 'val' with images and masks; it has test"),
        (lambda root: None, ["--blocks", "2"], "block is 2; it must lie between -2 and 1"),
        (lambda root: None, ["--blocks"], "block is missing; it must lie between"),
        (lambda root: None, ["--image-size", "36"], "image size 36 must be a multiple of the patch size 8"),
    ],
)
def test_mistakes_end_in_one_line(
    change: Callable[[Path], object],
    options: list[str],
    message: str,
    scenes: Path,
    backbone: Backbone,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.txt").write_text("a\nb\n")
    change(scenes)
    backbone.save(tmp_path / "encoder.safetensors")
    words = ["segment", str(tmp_path / "encoder.safetensors"), "--data", str(scenes), "--workers", "0", *options]
    with pytest.raises(SystemExit) as stop:
        main(words)
    line = capsys.readouterr().err
    assert stop.value.code == 2 and line.count("\n") == 1 and message in line


# ------------------------------------------------------------------------------------------------------- fast protocol


def test_masks_are_cropped_as_their_images() -> None:
    mask = np.arange(6 * 8, dtype=np.int32).reshape(6, 8)
    assert np.array_equal(center_mask(mask, CenterCrop(6)), mask[:, 1:7])
    doubled = np.repeat(np.repeat(mask, 2, axis=0), 2, axis=1)
    assert np.array_equal(center_mask(mask, CenterCrop(8, resize=12)), doubled[2:10, 4:12])
    # A picture of blocks, whose pixels are classes: cropped as an image it differs at edges only, and more if shifted.
    blocks = np.kron(np.arange(20).reshape(4, 5), np.ones((10, 10))).astype(np.int32)
    crop = CenterCrop(48, resize=64)
    (picture,) = crop(
        [np.repeat(blocks[:, :, None].astype(np.uint8) * 12, 3, axis=2)], epoch=0, indices=np.zeros(1, int)
    )
    cropped = 12 * center_mask(blocks, crop)
    shifts = [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)]
    errors = [np.abs(picture[0, :, :, 0] - np.roll(cropped, shift, (0, 1)))[1:-1, 1:-1].mean() for shift in shifts]
    assert shifts[int(np.argmin(errors))] == (0, 0)


def test_tokens_that_know_the_class_segment_without_fault(
    tmp_path: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left and right halves, of a size that varies by patches, with one ignored row."""
    for split, count in (("train", 6), ("val", 3)):
        for i in range(count):
            mask = np.zeros((32, 32), np.uint8)
            mask[:, 8 * (1 + i % 3) :] = 5
            mask[7] = 255
            write_image(tmp_path / "data/images" / split / f"{i}.png", np.repeat(mask[:, :, None], 3, axis=2))
            write_image(tmp_path / "data/masks" / split / f"{i}.png", mask)

    def known(self: FeatureExtractor, source: Source) -> Features:
        columns = [[float(c >= 1 + i % 3) for c in range(4)] * 4 for i in range(len(source))]
        vectors = torch.tensor(columns)[:, :, None] * torch.tensor([1.0, -2.0]) + 0.5
        return Features(vectors.half(), None, torch.arange(len(source)))

    monkeypatch.setattr(FeatureExtractor, "features", known)
    result = evaluate(backbone, tmp_path / "data", protocol="fast", epochs=None)
    assert result.protocol == "segment-fast" and result.images == 3
    assert result.metrics == {"miou": 1.0, "pixel_accuracy": 1.0} and result.interval("miou") == (1.0, 1.0)
    assert [row["pixels"] for row in result.details["classes"]] == [31 * 8 * 6, 31 * 8 * 6]


def test_the_fast_protocol_on_scenes(scenes: Path, backbone: Backbone) -> None:
    result = evaluate(backbone, scenes, protocol="fast", epochs=None)
    share = max(row["pixels"] for row in result.details["classes"]) / sum(
        r["pixels"] for r in result.details["classes"]
    )
    assert result.metrics["pixel_accuracy"] > share + 0.05  # better than background everywhere
    assert evaluate(backbone, scenes, protocol="fast", epochs=None).metrics == result.metrics
    assert evaluate(backbone, scenes, protocol="fast", epochs=0.4).settings["epochs"] == 1.0  # as many as were trained
    with pytest.raises(ValueError, match="the fast protocol learns from stored tokens of the last block; leave out"):
        evaluate(backbone, scenes, protocol="fast", blocks=(0, -1))
    with pytest.raises(ValueError, match=r"leave out --batch-size, --weight-decay$"):
        evaluate(backbone, scenes, protocol="fast", batch_size=3, weight_decay=9.0)
