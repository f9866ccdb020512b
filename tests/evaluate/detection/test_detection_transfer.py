"""From an encoder to box and mask AP: training, resuming, evaluating, drawing; in one process and in two."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from patchmix.evaluate.detection import detect as module
from patchmix.evaluate.detection.coco import open_split
from patchmix.evaluate.detection.detect import color, draw, save_pictures
from patchmix.evaluate.detection.model import load_detector
from patchmix.evaluate.results import Result, read_results
from patchmix.interop.backbone import Architecture, Backbone
from patchmix.nn.vit import create_encoder
from patchmix.settings import Detect
from patchmix.train.log import read_metrics

TINY: dict[str, Any] = {
    "image_size": 64,
    "window": 2,
    "global_blocks": 2,
    "channels": 16,
    "head_dim": 16,
    "smallest_anchor": 8,
    "epochs": 2,
    "batch_size": 2,
    "lr": 1e-3,
    "rois_per_image": 16,
    "evaluate_every": 0,
    "device": "cpu",
    "workers": 0,
    "pictures": 0,
}


def detect(backbone: Backbone | None, data: Path, out: Path, **options: Any) -> Result:
    """Trains the tiny detector; without a backbone from scratch."""
    result = module.detect(Detect("scratch" if backbone is None else "", data, out, **(TINY | options)), backbone)
    assert isinstance(result, Result)
    return result


def evaluate_only(detector: Path, data: Path, out: Path | None = None, **options: Any) -> Result:
    settings = Detect(str(detector), data, out, eval_only=True, device="cpu", workers=0, pictures=0, **options)
    result = module.detect(settings)
    assert isinstance(result, Result)
    return result


def test_from_an_encoder_to_everything_it_leaves(encoder_file: Backbone, coco: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = detect(encoder_file, coco, out, pictures=2)
    assert result.protocol == "detect" and result.images == 4
    assert {"box_ap", "box_ap50", "box_ap75", "mask_ap", "mask_ap50", "mask_ap75"} <= set(result.metrics)
    assert result.weights == encoder_file.digest()
    assert result.settings["train_images"] == 4, "the empty image is left out"
    assert [row["name"] for row in result.details["classes"]] == ["disc", "rectangle", "never seen"]
    assert read_results(out) == [result]
    (folder,) = out.glob("detect-*")
    rows = read_metrics(folder / "metrics.jsonl")
    trained = [row for row in rows if row["kind"] == "train"]
    assert trained[-1]["step"] == 4 and {"loss", "classifier", "box_reg", "mask", "lr"} <= set(trained[-1])
    assert [row["step"] for row in rows if row["kind"] == "monitor"] == [4], "an untrained detector is not evaluated"
    assert sorted(path.name for path in (folder / "pictures").iterdir()) == ["0.png", "1.png"]
    picture = cv2.imread(str(folder / "pictures" / "0.png"))[:, :, ::-1]
    assert picture.shape == (60, 2 * 80 + 8, 3)
    val = open_split(coco, "val2017")
    assert np.array_equal(picture[:, :80], draw(val.load(0), val.annotations(0), val.categories)), "truth on the left"
    # The same again, without training: from the file, from its folder, from the training's checkpoint.
    for place in (folder / "detector.safetensors", out, max(folder.glob("checkpoints/step-*.pt"))):
        again = evaluate_only(place, coco, tmp_path / "again")
        assert again.metrics == result.metrics
        for kind in ("bbox", "segm"):
            name = f"detections.{kind}.json"
            assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    assert len(read_results(tmp_path / "again")) == 3
    again = evaluate_only(out, coco)  # by default in the run's folder
    assert read_results(out) == [result, again] and again.settings["eval_only"]
    assert (out / "evaluated" / name).read_bytes() == (folder / name).read_bytes()


def test_a_stopped_training_goes_on_and_ends_the_same(
    encoder_file: Backbone, coco: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"epochs": 3, "accumulate": 2}
    detect(encoder_file, coco, tmp_path / "straight", **options)

    class PowerCut(Exception):
        pass

    real = module.DetectMethod.after_step

    def cut(self: Any, progress: float) -> None:
        real(self, progress)
        if self.steps == 5:
            raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(module.DetectMethod, "after_step", cut)
        with pytest.raises(PowerCut):
            detect(encoder_file, coco, tmp_path / "stopped", **options)
    (folder,) = (tmp_path / "stopped").glob("detect-*")
    assert (folder / "checkpoints" / "last").resolve().name == "step-000000004.pt"
    detect(encoder_file, coco, tmp_path / "stopped", **options)
    straight, stopped = load_detector(tmp_path / "straight"), load_detector(tmp_path / "stopped")
    assert straight.digest() == stopped.digest()
    assert straight.digest() != load_detector_weights_at_start(encoder_file, coco, tmp_path)


def load_detector_weights_at_start(encoder_file: Backbone, coco: Path, tmp_path: Path) -> str:
    detect(encoder_file, coco, tmp_path / "short", epochs=0.5, lr=1e-12)
    return load_detector(tmp_path / "short").digest()


def test_from_scratch_and_from_a_detector_of_other_classes(coco: Path, tmp_path: Path, make_split: Any) -> None:
    first = detect(None, coco, tmp_path / "a", epochs=0.5, image_size=32, model="vit_tiny_patch16_32", pictures=8)
    assert first.encoder == "vit_tiny_patch16_32"
    before = load_detector(tmp_path / "a")

    def rename(dataset: dict[str, Any]) -> None:
        dataset["categories"] = [{"id": 1, "name": "round"}, {"id": 7, "name": "rectangle"}]
        for annotation in dataset["annotations"]:
            annotation["category_id"] = {3: 1, 7: 7}[annotation["category_id"]]

    for split in ("train2017", "val2017"):
        make_split(tmp_path / "other", split, 4, rename)
    tiny_step = {"epochs": 0.5, "lr": 1e-12, "weight_decay": 0.0}
    detect(None, tmp_path / "other", tmp_path / "b", **tiny_step, start=tmp_path / "a", pictures=8)
    after = load_detector(tmp_path / "b")
    assert after.shape == before.shape and after.shape.image_size == 32, "a detector keeps its shape"
    assert list(after.categories.values()) == ["round", "rectangle"]
    same = "roi_heads.box_head.5.weight"
    torch.testing.assert_close(after.weights[same], before.weights[same])
    assert after.weights["roi_heads.box_predictor.cls_score.weight"].shape == (3, 16)
    # With the same classes nothing begins anew.
    result = detect(None, coco, tmp_path / "c", **tiny_step, start=tmp_path / "a", image_size=96)
    assert result.settings["image_size"] == result.changed["image_size"] == 32, "it keeps its shape"
    for name, tensor in load_detector(tmp_path / "c").weights.items():
        torch.testing.assert_close(tensor, before.weights[name])


def test_mistakes_are_named_in_one_line(encoder_file: Backbone, coco: Path, tmp_path: Path, make_split: Any) -> None:
    def fails(message: str, **changes: Any) -> None:
        arguments: dict[str, Any] = {"backbone": encoder_file, "data": coco, "out": tmp_path / "out"}
        with pytest.raises(ValueError, match=message) as caught:
            detect(**(arguments | changes))
        assert "\n" not in str(caught.value)

    fails("give either an encoder or a detector", start=tmp_path)
    fails("image_size is 1000; it must be a multiple of 32", image_size=1000)
    fails("two factors", scale=(2.0, 0.1))
    fails(r"instances_test2017\.json can't be read", train="test2017")
    fails("fewer than the batch size 64", batch_size=64)
    fails(r"the encoder has 4|patches of 2 px", backbone=_with_patch_2())
    make_split(coco, "other2017", 3, lambda d: d["categories"].append({"id": 5, "name": "cat"}))
    fails(r"train2017.json has other classes than .*other2017.json \(id 5 is missing and cat\)", val="other2017")
    make_split(coco, "empty2017", 3, lambda d: d.update(annotations=[]))
    fails("no object in any image", val="empty2017")
    detect(encoder_file, coco, tmp_path / "good", epochs=0.5)
    with pytest.raises(ValueError, match=r"other classes than .* \(id 5 is cat and missing\)"):
        evaluate_only(tmp_path / "good", coco, val="other2017")
    (coco / "val2017" / "2.png").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"val2017/2\.png: .*; evaluation needs every image of instances_val2017"):
        evaluate_only(tmp_path / "good", coco)


def _with_patch_2() -> Backbone:
    encoder = create_encoder("vit_tiny_patch2_8", dim=24, depth=4, heads=3)
    return Backbone(Architecture.of("vit_tiny_patch2_8", encoder), encoder.state_dict())


def test_an_encoder_of_small_patches_is_resampled(coco: Path, tmp_path: Path) -> None:
    """As for an encoder that was pre-trained on CIFAR: patches of 2 px become patches of 16."""
    detect(_with_patch_2(), coco, tmp_path, epochs=0.5, patch_size=16)
    assert load_detector(tmp_path).detector().backbone.tokens.patch_size == 16


# ----------------------------------------------------------------------------------------------------------- pictures


def test_predictions_are_drawn(encoder_file: Backbone, coco: Path, tmp_path: Path) -> None:
    detect(encoder_file, coco, tmp_path / "run", epochs=0.5)
    (tmp_path / "photos" / "deep").mkdir(parents=True)
    for path in ("0.png", "deep/0.png"):
        (tmp_path / "photos" / path).write_bytes((coco / "val2017" / "0.png").read_bytes())
    (tmp_path / "photos" / "notes.txt").write_text("no image")

    def predicted(*images: Path, threshold: float = 0.5) -> list[Path]:
        paths = module.detect(
            Detect(str(tmp_path / "run"), predict=images, out=tmp_path / "drawn", threshold=threshold, device="cpu")
        )
        assert isinstance(paths, list)
        return paths

    written = predicted(tmp_path / "photos", threshold=0.0)
    assert [path.name for path in written] == ["0.png", "0-2.png"]
    assert cv2.imread(str(written[0])).shape == (60, 80, 3)
    listed = json.loads((tmp_path / "drawn" / "predictions.json").read_text())
    assert [Path(one["image"]).parent.name for one in listed] == ["photos", "deep"]
    assert listed[0]["objects"], "with threshold 0 even a detector without training finds something"
    assert {"category_id", "name", "bbox", "score", "segmentation"} == set(listed[0]["objects"][0])
    inside = module.detect(Detect(str(tmp_path / "run"), predict=(tmp_path / "photos" / "0.png",), device="cpu"))
    assert inside == [tmp_path / "run" / "predictions" / "0.png"]
    photo = tmp_path / "photos" / "0.png"
    before = photo.read_bytes()
    beside = module.detect(Detect(str(tmp_path / "run"), predict=(photo,), out=photo.parent, device="cpu"))
    assert beside == [tmp_path / "photos" / "0-2.png"] and photo.read_bytes() == before
    (tmp_path / "empty").mkdir()
    for wrong, message in (
        (tmp_path / "photos" / "notes.txt", r"notes\.txt: .*give image files"),
        (tmp_path / "nothing", "No such file .*nothing.*; give image files or folders"),
        (tmp_path / "empty", "no images to show"),
    ):
        with pytest.raises(ValueError, match=message):
            predicted(wrong)


def test_a_mask_is_tinted_and_a_box_outlined(coco: Path) -> None:
    source = open_split(coco, "val2017")
    image = source.load(1)
    annotation = source.objects(1)[0]
    drawn = draw(image, [annotation], {7: "rectangle"})
    x, y, w, h = (round(v) for v in annotation["bbox"])
    assert tuple(drawn[y + h, x + w // 2]) == color(7)
    middle = drawn[y + h - 4, x + w // 2]
    assert np.abs(middle - (0.55 * 250 + 0.45 * np.array(color(7)))).max() <= 1
    assert np.array_equal(drawn[-1, -1], image[-1, -1])
    assert len({color(k) for k in range(1, 91)}) == 90


def test_images_of_one_name_in_two_folders_are_two_pictures(tmp_path: Path, make_split: Any) -> None:
    def move(dataset: dict[str, Any]) -> None:
        for n, folder in enumerate("xy"):
            (tmp_path / "a" / folder).mkdir()
            (tmp_path / "a" / f"{n}.png").rename(tmp_path / "a" / folder / "0.png")
            dataset["images"][n]["file_name"] = f"{folder}/0.png"

    make_split(tmp_path, "a", 3, move)
    save_pictures(tmp_path / "pictures", open_split(tmp_path, "a"), [], count=8)
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == ["2.png", "x-0.png", "y-0.png"]


# ------------------------------------------------------------------------------------------------------ two processes

WORKER = """
import sys
from pathlib import Path
from patchmix.evaluate.detection.detect import detect
from patchmix.settings import Detect
from patchmix import distributed
import torch
torch.set_num_threads(1)
root = Path(sys.argv[1])
common = {"device": "cpu", "workers": 0}
detector, coco = str(root / "detector"), root / "coco"
with distributed.process_group(torch.device("cpu")):
    detect(Detect(detector, coco, root / "two", eval_only=True, val="train2017", pictures=0, **common))
    settings = Detect(
        str(root / "encoder.safetensors"), coco, root / "trained", image_size=64, channels=16, head_dim=16,
        smallest_anchor=8, epochs=1, batch_size=2, rois_per_image=16, pictures=1, **common
    )
    result = detect(settings)
    (root / f"ap-{distributed.rank()}").write_text(repr(result.metrics))
    try:
        detect(Detect(detector, coco, eval_only=True, val="broken2017", pictures=0, **common))
    except ValueError as error:
        (root / f"error-{distributed.rank()}").write_text(str(error))
"""


def test_two_processes_see_every_image_once(
    encoder_file: Backbone, coco: Path, tmp_path: Path, make_split: Any
) -> None:
    """Five images in two parts: what is found is what one process finds. A broken image is an error in both."""
    make_split(coco, "broken2017", 3)
    (coco / "broken2017" / "2.png").write_bytes(b"broken")
    encoder_file.save(tmp_path / "encoder.safetensors")
    detect(encoder_file, coco, tmp_path / "detector", epochs=1)
    evaluate_only(tmp_path / "detector", coco, tmp_path / "one", val="train2017")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    processes = [subprocess.Popen(command, env=os.environ | common | {"RANK": str(rank)}) for rank in range(2)]
    assert [process.wait(timeout=240) for process in processes] == [0, 0]
    for kind in ("bbox", "segm"):
        one, two = (json.loads((tmp_path / n / f"detections.{kind}.json").read_text()) for n in ("one", "two"))
        assert [e["image_id"] for e in two] == [e["image_id"] for e in one] and len({e["image_id"] for e in two}) == 5
        assert two == one
    assert len(read_results(tmp_path / "two")) == len(read_results(tmp_path / "trained")) == 1
    assert (tmp_path / "ap-0").read_text() == (tmp_path / "ap-1").read_text()
    for rank in range(2):
        assert "broken2017/2.png" in (tmp_path / f"error-{rank}").read_text()


# ------------------------------------------------------------------------------------------------------- real learning


@pytest.mark.slow
def test_a_small_vit_learns_a_handful_of_coco_images_by_heart(coco_mini: Path, tmp_path: Path) -> None:
    """Eight training images with one to three larger objects, 180 steps from scratch: four minutes on one core."""
    path = coco_mini / "annotations" / "instances_train2017.json"
    dataset = json.loads(path.read_text())
    area = {image["id"]: image["width"] * image["height"] for image in dataset["images"]}
    objects: dict[int, list[dict[str, Any]]] = {image: [] for image in area}
    for annotation in dataset["annotations"]:
        objects[annotation["image_id"]].append(annotation)
    clear = [
        i for i in sorted(area) if 1 <= len(objects[i]) <= 3 and all(a["area"] > 0.02 * area[i] for a in objects[i])
    ]
    chosen = set(clear[:8])
    dataset["images"] = [image for image in dataset["images"] if image["id"] in chosen]
    dataset["annotations"] = [a for a in dataset["annotations"] if a["image_id"] in chosen]
    (coco_mini / "annotations" / "instances_few.json").write_text(json.dumps(dataset))
    (coco_mini / "few").symlink_to("train2017")
    torch.manual_seed(0)
    encoder = create_encoder("vit_tiny_patch8_128", dim=96, depth=4, heads=3)
    backbone = Backbone(Architecture.of("vit_tiny_patch8_128", encoder), encoder.state_dict())
    options: dict[str, Any] = {
        "image_size": 128,
        "window": 0,
        "channels": 64,
        "head_dim": 256,
        "smallest_anchor": 16,
        "epochs": 90,
        "batch_size": 4,
        "warmup_steps": 20,
        "weight_decay": 0.05,
        "layer_decay": 1.0,
        "drop_path": 0.0,
        "clip_grad": 1.0,
        "scale": (1.0, 1.0),
        "flip": False,
        "rois_per_image": 64,
        "global_blocks": 4,
    }
    result = detect(backbone, coco_mini, tmp_path, **options, train="few", val="few")
    assert len(chosen) == 8
    assert result.metrics["box_ap50"] > 0.6
    assert result.metrics["mask_ap50"] > 0.5
