from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from torch import Tensor

from patchmix.data.loader import Loader
from patchmix.evaluate import linear
from patchmix.evaluate.linear import LinearMethod
from patchmix.evaluate.protocol import top_accuracies, usual_batch
from patchmix.evaluate.results import Result, read_results
from patchmix.evaluate.sweep import GRID, Candidate, Metrics, best_of, fit_candidates, score, usual_epochs
from patchmix.interop.backbone import Backbone
from patchmix.settings import Linear


def evaluate(backbone: Backbone, data: str | Path, **options: Any) -> Result:
    return linear.linear(Linear("", str(data), **({"workers": 0} | options)), backbone)


def blobs(images: int, dim: int, classes: int, noise: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Classes around random centers, seen through a badly conditioned map, on different scales: (N, D), (N,)."""
    world = torch.Generator().manual_seed(1)
    centers = torch.randn(classes, dim, generator=world)
    rotation = torch.linalg.qr(torch.randn(dim, dim, generator=world)).Q
    squeeze = torch.logspace(0, -1.5, dim)[:, None] * rotation * torch.logspace(-1, 1, dim) + 0.0
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (images,), generator=generator)
    vectors = centers[labels] + noise * torch.randn(images, dim, generator=generator)
    return vectors @ squeeze + 3.0, labels


# ---------------------------------------------------------------------------------------------------------- the sweep


@pytest.mark.parametrize(("images", "dim", "classes", "noise"), [(500, 12, 4, 2.0), (1500, 24, 3, 4.0)])
def test_candidates_reach_scikit_learns_minimum(images: int, dim: int, classes: int, noise: float) -> None:
    """The same objective, all decays at once, within 0.5 % of the minimum that L-BFGS finds, and the same answers."""
    vectors, labels = blobs(images, dim, classes, noise)
    unseen, truth = blobs(1000, dim, classes, noise, seed=2)
    candidates = [Candidate(0.3, decay) for decay in (1e-4, 1e-3, 1e-2)]
    models = fit_candidates(vectors, labels, candidates, classes=classes, epochs=usual_epochs(images))
    standard = ((vectors - vectors.mean(dim=0)) / vectors.std(dim=0, correction=0)).numpy()
    standard_unseen = ((unseen - vectors.mean(dim=0)) / vectors.std(dim=0, correction=0)).numpy()
    ours, ours_unseen = score(models, vectors, labels), score(models, unseen, truth)
    for i, candidate in enumerate(candidates):
        oracle = LogisticRegression(C=1 / (candidate.decay * images), max_iter=10_000, tol=1e-8)
        oracle.fit(standard, labels.numpy())
        least = log_loss(labels.numpy(), oracle.predict_proba(standard))
        least += candidate.decay / 2 * float((oracle.coef_**2).sum())
        reached = ours[i].loss + candidate.decay / 2 * float(models.weight[:, i].square().sum())
        assert least * (1 - 1e-4) <= reached <= least * 1.005
        assert ours_unseen[i].top1 == pytest.approx(oracle.score(standard_unseen, truth.numpy()), abs=0.006)


def test_separable_features_are_separated() -> None:
    vectors, labels = blobs(300, 16, 5, noise=0.05)
    unseen, truth = blobs(300, 16, 5, noise=0.05, seed=3)
    models = fit_candidates(vectors, labels, GRID, classes=5, epochs=100)
    scores = score(models, unseen, truth)
    assert max(s.top1 for s in scores) == 1.0
    assert all(s.top5 == 1.0 for s in scores)


def test_candidates_do_not_influence_each_other() -> None:
    """One alone is what it is among others: the batched problem is many problems."""
    vectors, labels = blobs(200, 8, 3, 1.0)
    together = fit_candidates(vectors, labels, GRID, classes=3, epochs=20)
    for i in (0, 7, 19):
        alone = fit_candidates(vectors, labels, [GRID[i]], classes=3, epochs=20)
        torch.testing.assert_close(alone.weight[:, 0], together.weight[:, i], rtol=1e-4, atol=1e-5)


def test_rows_train_as_their_copies_do() -> None:
    vectors, labels = blobs(120, 8, 3, 1.0)
    rows = torch.arange(0, 120, 2)
    some = fit_candidates(vectors, labels, GRID, classes=3, epochs=5, rows=rows)
    copies = fit_candidates(vectors[rows], labels[rows], GRID, classes=3, epochs=5)
    torch.testing.assert_close(some.weight, copies.weight)


def test_hostile_features() -> None:
    vectors, labels = blobs(60, 6, 3, 1.0)
    vectors[:, 2] = 7.0  # constant
    assert torch.isfinite(fit_candidates(vectors, labels, GRID, classes=3, epochs=5).weight).all()
    fewer, some = vectors[:4], labels[:4]  # fewer images than features
    assert torch.isfinite(fit_candidates(fewer, some, GRID, classes=3, epochs=5).weight).all()
    vectors[3, 1] = float("nan")
    with pytest.raises(ValueError, match="1 of 60 images are NaN"):
        fit_candidates(vectors, labels, GRID, classes=3, epochs=5)


def test_the_best_candidate() -> None:
    scores = [Metrics(0.5, 1.0, 0.1), Metrics(0.7, 1.0, 0.9), Metrics(0.7, 1.0, 0.8), Metrics(0.6, 1.0, 0.0)]
    assert best_of(scores) == 2


def test_the_fast_protocol(backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = evaluate(backbone, "shapes:300", protocol="fast", epochs=20, out=tmp_path)
    assert result.protocol == "linear-fast"
    assert read_results(tmp_path) == [result]
    assert {"top1", "top5", "best_top1"} == set(result.metrics)
    assert result.metrics["best_top1"] >= result.top1 > 0.1
    assert result.settings["chosen_on"] == "30 held-out training images"
    assert result.settings["augmentation"] == "none"
    assert Candidate(result.details["relative_lr"], result.details["weight_decay"]) in GRID


def test_the_fast_protocol_does_not_choose_on_the_test_images(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[int] = []
    original = linear.sweep.score

    def noted(models: object, vectors: Tensor, labels: Tensor) -> list[Metrics]:
        scored.append(len(vectors))
        return original(models, vectors, labels)  # type: ignore[arg-type]

    monkeypatch.setattr(linear.sweep, "score", noted)
    evaluate(backbone, "shapes:100", protocol="fast", epochs=3)
    assert scored == [10, 2000, 2000, 2000]  # all candidates on the held-out images, the chosen one on the test images


# ------------------------------------------------------------------------------------------------- the paper's protocol


def test_the_papers_protocol(backbone: Backbone, tmp_path: Path) -> None:
    result = evaluate(backbone, "shapes:600", epochs=3, base_lr=0.03, out=tmp_path)
    assert result.protocol == "linear"
    assert result.settings["lr"] == 0.03
    assert result.settings["batch"] == 256
    assert result.metrics["best_top1"] >= result.top1
    assert 0 < result.details["best_epoch"] <= 3
    assert read_results(tmp_path) == [result]
    (folder,) = tmp_path.glob("linear-*")
    state = torch.load(next(folder.glob("checkpoints/step-*.pt")), weights_only=True)
    for name, tensor in backbone.weights.items():  # frozen is frozen
        assert torch.equal(state["method"][f"encoder.{name}"], tensor)
    assert state["method"]["head.bias"].abs().min() > 0  # they began at 0
    assert state["optimizer"]["param_groups"][0]["nesterov"]
    assert state["step"] == 6 and state["best"] == {"top1": [result.metrics["best_top1"], result.details["best_epoch"]]}


def test_the_learning_rate_is_the_authors_for_each_width_and_grows_with_the_batch(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [linear.usual_base_lr(dim) for dim in (128, 192, 384, 768)] == [0.05, 0.05, 0.02, 0.01]
    result = evaluate(backbone, "shapes:200", epochs=1, batch_size=64)
    assert result.settings["lr"] == pytest.approx(0.05 * 64 / 256)


class Stop(Exception):
    pass


def stopping_after(steps: int, original: Callable[..., Iterator[object]]) -> Callable[..., Iterator[object]]:
    """`Loader.batches` that dies before the batch of a step, as a killed process would."""

    def batches(self: Loader, start_step: int = 0) -> Iterator[object]:
        for step, batch in enumerate(original(self, start_step), start=start_step):
            if step == steps:
                raise Stop
            yield batch

    return batches


def test_a_stopped_evaluation_goes_on_and_ends_the_same(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluate(backbone, "shapes:512", epochs=3, out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(Loader, "batches", stopping_after(5, Loader.batches))
        with pytest.raises(Stop):
            evaluate(backbone, "shapes:512", epochs=3, out=tmp_path / "parts")
    assert read_results(tmp_path / "parts") == []
    began: list[int] = []
    original = Loader.batches

    def noted(self: Loader, start_step: int = 0) -> Iterator[object]:
        began.append(start_step)
        return original(self, start_step)

    monkeypatch.setattr(Loader, "batches", noted)
    parts = evaluate(backbone, "shapes:512", epochs=3, out=tmp_path / "parts")
    assert began == [4]  # the last whole epoch
    assert parts.metrics == whole.metrics
    assert parts.details == whole.details
    heads = [
        torch.load(next(tmp_path.glob(f"{name}/linear-*/checkpoints/step-*.pt")), weights_only=True)["method"]
        for name in ("whole", "parts")
    ]
    assert torch.equal(heads[0]["head.weight"], heads[1]["head.weight"])


def test_other_settings_do_not_go_on_with_a_checkpoint(backbone: Backbone, tmp_path: Path) -> None:
    evaluate(backbone, "shapes:64", epochs=1, out=tmp_path)
    evaluate(backbone, "shapes:64", epochs=1, base_lr=0.02, out=tmp_path)
    evaluate(replace(backbone, mean=(0.5, 0.5, 0.5)), "shapes:64", epochs=1, out=tmp_path)
    assert len(list(tmp_path.glob("linear-*"))) == 3


def test_the_loss_of_the_frozen_method_has_gradients_for_the_head_only(backbone: Backbone) -> None:
    method = LinearMethod(backbone.encoder(), 4)
    method.train()
    out = method((torch.randn(6, 3, 32, 32), torch.arange(6) % 4))
    out["loss"].backward()
    assert {name for name, p in method.named_parameters() if p.grad is not None} == {"head.weight", "head.bias"}
    assert not method.encoder.training
    assert not any(p.requires_grad for p in method.encoder.parameters())


def test_the_best_value_and_its_epoch_are_kept(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = iter([0.5, 0.4, 0.3])  # of the two epochs, and again of the last; the untrained layer is not tested
    monkeypatch.setattr(linear.protocol, "top_accuracies", lambda *_: {"top1": next(values), "top5": 0.9})
    result = evaluate(backbone, "shapes:64", epochs=2, out=tmp_path)
    assert result.metrics == {"top1": 0.4, "top5": 0.9, "best_top1": 0.5} and result.details["best_epoch"] == 1.0
    again = evaluate(backbone, "shapes:64", epochs=2, out=tmp_path)  # only tested, at the end
    assert again.metrics == {"top1": 0.3, "top5": 0.9, "best_top1": 0.5} and again.details["best_epoch"] == 1.0


def test_a_checkpoint_of_version_01_goes_on(backbone: Backbone, tmp_path: Path) -> None:
    """It kept steps and best scores in the method."""
    first = evaluate(backbone, "shapes:64", epochs=1, out=tmp_path)
    (path,) = tmp_path.glob("linear-*/checkpoints/step-*.pt")
    state = torch.load(path, weights_only=True)
    del state["best"]
    state["method"]["scores.steps"] = torch.tensor(1)
    torch.save(state, path)
    assert evaluate(backbone, "shapes:64", epochs=1, out=tmp_path).top1 == first.top1


def test_top_accuracies() -> None:
    logits = torch.eye(7)[:3] * 3 + torch.arange(7) * 0.1
    assert top_accuracies(logits, torch.tensor([0, 6, 1])) == {
        "top1": pytest.approx(1 / 3),
        "top5": pytest.approx(2 / 3),
    }
    assert top_accuracies(logits[:, :4], torch.tensor([0, 1, 2]), "ema_") == {"ema_top1": 1.0}


def test_the_usual_batch() -> None:
    assert usual_batch(32, 50_000, multiple=1) == 256
    assert usual_batch(224, 1_281_167, multiple=8) == 1024
    assert usual_batch(32, 99, multiple=4) == 96


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protocol": "fast", "base_lr": 0.1}, "leave out --base-lr"),
        ({"batch_size": 400}, "fewer than the batch size 400"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], message: str, backbone: Backbone) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(backbone, "shapes:50", **options)


def test_without_a_test_split_a_fifth_is_tested_on(backbone: Backbone, class_folder: Path) -> None:
    result = evaluate(backbone, class_folder, protocol="fast", epochs=2)
    assert result.images == 3
    assert result.settings["test"] == "a fifth held out"
