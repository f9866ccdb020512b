from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from patchmix.data.loader import Loader
from patchmix.data.shapes import shapes_source
from patchmix.evaluate.features import extract
from patchmix.evaluate.finetune import (
    Erasing,
    FinetuneMethod,
    TimmAugmentation,
    _posterize,
    classifier,
    finetune,
    seeded_globally,
    usual_base_lr,
)
from patchmix.evaluate.labeled import open_labeled
from patchmix.evaluate.results import Result, read_results
from patchmix.interop.backbone import Backbone
from patchmix.interop.loading import load_backbone
from patchmix.settings import Finetune
from patchmix.train.optimizer import layer_groups

RAND_AUGMENT = "rand-m9-mstd0.5-inc1"
SHORT: dict[str, Any] = {"epochs": 3, "batch_size": 16}


def evaluate(backbone: Backbone, data: Path, **options: Any) -> Result:
    return finetune(Finetune("", str(data), **({"workers": 0} | options)), backbone)


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """48 training and 20 test images of ten classes, as files."""
    for split, images in (("train", 48), ("val", 20)):
        source = shapes_source("train" if split == "train" else "test", images)
        for i in range(images):
            path = tmp_path / "few" / split / f"class{i % 10}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(source.load(i)).save(path)
    return tmp_path / "few"


# ---------------------------------------------------------------------------------------------------- whole evaluation


class Stop(Exception):
    pass


def test_a_stopped_training_goes_on_and_ends_the_same(
    backbone: Backbone, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluate(backbone, few, **SHORT, out=tmp_path / "whole")
    original = Loader.batches

    def dying(self: Loader, start_step: int = 0) -> Iterator[object]:
        for step, batch in enumerate(original(self, start_step), start=start_step):
            if step == 4:
                raise Stop
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(Loader, "batches", dying)
        with pytest.raises(Stop):
            evaluate(backbone, few, **SHORT, out=tmp_path / "parts")
    random.seed(99)  # the world is another one after the crash
    np.random.seed(99)  # noqa: NPY002
    torch.manual_seed(99)
    parts = evaluate(backbone, few, **SHORT, out=tmp_path / "parts")
    assert parts.metrics == whole.metrics
    states = [
        torch.load(next(tmp_path.glob(f"{name}/finetune-*/checkpoints/step-*.pt")), weights_only=True)
        for name in ("whole", "parts")
    ]
    assert states[0]["step"] == states[1]["step"] == 9
    for name, tensor in states[0]["method"].items():
        assert torch.equal(tensor, states[1]["method"][name]), name


def test_what_it_leaves_is_what_it_tested(backbone: Backbone, few: Path, tmp_path: Path) -> None:
    backbone = replace(backbone, mean=(0.4, 0.5, 0.6))
    result = evaluate(backbone, few, **SHORT, out=tmp_path / "run")
    assert read_results(tmp_path / "run") == [result]
    assert result.images == 20
    assert result.metrics["best_top1"] >= result.top1
    test = open_labeled(few).test
    assert test is not None
    for file, metric in (("model", "top1"), ("model_ema", "ema_top1")):
        path = Path(result.details["model"]).with_name(f"{file}.safetensors")
        model = timm.create_model(**result.details["timm"], checkpoint_path=str(path))  # strict, by timm itself
        found = extract(model, test, image_size=32, mean=backbone.mean, std=backbone.std, device=torch.device("cpu"))
        assert found.labels is not None
        assert float((found.vectors.argmax(dim=1) == found.labels).double().mean()) == result.metrics[metric]
        again = load_backbone(path)  # the encoder, with heads and normalization
        assert (again.architecture, again.mean) == (backbone.architecture, backbone.mean)
        assert again.weights.keys() == backbone.weights.keys()
        torch.testing.assert_close(again.weights, {name: model.state_dict()[name] for name in again.weights})
    state = torch.load(next(tmp_path.glob("run/finetune-*/checkpoints/step-*.pt")), weights_only=True)["method"]
    for name, tensor in model.state_dict().items():  # the last one is the average
        assert torch.equal(tensor, state[f"ema.module.{name}"])
    assert not torch.equal(state["ema.module.head.weight"], state["encoder.head.weight"])
    assert not torch.equal(model.blocks[0].attn.qkv.weight, backbone.weights["blocks.0.attn.qkv.weight"])


class Planned(Exception):
    """Stops before the training."""


@pytest.mark.parametrize(("per_epoch", "values"), [(True, 4), (False, 8)])
def test_learning_rate_per_epoch(
    backbone: Backbone, few: Path, monkeypatch: pytest.MonkeyPatch, per_epoch: bool, values: int
) -> None:
    def plan_only(method: Any, loader: Any, plan: Any, **rest: Any) -> None:
        raise Planned(plan)

    monkeypatch.setattr("patchmix.evaluate.protocol.train", plan_only)
    with pytest.raises(Planned) as caught:
        evaluate(backbone, few, epochs=4, warmup_epochs=0, lr_per_epoch=per_epoch)
    rates = [caught.value.args[0].lr(step / 8) for step in range(8)]  # two steps in each epoch
    assert len(set(rates)) == values
    assert rates == sorted(rates, reverse=True)


def test_the_defaults_are_the_authors(backbone: Backbone, few: Path) -> None:
    result = evaluate(backbone, few, epochs=1)
    assert result.settings["batch_size"] == 48
    assert result.settings["lr"] == pytest.approx(1e-3 * 48 / 256)  # narrow as ViT-T
    wanted = {
        "weight_decay": 0.05,
        "layer_decay": 0.75,
        "drop_path": 0.1,
        "rand_augment": RAND_AUGMENT,
        "erasing": 0.25,
        "mixup": 0.8,
        "cutmix": 1.0,
        "label_smoothing": 0.1,
    }
    assert {key: result.settings[key] for key in wanted} == wanted
    assert (Finetune("", "").epochs, Finetune("", "").warmup_epochs) == (100, 10)
    assert usual_base_lr(384) == 5e-4


def test_an_odd_batch_is_refused(backbone: Backbone, few: Path) -> None:
    with pytest.raises(ValueError, match="batch size 15 must be a multiple of 2"):
        evaluate(backbone, few, batch_size=15)


# ------------------------------------------------------------------------------------------------------------- pieces


def test_layers_learn_more_slowly_the_deeper_they_lie(backbone: Backbone) -> None:
    """Head 1, last block and the norm behind it 0.75, and so on down to the patch embedding."""
    model = classifier(backbone, 4)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    scales, decayed = {}, {}
    for group in layer_groups(model, 0.75):
        for parameter in group["params"]:
            scales[name_of[id(parameter)]] = group["lr_scale"]
            decayed[name_of[id(parameter)]] = group["decayed"]
    assert set(scales) == set(name_of.values())
    assert scales["head.weight"] == 1.0
    assert scales["blocks.1.mlp.fc1.weight"] == scales["norm.weight"] == pytest.approx(0.75)
    assert scales["blocks.0.mlp.fc1.weight"] == pytest.approx(0.75**2)
    assert scales["patch_embed.proj.weight"] == scales["pos_embed"] == pytest.approx(0.75**3)
    assert decayed["blocks.0.attn.qkv.weight"] and decayed["head.weight"]
    assert not any(decayed[name] for name in ("pos_embed", "cls_token", "norm.weight", "blocks.0.attn.qkv.bias"))


@pytest.mark.parametrize("highest", [0.99996, 0.4])
def test_the_average_follows_with_timms_warm_up(backbone: Backbone, highest: float) -> None:
    method = FinetuneMethod(classifier(backbone, 4), 4, Finetune("", "", ema_decay=highest))
    before = method.ema.module.head.weight.clone()
    weight = method.encoder.head.weight
    averages = [before]
    for step in range(1, 4):
        with torch.no_grad():
            weight.add_(1.0)
        method.after_step(0.0)
        since = step - 1
        decay = 0.0 if since <= 0 else min(highest, 1 - (1 + since) ** (-2 / 3))
        averages.append(averages[-1] * decay + weight.detach() * (1 - decay))
        torch.testing.assert_close(method.ema.module.head.weight, averages[-1])
    assert method.steps == 3
    assert not any(p.requires_grad for p in method.ema.parameters())


def test_mixing_follows_the_methods_own_generator(backbone: Backbone) -> None:
    method = FinetuneMethod(classifier(backbone, 4), 4, Finetune("", "")).eval()
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 4
    losses = []
    for seed in (1, 1, 2):
        method.generator.manual_seed(seed)
        np.random.seed(len(losses))  # noqa: NPY002 (whatever the world's generator holds)
        state = np.random.get_state()[1].copy()  # noqa: NPY002
        losses.append(method((images.clone(), labels))["loss"].item())
        assert np.array_equal(state, np.random.get_state()[1])  # noqa: NPY002
    assert losses[0] == losses[1] != losses[2]


def test_without_mixing_labels_are_smoothed(backbone: Backbone) -> None:
    method = FinetuneMethod(classifier(backbone, 4), 4, Finetune("", "", mixup=0, cutmix=0)).eval()
    with torch.no_grad():
        method.encoder.head.weight.zero_()
        method.encoder.head.bias.copy_(torch.tensor([2.0, 0.0, 0.0, 0.0]))
    loss = method((torch.randn(2, 3, 32, 32), torch.tensor([0, 0])))["loss"].item()
    log_p = torch.log_softmax(torch.tensor([2.0, 0.0, 0.0, 0.0]), dim=0)
    assert loss == pytest.approx(float(-(0.925 * log_p[0] + 0.025 * log_p[1:].sum())))


def test_an_augmentation_depends_on_seed_epoch_and_index_only() -> None:
    source = shapes_source("train", 8)
    images, indices = [source.load(i) for i in range(8)], np.arange(8)
    augment = TimmAugmentation(32, rand_augment=RAND_AUGMENT, mean=(0.5, 0.5, 0.5), seed=3)
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    (together,) = augment(images, epoch=2, indices=indices)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.array_equal(np.random.get_state()[1], states[2])  # noqa: NPY002
    assert together.dtype == np.uint8 and together.shape == (8, 32, 32, 3)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    torch.manual_seed(5)
    (reverse,) = augment(images[::-1], epoch=2, indices=indices[::-1])
    assert np.array_equal(reverse[::-1], together)
    (later,) = augment(images, epoch=3, indices=indices)
    other = TimmAugmentation(32, rand_augment=RAND_AUGMENT, mean=(0.5, 0.5, 0.5), seed=4)
    assert not np.array_equal(later, together)
    assert not np.array_equal(other(images, epoch=2, indices=indices)[0], together)


def test_small_images_are_padded_and_cropped_and_larger_ones_resized() -> None:
    """A ramp from left to right says by its slope whether it was scaled."""
    for size in (32, 64):
        crop = TimmAugmentation(size, rand_augment=RAND_AUGMENT, mean=(0.5, 0.5, 0.5), seed=0)._transform.transforms[0]
        ramp = Image.fromarray(np.tile(np.linspace(50, 250, size), (size, 1)).astype(np.uint8))
        crops = []
        for seed in range(40):
            with seeded_globally(seed):
                crops.append(np.asarray(crop(ramp)).astype(int))
        black = [int((image == 0).all(axis=0).sum()) for image in crops]  # columns of padding
        slopes = {round(float(np.diff(image[size // 2, 8:-8]).mean()) * size / 32) for image in crops}
        if size == 32:
            assert set(black) == {0, 1, 2, 3, 4} and slopes == {6}
        else:
            assert set(black) == {0} and len(slopes) > 2


def test_the_strongest_posterisation_is_an_image_still() -> None:
    """timm's largest magnitude asks for 0 bits, which Pillow 13 refuses."""
    image = Image.fromarray(shapes_source("train", 1).load(0))
    augment = TimmAugmentation(32, rand_augment="rand-m10-n2-inc1", mean=(0.5, 0.5, 0.5), seed=0)
    pixels = np.asarray(image)
    augment([pixels] * 200, epoch=0, indices=np.arange(200))  # some of these are posterised
    assert set(np.unique(np.asarray(_posterize(image, 0)))) <= {0, 128}
    assert np.array_equal(np.asarray(_posterize(image, 8)), pixels)


def test_erasing_puts_noise_into_a_quarter_of_the_images() -> None:
    erase = Erasing(0.25, seed=1)
    indices = torch.arange(400)
    erased = erase(torch.full((400, 3, 16, 16), 9.0), epoch=0, indices=indices)
    changed = (erased != 9.0).flatten(1).any(dim=1)
    assert 70 <= int(changed.sum()) <= 130
    share = (erased[changed] != 9.0).float().mean(dim=(1, 2, 3))
    assert float(share.min()) > 0.01 and float(share.max()) < 0.4
    noise = erased[erased != 9.0]
    assert abs(float(noise.mean())) < 0.05 and float(noise.std()) == pytest.approx(1, abs=0.05)
    again = erase(torch.full((400, 3, 16, 16), 9.0)[::2], epoch=0, indices=indices[::2])
    assert torch.equal(again, erased[::2])
    assert not torch.equal(erase(torch.full((400, 3, 16, 16), 9.0), epoch=1, indices=indices), erased)
