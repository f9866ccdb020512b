"""Each method's loss against its paper's equations, on what its own networks give for each view alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from patchmix.build import METHODS
from patchmix.config import validate
from patchmix.methods import swav
from patchmix.methods.method import Method
from patchmix.methods.options import METHOD_OPTIONS
from patchmix.methods.swav import sinkhorn
from patchmix.mixing import Mixed, PatchMix, ResizeMix
from patchmix.nn.tokens import all_tokens
from patchmix.nn.vit import create_encoder
from tests.oracles import methods as oracle

SMALL: dict[str, Any] = {"head_hidden": 32, "head_out": 16}
OTHERS = [name for name in METHODS if name != "patchmix"]


def make(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    encoder = create_encoder("vit_tiny_patch4_16", dim=24, depth=2, heads=2, any_image_size=True)
    own = {"swav": {"prototypes": 12}}.get(name, {})
    return METHODS[name](encoder, validate(METHOD_OPTIONS[name], SMALL | own | options)).train()


def views(n: int = 6, local: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 3, size, size, generator=generator) for size in [16, 16] + [8] * local]


def shaken(method: Method) -> None:
    """The momentum network must differ from the base, or a mistake between them stays hidden."""
    with torch.no_grad():
        for parameter in method.parameters():
            if not parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))


def near(value: float) -> Any:
    return pytest.approx(value, rel=2e-4)


def queries(method: Any, *batches: Tensor) -> list[Tensor]:
    return [method.predictor(method.projector(method.encoder(x))) for x in batches]


def keys(method: Any, *batches: Tensor) -> list[Tensor]:
    f, g = method.momentum_copy.network
    return [g(f(x)) for x in batches]


def together(method: Any, *batches: Tensor) -> list[Tensor]:
    """Projections by one pass over all views, so that batch norms see them together: SimCLR and SwAV, as published."""
    return list(method.projector(torch.cat([method.encoder(x) for x in batches])).chunk(len(batches)))


LINEAR, AFFINE, NORM = "Linear(weight)", "Linear(weight,bias)", "BatchNorm(weight,bias)"
DISTIL = [AFFINE, "GELU()", AFFINE, "GELU()", AFFINE]


@pytest.mark.parametrize(
    ("name", "head", "layers"),
    [
        ("mocov3", "projector", [LINEAR, NORM, "ReLU()", LINEAR, NORM, "ReLU()", LINEAR, "BatchNorm()"]),
        ("mocov3", "predictor", [LINEAR, NORM, "ReLU()", LINEAR, "BatchNorm()"]),
        ("simclr", "projector", [LINEAR, NORM, "ReLU()", LINEAR, "BatchNorm(weight)"]),
        ("byol", "projector", [AFFINE, NORM, "ReLU()", LINEAR]),
        ("byol", "predictor", [AFFINE, NORM, "ReLU()", LINEAR]),
        ("swav", "projector", [AFFINE, NORM, "ReLU()", AFFINE]),
        ("dino", "head.mlp", DISTIL),
        ("ibot", "head.mlp", DISTIL),
    ],
)
def test_heads_learn_what_the_authors_heads_learn(name: str, head: str, layers: list[str]) -> None:
    found = []
    for module in make(name).get_submodule(head):
        learnt = [key for key, parameter in module.named_parameters() if parameter.requires_grad]
        found.append(f"{type(module).__name__}({','.join(learnt)})")
    assert found == layers


def test_mocov3() -> None:
    method = make("mocov3")
    shaken(method)
    x1, x2, *crops = views(local=2)
    q1, q2 = queries(method, x1, x2)
    k1, k2 = keys(method, x1, x2)
    expected = oracle.ctr(q1, k2, 0.2) + oracle.ctr(q2, k1, 0.2)
    out = method([x1, x2])
    assert out["loss"].item() == near(expected)
    assert out["contrast/chance"].item() == near(2 * math.log(6))
    local = sum(oracle.ctr(q, k, 0.2) for q in queries(method, *crops) for k in (k1, k2)) / 2
    assert method([x1, x2, *crops])["loss"].item() == near(expected + local)
    assert not method.encoder.patch_embed.proj.weight.requires_grad
    assert make("mocov3", frozen_patch_embed=False).encoder.patch_embed.proj.weight.requires_grad


def test_simclr() -> None:
    method = make("simclr", temperature=0.3)
    x1, x2 = views()
    with torch.no_grad():
        method.projector[-1].weight.uniform_(0.5, 2.0)  # the scale that is learnt
    z1, z2 = together(method, x1, x2)
    out = method([x1, x2])
    assert out["loss"].item() == near(oracle.nt_xent(z1, z2, 0.3))
    assert out["ntxent/chance"].item() == near(math.log(11))
    assert method(views(local=2))["loss"] > out["loss"]


def test_byol() -> None:
    method = make("byol")
    shaken(method)
    x1, x2, *crops = views(local=2)
    q1, q2 = queries(method, x1, x2)
    z1, z2 = keys(method, x1, x2)
    expected = oracle.byol(q1, z2) + oracle.byol(q2, z1)
    assert method([x1, x2])["loss"].item() == near(expected)
    local = sum(oracle.byol(q, z) for q in queries(method, *crops) for z in (z1, z2)) / 2
    assert method([x1, x2, *crops])["loss"].item() == near(expected + local)


@pytest.mark.parametrize("local", [0, 2])
def test_swav(local: int) -> None:
    method = make("swav")
    x = views(local=local)
    expected = oracle.swav(together(method, *x), method.prototypes, 0.1, 0.05, 3)
    assert method(x)["loss"].item() == near(expected)


def test_swav_codes_are_balanced_after_the_stated_iterations() -> None:
    """3000 prototypes and the batch of the paper's small-batch runs: marginals 1/K and 1/B to 1e-3."""
    z = torch.nn.functional.normalize(torch.randn(512, 128), dim=1)
    c = torch.nn.functional.normalize(torch.randn(300, 128), dim=1)
    q = sinkhorn(z @ c.T, 0.05, 3) / 512
    assert (q.sum(dim=1) - 1 / 512).abs().max() < 1e-6
    assert (q.sum(dim=0) - 1 / 300).abs().max() < 1e-3
    converged = sinkhorn(z @ c.T, 0.05, 200) / 512
    assert (converged.sum(dim=0) - 1 / 300).abs().max() < 1e-6
    unbalanced = torch.softmax(z @ c.T / 0.05, dim=1) / 512  # what no iteration would give
    assert (unbalanced.sum(dim=0) - 1 / 300).abs().max() > 1e-3


def test_swav_prototypes_are_unit_and_freeze_for_the_first_part_only() -> None:
    method = make("swav", freeze_prototypes=0.5)
    with torch.no_grad():
        method.prototypes.mul_(3.0)
    for progress, moves in ((0.0, False), (0.49, False), (0.5, True)):
        method.before_step(progress)
        torch.testing.assert_close(method.prototypes.norm(dim=1), torch.ones(12))
        method.zero_grad()
        method(views())["loss"].backward()
        assert (method.prototypes.grad.abs().max() > 0) == moves
        assert [p is method.prototypes for p in method.fixed_parameters()] == ([] if moves else [True])
        assert method.projector[0].weight.grad.abs().max() > 0


def test_swav_queue_joins_the_balance_once_it_is_full() -> None:
    plain, method = make("swav"), make("swav", queue_length=12, queue_start=0.5)
    x, others = views(), [torch.randn(6, 3, 16, 16) for _ in range(2)]
    unit = torch.nn.functional.normalize
    z, z_others = ([unit(f, dim=1) for f in together(plain, *v)] for v in (x, others))
    method.before_step(0.4)
    method(x)
    assert method.queued == 0  # not before its time
    method.before_step(0.5)
    assert method(others)["loss"].item() == pytest.approx(plain(others)["loss"].item(), rel=1e-6)
    assert method(x)["loss"].item() == pytest.approx(plain(x)["loss"].item(), rel=1e-6)  # half full until here
    newest_first = torch.stack([torch.cat(pair) for pair in zip(z, z_others, strict=True)])
    torch.testing.assert_close(method.queue, newest_first, atol=1e-5, rtol=1e-4)
    scores = z[0] @ method.prototypes.T
    everyone = torch.cat([scores, newest_first[0] @ method.prototypes.T])
    expected = torch.tensor(oracle.sinkhorn(oracle.rows(everyone), 0.05, 3)[:6])
    torch.testing.assert_close(method.codes(z[0], scores, method.queue[0]), expected, atol=1e-4, rtol=1e-3)
    assert method(x)["loss"].item() != pytest.approx(plain(x)["loss"].item(), rel=1e-4)


def test_swav_compares_its_queue_in_fp32_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    method, seen = make("swav", queue_length=6, queue_start=0.0), []
    monkeypatch.setattr(swav, "sinkhorn", lambda scores, *how: seen.append(scores) or sinkhorn(scores, *how))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        method(views())
        queued = method.queue.clone()
        method(views())
    torch.testing.assert_close(seen[2][6:], queued[0] @ method.prototypes.T, rtol=0, atol=1e-6)


@pytest.mark.parametrize("local", [0, 2])
def test_dino(local: int) -> None:
    method = make("dino")
    shaken(method)
    x = views(local=local)
    method.center.value.normal_(std=0.1)
    s = [method.head(method.encoder(each)) for each in x]
    f, g = method.momentum_copy.network
    t = [g(f(each)) for each in x[:2]]
    expected = oracle.dino(s, t, method.center.value, 0.1, 0.04)
    assert method(x)["loss"].item() == near(expected)


@pytest.mark.parametrize("name", ["dino", "ibot"])
def test_checkpoints_of_0_1_still_load(name: str) -> None:
    """They spell the buffers of the centers the British way."""
    method, other = make(name), make(name)
    method.center.value.normal_()
    state = {key.replace("center", "centre"): value for key, value in method.state_dict().items()}
    assert any(key.startswith("centre") for key in state)
    other.load_state_dict(state)
    assert torch.equal(other.center.value, method.center.value)
    assert any(key.startswith("centre") for key in state)  # the caller's dict is left alone


def test_dino_center_follows_the_teachers_mean() -> None:
    method = make("dino", center_momentum=0.75)
    x = views()
    f, g = method.momentum_copy.network
    t = torch.cat([g(f(each)) for each in x]).detach()
    for step in range(1, 4):
        method(x)
        torch.testing.assert_close(method.center.value, (1 - 0.75 ** (step - 1)) * t.mean(dim=0), atol=1e-6, rtol=1e-4)
        method.center.update()
        torch.testing.assert_close(method.center.value, (1 - 0.75**step) * t.mean(dim=0), atol=1e-6, rtol=1e-4)
    method.after_step(1.0)  # μ = 1: nothing moves, and nothing was observed
    torch.testing.assert_close(method.center.value, (1 - 0.75**3) * t.mean(dim=0), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["dino", "ibot"])
def test_teacher_temperature_rises_linearly_and_the_last_layer_freezes(name: str) -> None:
    method = make(name, teacher_temperature=(0.04, 0.08), teacher_warmup=0.5, freeze_last_layer=0.3)
    for progress, temperature in ((0.0, 0.04), (0.25, 0.06), (0.5, 0.08), (0.9, 0.08)):
        method.before_step(progress)
        assert method.scalars["teacher_temperature"] == pytest.approx(temperature)
        method.zero_grad()
        method(views())["loss"].backward()
        assert (method.head.prototypes.grad.abs().max() > 0) == (progress >= 0.3)
        assert len(list(method.fixed_parameters())) == (0 if progress >= 0.3 else 1)
        assert method.head.mlp[0].weight.grad.abs().max() > 0


def test_the_length_of_prototypes_is_an_option() -> None:
    assert make("dino").head.lengths is None
    head = make("dino", norm_last_layer=False).head
    x = torch.randn(3, 24)
    unit = head(x)
    with torch.no_grad():
        head.lengths.mul_(2.0)
    torch.testing.assert_close(head(x), 2 * unit)
    assert unit.abs().max() <= 1.0  # cosines


@pytest.mark.parametrize("local", [0, 2])
def test_ibot(local: int) -> None:
    method = make("ibot", weights=(0.7, 1.3), teacher_patch_temperature=(0.05, 0.07))
    shaken(method)
    with torch.no_grad():
        method.mask_token.normal_()
    method.center.value.normal_(std=0.1)
    method.center_patch.value.normal_(std=0.1)
    x = views(local=local)
    method.generator.manual_seed(3)
    out = method(x)
    method.generator.manual_seed(3)
    mask = method.draw_masks(torch.cat(x[:2])).split(6)
    assert 0 < torch.cat(mask).any(dim=1).sum() < 12

    s, t, mim = [], [], 0.0
    f, g = method.momentum_copy.network
    for each, hidden in zip(x[:2], mask, strict=True):
        cls, patches = all_tokens(method.encoder, each, hidden, method.mask_token)
        t_cls, t_patches = all_tokens(f, each)
        s.append(method.head(cls))
        t.append(g(t_cls))
        args = (hidden, method.center_patch.value, 0.1, 0.05)
        mim += oracle.masked_patches(method.head(patches), g(t_patches), *args) / 2
    s += [method.head(method.encoder(crop)) for crop in x[2:]]
    cls_loss = oracle.dino(s, t, method.center.value, 0.1, 0.04)
    assert out["cls"].item() == near(cls_loss)
    assert out["mim"].item() == near(mim)
    assert out["loss"].item() == near(0.7 * cls_loss + 1.3 * mim)

    centers = [(c, c.value.clone()) for c in (method.center, method.center_patch)]
    method.after_step(1.0)  # μ = 1: the teacher stays, the centers move
    everything = [g(torch.cat([all_tokens(f, each)[part].flatten(0, -2) for each in x[:2]])) for part in (0, 1)]
    for (center, before), outputs in zip(centers, everything, strict=True):
        torch.testing.assert_close(center.value, 0.9 * before + 0.1 * outputs.mean(dim=0), atol=1e-6, rtol=1e-4)


def test_tokens_are_those_of_the_encoder_and_masked_patches_cannot_be_seen() -> None:
    method = make("ibot").eval()
    x = views()[0]
    cls, patches = all_tokens(method.encoder, x)
    torch.testing.assert_close(cls, method.encoder(x))
    torch.testing.assert_close(patches, method.encoder.forward_features(x)[:, 1:])
    mask = torch.zeros(6, 16, dtype=torch.bool)
    mask[:, 5] = True  # row 1, column 1 of a 4 × 4 grid
    changed = x.clone()
    changed[:, :, 4:8, 4:8] += 1.0
    masked = [all_tokens(method.encoder, each, mask, method.mask_token)[1] for each in (x, changed)]
    torch.testing.assert_close(masked[0], masked[1])
    assert not torch.allclose(patches, all_tokens(method.encoder, changed)[1])
    assert not torch.allclose(patches, masked[0])


@pytest.mark.parametrize("mix", ["resizemix", "cutmix", "mixup", "all"])
def test_sdmp(mix: str) -> None:
    method = make("sdmp", mix=mix)
    shaken(method)
    x1, x2 = views()
    for seed in range(3):
        method.generator.manual_seed(seed)
        out = method([x1, x2])
        method.generator.manual_seed(seed)
        a, b = (x2, x1) if torch.rand((), generator=method.generator) > 0.5 else (x1, x2)
        step = method.mix.for_one_step()
        given = step.draw(6)
        mix_a, mix_b = step(a, given), step(b, given)
        q, q_mix = queries(method, a, mix_b.images)
        k_a, k_b, k_mix = keys(method, a, b, mix_a.images)
        kept = [[float(v) for v in m.share.diagonal()] for m in (mix_a, mix_b)]  # λ, as the pixels have it
        same = [min(kept[1][i], kept[0][i]) + min(1 - kept[1][i], 1 - kept[0][i]) for i in range(6)]
        swap = [min(kept[1][i], 1 - kept[0][5 - i]) + min(1 - kept[1][i], kept[0][5 - i]) for i in range(6)]
        if mix != "cutmix" and mix != "all":  # boxes that may be cut off differ in the two views
            assert same == pytest.approx([1.0] * 6, abs=1e-5)
        totals = [s + p for s, p in zip(same, swap, strict=True)]
        expected = oracle.ctr(q, k_b, 0.2)
        tau2 = 0.5 * 2 * 0.2
        expected += tau2 * oracle.sdmp(q_mix, k_a, kept[1], [1 - v for v in kept[1]], 0.2)
        weights = [[v / t for v, t in zip(w, totals, strict=True)] for w in (same, swap)]
        expected += tau2 * oracle.sdmp(q_mix, k_mix, weights[0], weights[1], 0.2)
        assert out["loss"].item() == near(expected)


def test_sdmp_pastes_over_a_tenth_to_nine_tenths() -> None:
    method = make("sdmp")
    method.eval()
    shares: list[Tensor] = []
    call = ResizeMix.__call__

    def spy(self: ResizeMix, images: Tensor, fraction: Tensor | None = None) -> Mixed:
        assert fraction is not None
        shares.append(fraction)
        return call(self, images, fraction)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResizeMix, "__call__", spy)
        for _ in range(40):
            method(views())
    drawn = torch.cat(shares)
    assert 0.1 <= drawn.min() < 0.2 and 0.8 < drawn.max() <= 0.9 and abs(float(drawn.mean()) - 0.5) < 0.05


def test_regioncl() -> None:
    method = make("regioncl", weights=(0.8, 1.2))
    shaken(method)
    x1, x2 = views()
    method.generator.manual_seed(5)
    out = method([x1, x2])
    method.generator.manual_seed(5)
    region = method.swap.draw(x1)
    swapped = x1.clone()
    rows, columns = (slice(4 * side.start, 4 * side.stop) for side in region)
    for i in range(6):
        swapped[i, :, rows, columns] = x1[5 - i, :, rows, columns]
    tokens = method.encoder.forward_features(swapped)[:, 1:].view(6, 4, 4, 24)
    within = torch.zeros(4, 4, dtype=torch.bool)
    within[region] = True
    head = lambda f: method.predictor(method.projector(f))  # noqa: E731
    paste = head(torch.stack([t[within].mean(dim=0) for t in tokens]))
    canvas = head(torch.stack([t[~within].mean(dim=0) for t in tokens]))
    (q,) = queries(method, x1)
    (k,) = keys(method, x2)
    places = list(range(6))
    regions = oracle.region(canvas, k, paste, places, 0.2) + oracle.region(paste, k, canvas, places[::-1], 0.2)
    assert out["region"].item() == near(regions / 2)
    assert out["loss"].item() == near(0.8 * oracle.ctr(q, k, 0.2) / 0.4 + 1.2 * regions / 2)
    assert "local" in method(views(local=1))


# ------------------------------------------------------------------------------------------- what all have in common


@pytest.mark.parametrize("name", OTHERS)
def test_gradients_reach_everything_that_is_trained_and_nothing_else(name: str) -> None:
    method = make(name)
    method.before_step(0.5)
    method(views(local=2))["loss"].backward()
    for key, parameter in method.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), key
        else:
            assert parameter.grad is None, key


@pytest.mark.parametrize("name", METHODS)
def test_bf16_changes_little_and_losses_stay_fp32(name: str) -> None:
    method = make(name)
    losses = []
    for enabled in (False, True):
        method.generator.manual_seed(2)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = method(views(local=1))
        assert all(value.dtype == torch.float32 for value in out.values())
        out["loss"].backward()
        losses.append(out["loss"].item())
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


@pytest.mark.parametrize("name", OTHERS)
def test_values_can_be_compared_with_chance_and_floor(name: str) -> None:
    out = make(name)(views())
    terms = [key for key in out if "/" not in key and key != "loss"]
    assert terms
    for term in terms:
        assert out[f"{term}/floor"] - 1e-4 <= out[term]
        assert out[f"{term}/chance"] >= out[f"{term}/floor"]


@pytest.mark.parametrize("name", [n for n in OTHERS if n not in ("simclr", "swav")])
def test_the_momentum_network_follows_the_cosine(name: str) -> None:
    method = make(name, momentum=0.5)
    copy = method.momentum_copy
    before = copy.network[0].norm.weight.clone()
    with torch.no_grad():
        method.encoder.norm.weight.add_(1.0)
    method.after_step(0.5)
    assert method.scalars["momentum"] == pytest.approx(0.75)
    torch.testing.assert_close(copy.network[0].norm.weight, before + 0.25)
    method.after_step(1.0)
    torch.testing.assert_close(copy.network[0].norm.weight, before + 0.25)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mocov3", {"temperature": 0.0}, "temperature is 0.0"),
        ("simclr", {"head_layers": 0}, "head_layers is 0"),
        ("byol", {"momentum": 2.0}, "momentum is 2.0"),
        ("swav", {"queue_length": -1}, "queue_length is -1"),
        ("swav", {"sinkhorn_iterations": 0}, "sinkhorn_iterations is 0"),  # codes would not sum to 1
        ("swav", {"freeze_prototypes": 5.0}, "freeze_prototypes is 5.0"),
        ("dino", {"teacher_temperature": (0.0, 0.07)}, "teacher_temperature is 0.0"),
        ("ibot", {"mask_ratio": (0.1, 1.5)}, "mask_ratio is 1.5"),
        ("sdmp", {"momentum": -0.1}, "momentum is -0.1"),
        ("regioncl", {"region_sides": (0.5, 0.1)}, "sides of RegionSwap"),
    ],
)
def test_impossible_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name, **options)


# Another value of each option; and for some, what else must be set before they matter.
ANOTHER: dict[str, Any] = {
    "mix": "cutmix", "num_mix": 2, "num_mix_stages": True, "mix_blocks": (2,), "temperature": 0.5, "region_weight": 1.0,
    "mixed_ramp": 0.5, "directions": "shared", "plain_share": 0.5, "mixed_share": 0.5, "normalize_mix_to_mix": True,
    "label_smoothing": 0.1, "mixed_query": 2, "momentum_encoder": False, "momentum": 0.5, "momentum_stages": 2,
    "momentum_update": "before_keys", "head_hidden": 48, "head_out": 24, "frozen_patch_embed": False, "head_layers": 3,
    "prototypes": 8, "epsilon": 0.1, "sinkhorn_iterations": 1, "freeze_prototypes": 0.5, "queue_length": 12,
    "queue_start": 0.5, "student_temperature": 0.2, "teacher_temperature": (0.1, 0.1), "teacher_warmup": 0.9,
    "center_momentum": 0.1, "freeze_last_layer": 0.5, "norm_last_layer": False, "head_bottleneck": 8,
    "mask_probability": 1.0, "mask_ratio": (0.4, 0.6), "teacher_patch_temperature": (0.1, 0.1),
    "center_patch_momentum": 0.1, "pasted_area": (0.4, 0.5), "region_sides": (0.5, 0.6),
}  # fmt: skip
NEEDS: dict[str, dict[str, Any]] = {
    "num_mix_stages": {"num_mix": (2, 4)}, "queue_start": {"queue_length": 12}, "momentum_stages": {"momentum": 0.5},
    "mask_ratio": {"mask_probability": 1.0}, "center_patch_momentum": {"mask_probability": 1.0},
    "teacher_patch_temperature": {"mask_probability": 1.0},
}  # fmt: skip
OPTIONS = [
    (name, each.name)
    for name, options in METHOD_OPTIONS.items()
    for each in dataclasses.fields(options)
    if each.name != "mix_across"  # see test_mix_across.py
]


def losses(name: str, **options: Any) -> list[float]:
    """Of some steps, spread over a training."""
    method, found = make(name, **options), []
    for progress in (0.0, 0.3, 0.6, 0.9):
        method.before_step(progress)
        loss = method(views(n=8))["loss"]
        loss.backward()
        fixed = {id(parameter) for parameter in method.fixed_parameters()}
        with torch.no_grad():
            for parameter in method.parameters():
                if parameter.grad is not None and id(parameter) not in fixed:
                    parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
        method.after_step(progress)
        found.append(loss.item())
    return found


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_no_option_is_ignored(name: str, option: str) -> None:
    needed = NEEDS.get(option, {})
    weights = tuple(2.0 * value for value in getattr(METHOD_OPTIONS[name](), "weights", ()))
    other = weights if option == "weights" else "mixup" if (name, option) == ("sdmp", "mix") else ANOTHER[option]
    assert losses(name, **needed) == losses(name, **needed)
    assert losses(name, **needed, **{option: other}) != losses(name, **needed)


def test_a_mix_of_one_image_makes_patchmix_a_plain_contrast() -> None:
    """The bridge between PatchMix and MoCo v3: with M = 1 and no mixes the origin term is half of MoCo v3's sum."""
    method = make("patchmix", num_mix=1)
    assert isinstance(method.mix, PatchMix)
    x1, x2 = views()
    reference = make("mocov3")
    reference.load_state_dict(method.state_dict())
    out = method([x1, x2])
    assert 2 * 0.2 * (out["oto"] + out["mto"]).item() == near(reference([x1, x2])["loss"].item())
