"""The authors' code, run once on small cases, against ours: same weights and inputs, same numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from patchmix.build import build_encoder
from patchmix.config import ModelConfig
from patchmix.losses import contrast
from patchmix.methods.options import PatchMixOptions
from patchmix.methods.patchmix import PatchMixMethod
from patchmix.mixing.patchmix import PatchMix, owners
from patchmix.nn.tokens import add_positions
from patchmix.schedules import Cosine, WarmupCosine
from patchmix.train.optimizer import build_optimizer, set_hyperparameters

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(params=["a_m3", "a_m2"])
def golden(request: pytest.FixtureRequest, golden_folder: Path) -> tuple[dict, dict[str, Tensor], dict[str, Tensor]]:
    folder, name = golden_folder, request.param
    settings = json.loads((folder / f"{name}.json").read_text())
    checkpoint = torch.load(folder / f"{name}.pth", weights_only=True)
    return settings, load_file(folder / f"{name}.safetensors"), checkpoint["state_dict"]


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their names → ours."""
    ours = {}
    for name, tensor in weights.items():
        part, _, rest = name.partition(".")
        if part == "base_encoder":
            name = f"projector.{rest[5:]}" if rest.startswith("head.") else f"encoder.{rest}"
        elif part == "momentum_encoder":
            name = "momentum_copy.network." + (f"1.{rest[5:]}" if rest.startswith("head.") else f"0.{rest}")
        ours[name] = tensor
    return ours


def build(settings: dict, weights: dict[str, Tensor], label_smoothing: float = 0.0) -> PatchMixMethod:
    model = ModelConfig(
        f"vit_tiny_patch4_{settings.get('image_size', 16)}",
        dim=settings["dim"],
        depth=settings["depth"],
        heads=settings["heads"],
        drop_path=0.0,
    )
    encoder = build_encoder(model, any_image_size="local_crops" in settings)
    options = PatchMixOptions(
        num_mix=settings["M"],
        temperature=settings["temperature"],
        weights=(1.0, 0.5, 0.5),
        normalize_mix_to_mix=True,
        mixed_query=2,
        momentum=settings["momentum"],
        head_hidden=settings["head_hidden"],
        head_out=settings["head_out"],
        label_smoothing=label_smoothing,
    )
    method = PatchMixMethod(encoder, options)
    method.load_state_dict(renamed(weights))
    return method


def use_permutations(method: PatchMixMethod, monkeypatch: pytest.MonkeyPatch, *permutations: Tensor) -> None:
    waiting = list(permutations)
    monkeypatch.setattr(torch, "randperm", lambda n, generator=None: waiting.pop(0))


def test_mixed_images_and_targets(golden, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, tensors, _ = golden
    for view in (1, 2):
        permutation = tensors[f"perm{view}"]
        monkeypatch.setattr(torch, "randperm", lambda n, generator=None, p=permutation: p)
        mixed = PatchMix(settings["patch_size"], settings["M"])(tensors[f"x{view}"])
        torch.testing.assert_close(mixed.images, tensors[f"mix{view}"], **TOLERANCE)
    torch.testing.assert_close(mixed.share, tensors["soft_target.mix_to_origin"], **TOLERANCE)
    assert owners(settings["N"], settings["M"], tensors["perm1"]).shape == (
        settings["N"],
        len(tensors["perm1"]),
    )


def test_tokens_of_both_encoders(golden) -> None:
    settings, tensors, weights = golden
    method = build(settings, weights).eval()
    assert method.momentum_copy is not None
    for name, encoder in (("base", method.encoder), ("momentum", method.momentum_copy.network[0])):
        with torch.no_grad():
            tokens = encoder.forward_features(tensors["x1"])
            features = encoder(tensors["x1"])
        torch.testing.assert_close(tokens, tensors[f"eval.{name}_encoder.tokens"], **TOLERANCE)
        torch.testing.assert_close(features, tensors[f"eval.{name}_encoder.cls"], **TOLERANCE)


def test_queries_and_keys(golden) -> None:
    settings, tensors, weights = golden
    # Batch norm over six images amplifies rounding to about 1e-5. In float64 only the golden tensors' own rounding is
    # left, so that the comparison gives the same on every processor.
    method = build(settings, weights).train().double()
    x1, x2, mix1, mix2 = (tensors[name].double() for name in ("x1", "x2", "mix1", "mix2"))
    mix_q, q1 = method.queries(mix2, x1)
    k1, k2, mix_k = method.keys(x1, x2, mix1)
    for ours, name in ((mix_q, "mix2_q"), (q1, "q1"), (k1, "k1"), (k2, "k2"), (mix_k, "mix1_k")):
        assert (ours - tensors[name]).abs().max() <= 1e-5 * tensors[name].abs().max(), name
    target = tensors["soft_target.origin"]
    smoothed = contrast(tensors["q1"], tensors["k2"], target, settings["temperature"])
    torch.testing.assert_close(smoothed, tensors["loss_oto_smoothed"][0], **TOLERANCE)


def test_losses_gradients_step_and_momentum_update(golden, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, tensors, weights = golden
    method = build(settings, weights).train()
    use_permutations(method, monkeypatch, tensors["perm2"], tensors["perm1"])  # ours draws the mixed query's first
    out = method([tensors["x1"], tensors["x2"]])
    expected = {"oto": "loss_oto", "mto": "loss_mto", "mtm": "loss_mtm_normalised", "loss": "loss_total"}
    for ours, theirs in expected.items():
        torch.testing.assert_close(out[ours], tensors[theirs][0], **TOLERANCE)

    out["loss"].backward()
    parameters = dict(method.named_parameters())
    gradients = renamed({k[5:]: v for k, v in tensors.items() if k.startswith("grad.")})
    assert len(gradients) == 5
    for name, gradient in gradients.items():
        worst = (parameters[name].grad - gradient).abs().max()
        assert worst <= 1e-5 * max(1.0, gradient.abs().max().item()), name  # some gradients are above 10

    optimizer = build_optimizer(method)
    set_hyperparameters(optimizer, lr=settings["lr"], weight_decay=settings["weight_decay"])
    optimizer.step()
    method.after_step(0.0)
    after = renamed({k[11:]: v for k, v in tensors.items() if k.startswith("after_step.")})
    assert len(after) == 5
    for name, value in after.items():
        torch.testing.assert_close(parameters[name].detach(), value, **TOLERANCE)


def test_a_step_with_local_crops(golden_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = json.loads((golden_folder / "a_crops.json").read_text())
    tensors = load_file(golden_folder / "a_crops.safetensors")
    weights = torch.load(golden_folder / "a_crops.pth", weights_only=True)["state_dict"]
    method = build(settings, weights, label_smoothing=settings["smoothing_of_origin"]).train()
    crops = [tensors[f"local{i}"] for i in range(settings["local_crops"])]
    with torch.no_grad():
        class_token = method.encoder.cls_token  # type: ignore[union-attr]
        tokens = add_positions(method.encoder, torch.zeros(1, 3, 3, settings["dim"]))[0]  # type: ignore[arg-type]
        tokens[0] -= class_token[0, 0]  # type: ignore[index]
    torch.testing.assert_close(tokens, tensors["local_positions"], **TOLERANCE)

    # Gradients are compared in float64: what is left is the rounding of the golden tensors.
    method = method.double()
    wide = {name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()}
    permutations = [tensors[f"perm{i}"] for i in range(5)]
    use_permutations(method, monkeypatch, permutations[1], permutations[0], *permutations[2:])
    out = method([wide["x1"], wide["x2"], *[crop.double() for crop in crops]])
    expected = {name: wide[f"loss_{name}"] for name in ("oto", "local", "mixlocal")}
    expected |= {"mto": 2 * wide["loss_mto_half"], "mtm": 2 * wide["loss_mtm_half"], "loss": wide["loss_total"]}
    for name, value in expected.items():
        torch.testing.assert_close(out[name].double(), value[0], **TOLERANCE)
    q_local = method.queries(torch.cat(crops).double())[0]
    torch.testing.assert_close(q_local, wide["local_q"], atol=1e-5 * float(wide["local_q"].abs().max()), rtol=1e-5)

    out["loss"].backward()
    parameters = dict(method.named_parameters())
    gradients = renamed({k[5:]: v for k, v in wide.items() if k.startswith("grad.")})
    assert len(gradients) == 7
    for name, gradient in gradients.items():
        worst = (parameters[name].grad - gradient).abs().max()
        assert worst <= 1e-5 * max(1.0, gradient.abs().max().item()), name
    optimizer = build_optimizer(method)
    set_hyperparameters(optimizer, lr=settings["lr"], weight_decay=settings["weight_decay"])
    optimizer.step()
    method.after_step(0.0)
    after = renamed({k[11:]: v for k, v in wide.items() if k.startswith("after_step.")})
    assert len(after) == 13
    for name, value in after.items():
        torch.testing.assert_close(dict(method.named_parameters())[name].detach(), value, **TOLERANCE)


def test_switch_of_smoothing_gives_their_target(golden, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, tensors, weights = golden
    method = build(settings, weights, label_smoothing=0.1).train()
    use_permutations(method, monkeypatch, tensors["perm2"], tensors["perm1"])
    out = method([tensors["x1"], tensors["x2"]])
    torch.testing.assert_close(out["oto"], tensors["loss_oto_smoothed"][0], **TOLERANCE)


def test_schedules(golden) -> None:
    _, tensors, _ = golden
    epochs, steps, warmup = 20, 7, 3
    total = epochs * steps
    lr = WarmupCosine(tensors["schedule.lr"].max().item(), 1e-6, warmup=warmup / epochs, step=1 / total)
    decay = Cosine(0.04, 0.4)
    momentum = Cosine(0.996, 1.0)
    for i in range(total):
        assert math.isclose(lr(i / total), tensors["schedule.lr"][i], abs_tol=1e-9)
        assert math.isclose(decay(i / total), tensors["schedule.wd"][i], abs_tol=1e-9)
        assert math.isclose(momentum(i / total), tensors["schedule.momentum"][i], abs_tol=1e-7)
