from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from patchmix.config import validate
from patchmix.methods.options import PatchMixOptions
from patchmix.methods.patchmix import PatchMixMethod, spread
from patchmix.mixing import Mix, RegionSwap, overlap
from patchmix.mixing.patchmix import owners, share
from patchmix.nn.vit import create_encoder
from tests.oracles import losses as oracle


def make(**options: object) -> PatchMixMethod:
    torch.manual_seed(0)
    encoder = create_encoder("vit_tiny_patch4_16", dim=24, depth=2, heads=2)
    return PatchMixMethod(encoder, validate(PatchMixOptions, {"head_hidden": 32, "head_out": 16} | options))


def views(n: int = 6, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 3, 16, 16, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("m", [1, 2, 3, 5])
@pytest.mark.parametrize("mixed_query", [1, 2])
def test_the_whole_objective_against_algorithm_2_and_the_double_sums(m: int, mixed_query: int) -> None:
    method = make(num_mix=m, mixed_query=mixed_query).train()
    x1, x2 = views()
    method.generator.manual_seed(7)
    out = method([x1, x2])

    method.generator.manual_seed(7)
    a, b = (x1, x2) if mixed_query == 1 else (x2, x1)
    mix_a, mix_b = method.mix(a), method.mix(b)
    with torch.no_grad():
        f, g, h = method.encoder, method.projector, method.predictor
        xi_f, xi_g = method.momentum_copy.network  # type: ignore[union-attr, misc]
        h_mix, h_b = h(g(f(mix_a.images))), h(g(f(b)))
        z_a, z_b, z_mix = xi_g(xi_f(a)), xi_g(xi_f(b)), xi_g(xi_f(mix_b.images))
    tau = method.options.temperature
    expected = {
        "oto": oracle.origin_to_origin(h_b, z_a, tau),
        "mto": oracle.mix_to_origin(h_mix, z_b, m, tau),
        "mtm": oracle.mix_to_mix(h_mix, z_mix, m, tau),
    }
    for name, value in expected.items():
        assert out[name].item() == pytest.approx(value, rel=1e-4), name
    assert out["loss"].item() == pytest.approx(sum(expected.values()), rel=1e-4)


def projections(method: PatchMixMethod, *batches: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The queries h and the keys z of every batch, each by a pass of its own."""
    with torch.no_grad():
        h = [method.predictor(method.projector(method.encoder(batch))) for batch in batches]
        encoder, projector = method.momentum_copy.network  # type: ignore[union-attr, misc]
        return h, [projector(encoder(batch)) for batch in batches]


@pytest.mark.parametrize("directions", ["shared", "symmetric"])
def test_other_directions_against_the_double_sums_with_no_pass_computed_twice(directions: str) -> None:
    method = make(num_mix=3, directions=directions).train()
    images: list[int] = []
    hooks = [
        patch_embed.register_forward_hook(lambda module, arguments, out: images.append(len(out)))
        for patch_embed in (method.encoder.patch_embed, method.momentum_copy.network[0].patch_embed)  # type: ignore[union-attr]
    ]
    x1, x2 = views()
    method.generator.manual_seed(7)
    out = method([x1, x2])
    assert sum(images) == 6 * (4 if directions == "shared" else 8)  # x1, mix1 | x2, mix2; or all four both ways
    for hook in hooks:
        hook.remove()

    method.generator.manual_seed(7)
    mix1, mix2 = method.mix(x1).images, method.mix(x2).images
    (h1, h2, h_mix1, h_mix2), (z1, z2, z_mix1, z_mix2) = projections(method, x1, x2, mix1, mix2)
    expected = {
        "oto": oracle.origin_to_origin(h1, z2, 0.2),
        "mto": oracle.mix_to_origin(h_mix1, z2, 3, 0.2),
        "mtm": oracle.mix_to_mix(h_mix1, z_mix2, 3, 0.2),
    }
    if directions == "symmetric":
        expected["oto"] += oracle.origin_to_origin(h2, z1, 0.2)
        expected["mto"] += oracle.mix_to_origin(h_mix2, z1, 3, 0.2)
        expected["mtm"] += oracle.mix_to_mix(h_mix2, z_mix1, 3, 0.2)
    for name, value in expected.items():
        assert out[name].item() == pytest.approx(value, rel=1e-4), name
    assert out["loss"].item() == pytest.approx(sum(expected.values()), rel=1e-4)


def test_a_share_of_the_batch_makes_queries_and_all_of_it_keys() -> None:
    method = make(num_mix=2, plain_share=0.5, mixed_share=0.7, region_weight=1.0).train()
    x1, x2 = views()
    method.generator.manual_seed(7)
    out = method([x1, x2])
    method.generator.manual_seed(7)
    mix1, mix2 = method.mix(x1), method.mix(x2).images
    plain, mixed = [0, 2, 4], [0, 1, 3, 4]  # evenly spread
    (h2, h_mix1, _, _), (_, _, z1, z2) = projections(method, x2[plain], mix1.images[mixed], x1, x2)
    z_mix2 = projections(method, mix2)[1][0]
    targets = {
        "oto": (h2, z1, torch.eye(6)[plain]),
        "mto": (h_mix1, z2, share(6, 2)[mixed]),
        "mtm": (h_mix1, z_mix2, overlap(share(6, 2), share(6, 2))[mixed]),
    }
    for name, (h, z, target) in targets.items():
        assert out[name].item() == pytest.approx(oracle.soft(h, z, target, 0.2), rel=1e-4), name
    _, h_region = method.region_queries(mix1.images[mixed], mix1.groups)  # type: ignore[arg-type]
    target = torch.cat([torch.eye(6)[mixed], torch.eye(6).roll(1, dims=1)[mixed]])
    assert out["region"].item() == pytest.approx(oracle.soft(h_region.detach(), z2, target, 0.2), rel=1e-4)


@pytest.mark.parametrize("share_of_batch", [0.25, 0.3, 0.5, 0.9, 1.0])
def test_any_number_of_processes_chooses_the_same_images(share_of_batch: float) -> None:
    def chosen(n: int) -> list[int]:
        return torch.arange(n)[spread(share_of_batch, n, torch.device("cpu"))].tolist()

    assert chosen(20) + [20 + i for i in chosen(20)] == chosen(40)


def test_blocks_are_of_patchmix_only() -> None:
    method = make(mix="regionswap", mix_blocks=(2, 3))
    method.before_step(0.6)
    assert isinstance(method.mix, RegionSwap) and method.mix.patch_size == method.patch_size


def test_num_mix_blocks_and_weights_change_over_the_training() -> None:
    method = make(num_mix=(1, 2, 3), num_mix_stages=True, mix_blocks=(2, 1), mixed_ramp=0.5).train()
    drawn = []
    for progress in (0.0, 0.25, 0.34, 0.49, 0.5, 0.7, 1.0):
        method.before_step(progress)
        marked = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 3, 16, 16)
        mixed = method.mix.for_one_step()(marked)
        patches = mixed.images[0, 0, ::4, ::4]
        blocks = patches.unfold(0, 2, 2).unfold(1, 2, 2).flatten(2)
        whole = bool((blocks == blocks[..., :1]).all())
        drawn.append((round(1 / float(mixed.share[0].max())), whole, round(float(method.ramp), 2)))
    assert drawn == [
        (1, True, 0.0),
        (1, True, 0.5),
        (2, True, 0.68),
        (2, True, 0.98),
        (2, False, 1.0),
        (3, False, 1.0),
        (3, False, 1.0),
    ]
    method.before_step(0.25)
    out = method(views())
    expected = out["oto"] + 0.5 * (out["mto"] + out["mtm"])
    torch.testing.assert_close(out["loss"], expected)


def region_by_hand(encoder: Any, x: Tensor, inside: list[bool]) -> Tensor:
    """The class token when the last block sees only itself and the patches inside: (N, T, D) → (N, D)."""
    for block in encoder.blocks[:-1]:
        x = block(x)
    last = encoder.blocks[-1]
    part = x[:, [0, *[1 + j for j, yes in enumerate(inside) if yes]]]
    return encoder.norm(last(part))[:, 0]


@pytest.mark.parametrize("block", [1, 2])
def test_dropout_leaves_equally_many_patches_of_every_region(block: int) -> None:
    method = make(num_mix=2, region_weight=1.0, mix_blocks=(block,)).train()
    method.drop_tokens(0.5)
    mixed = method.mix(views()[0])
    tokens: list[Tensor] = []
    method.encoder.norm_pre.register_forward_hook(lambda module, arguments, out: tokens.append(out))
    torch.manual_seed(3)
    h, h_region = method.region_queries(mixed.images, mixed.groups)  # type: ignore[arg-type]
    assert tokens[0].shape[1] == 1 + 8 and len(h) == 6 and len(h_region) == 12

    with torch.no_grad():  # by hand: embed all, find the patches that stayed, run the blocks on these
        encoder = method.encoder
        everything = encoder._pos_embed(encoder.patch_embed(mixed.images))  # type: ignore[operator]
        stay = [int((everything[0] - token).abs().sum(dim=1).argmin()) - 1 for token in tokens[0][0, 1:]]
        groups = mixed.groups.view(2, 4 // block, 4 // block)  # type: ignore[union-attr]
        groups = groups.repeat_interleave(block, 1).repeat_interleave(block, 2).flatten(1)
        assert [int(groups[m, stay].sum()) for m in range(2)] == [4, 4] and len(set(stay)) == 8
        x = everything[:, [0, *[1 + j for j in stay]]]
        tokens = torch.cat([region_by_hand(encoder, x, groups[m, stay].tolist()) for m in range(2)])
        whole = region_by_hand(encoder, x, [True] * 8)
        expected = [method.predictor(method.projector(f)) for f in (whole, tokens)]
    torch.testing.assert_close([h, h_region], expected, rtol=1e-4, atol=1e-5)


def test_dropout_takes_no_patch_twice_where_regions_differ_in_size() -> None:
    method = make(num_mix=3, region_weight=1.0, mix_blocks=(2,)).train()  # 2, 1 and 1 of 4 blocks
    method.drop_tokens(0.05)
    mixed = method.mix(views()[0])
    tokens: list[Tensor] = []
    method.encoder.norm_pre.register_forward_hook(lambda module, arguments, out: tokens.append(out))
    method.region_queries(mixed.images, mixed.groups)  # type: ignore[arg-type]
    assert len(tokens[0][0].unique(dim=0)) == tokens[0].shape[1] == 1 + 3 * 4


@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_regions_are_queries_for_their_originals(m: int) -> None:
    """Region by region and patch by patch; 16 patches in 3 or 5 groups leave one over, which stays with group 0."""
    method = make(num_mix=m, region_weight=0.5).train()
    x1, x2 = views()
    method.generator.manual_seed(7)
    out = method([x1, x2])
    plain = make(num_mix=m).train()
    plain.generator.manual_seed(7)
    without = plain([x1, x2])
    for name in ("oto", "mto", "mtm"):
        torch.testing.assert_close(out[name], without[name])

    method.generator.manual_seed(7)
    order = torch.randperm(16, generator=method.generator)
    origin = owners(6, m, order)
    method.generator.manual_seed(7)
    with torch.no_grad():
        encoder, images = method.encoder, method.mix(x1).images
        regions = [
            region_by_hand(
                encoder,
                encoder._pos_embed(encoder.patch_embed(images[i : i + 1])),  # type: ignore[operator]
                [bool(origin[i, j] == (i + k) % 6) for j in range(16)],
            )[0]
            for k in range(m)
            for i in range(6)
        ]
        h = method.predictor(method.projector(torch.stack(regions)))
        z = method.momentum_copy.project(x2)[0]  # type: ignore[union-attr]
    similarity = torch.nn.functional.normalize(h, dim=1) @ torch.nn.functional.normalize(z, dim=1).T / 0.2
    labels = torch.tensor([(i + k) % 6 for k in range(m) for i in range(6)])
    expected = torch.nn.functional.cross_entropy(similarity, labels)
    torch.testing.assert_close(out["region"], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out["loss"], without["loss"] + 0.5 * out["region"])
    assert out["region/chance"].item() == pytest.approx(math.log(6)) and out["region/floor"].item() == 0


def pixel_share(mix: Mix, images: Tensor) -> Tensor:
    """Which share of the pixels (for Mixup: of their value) each original has, read off marked images."""
    n = len(images)
    rows = []
    state = mix.generator.get_state()  # type: ignore[attr-defined]
    for j in range(n):
        mix.generator.set_state(state)  # type: ignore[attr-defined]
        marked = torch.zeros_like(images)
        marked[j] = 1.0
        rows.append(mix(marked).images.mean(dim=(1, 2, 3)))
    mix.generator.set_state(state)  # type: ignore[attr-defined]
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("name", ["mixup", "cutmix", "cutmix+mixup", "resizemix", "regionswap"])
@pytest.mark.parametrize("normalize", [False, True])
def test_every_mix_in_the_three_contrasts(name: str, normalize: bool) -> None:
    """Targets from the pixels themselves: the shares of the originals, and what two mixed images have in common."""
    method = make(mix=name, normalize_mix_to_mix=normalize).train()
    x1, x2 = views()
    method.generator.manual_seed(7)
    out = method([x1, x2])

    method.generator.manual_seed(7)
    mix = method.mix.for_one_step()
    shares, mixed = [], []
    for x in (x1, x2):
        shares.append(pixel_share(mix, x))
        mixed.append(mix(x).images)
    common = torch.minimum(shares[0].unsqueeze(1), shares[1].unsqueeze(0)).sum(dim=2)
    if normalize:
        common = common / common.sum(dim=1, keepdim=True)
    h_mix, h_2 = (h.detach() for h in method.queries(mixed[0], x2))
    z_1, z_2, z_mix = method.keys(x1, x2, mixed[1])
    tau = method.options.temperature
    expected = {
        "oto": oracle.origin_to_origin(h_2, z_1, tau),
        "mto": oracle.soft(h_mix, z_2, shares[0], tau),
        "mtm": oracle.soft(h_mix, z_mix, common, tau),
    }
    for term, value in expected.items():
        assert out[term].item() == pytest.approx(value, rel=1e-4), term
    assert out["loss"].item() == pytest.approx(sum(expected.values()), rel=1e-4)
    assert all(torch.isfinite(value) for value in out.values())


def test_the_names_of_the_mixes() -> None:
    classes = {
        "patchmix": {"PatchMix"},
        "mixup": {"Mixup"},
        "cutmix": {"CutMix"},
        "cutmix+mixup": {"CutMix", "Mixup"},
        "resizemix": {"ResizeMix"},
        "regionswap": {"RegionSwap"},
    }
    for name, expected in classes.items():
        method = make(mix=name)
        assert {type(method.mix.for_one_step()).__name__ for _ in range(12)} == expected


@pytest.mark.parametrize("name", ["patchmix", "cutmix+mixup", "resizemix"])
def test_mixed_local_crops_have_their_own_shares(name: str) -> None:
    torch.manual_seed(0)
    encoder = create_encoder("vit_tiny_patch4_16", dim=24, depth=2, heads=2, any_image_size=True)
    method = PatchMixMethod(
        encoder, validate(PatchMixOptions, {"mix": name, "head_hidden": 32, "head_out": 16})
    ).train()
    crops = [torch.randn(6, 3, 8, 8) for _ in range(2)]
    x1, x2 = views()
    method.generator.manual_seed(3)
    out = method([x1, x2, *crops])
    method.generator.manual_seed(3)
    mix = method.mix.for_one_step()
    mix(x1), mix(x2)
    mixed = [mix(crop) for crop in crops]
    _, h = method.queries(torch.cat(crops), torch.cat([m.images for m in mixed]))
    target = torch.cat([m.share for m in mixed])
    z_1, z_2 = method.keys(x1, x2)
    expected = sum(oracle.soft(h.detach(), z, target, method.options.temperature) for z in (z_1, z_2))
    assert out["mixlocal"].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("weights", "terms"), [((1, 0, 0), {"local"}), ((0, 1, 0), {"mixlocal"}), ((0, 0, 1), set())])
def test_terms_of_weight_0_have_no_local_crops(weights: tuple[float, float, float], terms: set[str]) -> None:
    encoder = create_encoder("vit_tiny_patch4_16", dim=24, depth=2, heads=2, any_image_size=True)
    method = PatchMixMethod(encoder, PatchMixOptions(weights=weights, head_hidden=32, head_out=16)).train()
    out = method([*views(), torch.randn(6, 3, 8, 8)])
    assert {"local", "mixlocal"} & out.keys() == terms
    logged = sum(value for name, value in out.items() if name != "loss" and "/" not in name)
    torch.testing.assert_close(out["loss"], logged)


def test_chance_and_floor_are_logged_for_every_term() -> None:
    out = make(num_mix=3).train()(views(8))
    assert out["oto/chance"].item() == pytest.approx(math.log(8))
    assert out["mto/chance"].item() == pytest.approx(math.log(8))
    assert out["mtm/chance"].item() == pytest.approx(3 * math.log(8))  # a row sums to M
    assert out["oto/floor"].item() == pytest.approx(0.0, abs=1e-6)
    assert out["mto/floor"].item() == pytest.approx(math.log(3), rel=1e-5)
    weights = torch.tensor([1 / 3, 2 / 3, 1, 2 / 3, 1 / 3])
    assert out["mtm/floor"].item() == pytest.approx(-(weights * torch.log(weights / 3)).sum().item(), rel=1e-5)


@pytest.mark.parametrize("weights", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0.5, 0), (0, 1, 2)])
def test_a_term_that_is_off_costs_no_pass_and_changes_no_other(weights: tuple[float, float, float]) -> None:
    whole, some = make(), make(weights=weights)
    images: list[int] = []
    for patch_embed in (some.encoder.patch_embed, some.momentum_copy.network[0].patch_embed):  # type: ignore[union-attr]
        patch_embed.register_forward_hook(lambda module, arguments, out: images.append(len(out)))
    outs = []
    for method in (whole, some):
        method.generator.manual_seed(7)
        outs.append(method(views()))
    expected = sum(w * outs[0][name] for w, name in zip(weights, ("oto", "mto", "mtm"), strict=True))
    torch.testing.assert_close(outs[1]["loss"], expected)
    oto, mto, mtm = (w != 0 for w in weights)
    assert images == [*[6] * (oto + mto + mtm), 6 * (oto + (mto or mtm))]  # one pass for each key, then the queries'


@pytest.mark.parametrize(("options", "mixes"), [({}, 2), ({"weights": (1, 1, 0)}, 1)])
@pytest.mark.parametrize("directions", ["paper", "symmetric"])
def test_the_other_view_is_mixed_where_it_is_needed(directions: str, options: dict[str, Any], mixes: int) -> None:
    x = views()
    mix1, mix2 = make(directions=directions, **options).draw(x)[0]
    assert (mix1.images is not mix2.images) == (mixes == 2 or directions == "symmetric")
    assert not torch.equal(mix1.images, x[0])


def test_normalized_mix_to_mix_sums_to_one() -> None:
    out = make(num_mix=3, normalize_mix_to_mix=True).train()(views(8))
    assert out["mtm/chance"].item() == pytest.approx(math.log(8), rel=1e-5)


def test_gradients_reach_the_online_network_only() -> None:
    method = make().train()
    method(views())["loss"].backward()
    for name, parameter in method.named_parameters():
        if name.startswith("momentum_copy"):
            assert parameter.grad is None
        else:
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


def test_without_a_momentum_encoder_keys_come_from_the_base_without_gradient() -> None:
    method = make(momentum_encoder=False).double().train()  # batch norms of six images magnify the rounding of fp32
    assert method.momentum_copy is None
    images = [x.double() for x in views()]
    (keys,) = method.keys(images[0])
    assert not keys.requires_grad
    torch.testing.assert_close(keys, method.projector(method.encoder(images[0])).detach())
    method.after_step(0.5)
    seen: list[int] = []
    method.encoder.patch_embed.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    out = method(images)
    assert sum(seen) == 4 * len(images[0])  # plain and mixed queries, keys of x1 and of the mix: none for x2 alone
    out["loss"].backward()

    # The same as with a momentum encoder that equals the base encoder.
    both = make(momentum_encoder=True).double().train()
    both.load_state_dict(method.state_dict(), strict=False)
    both.momentum_copy.network.load_state_dict(torch.nn.ModuleList(both.momentum_copy.base).state_dict())
    for each in (method, both):
        each.generator.manual_seed(5)
    first, second = (each(images) for each in (method, both))
    for name in ("oto", "mto", "mtm"):
        torch.testing.assert_close(first[name], second[name])


def test_one_number_of_images_is_drawn_per_step_for_both_views() -> None:
    method = make(num_mix=(2, 4)).train()
    seen = set()
    for i in range(12):
        method.generator.manual_seed(i)
        out = method(views(8))
        m = round(math.exp(out["mto/floor"].item()))
        seen.add(m)
        assert out["mtm/chance"].item() == pytest.approx(m * math.log(8), rel=1e-4)
    assert seen == {2, 4}


@pytest.mark.parametrize(("stages", "progress", "expected"), [(0, 0.5, 0.998), (4, 0.49, None), (4, 0.5, 0.998)])
def test_momentum_by_step_or_by_stage(stages: int, progress: float, expected: float | None) -> None:
    method = make(momentum=0.996, momentum_stages=stages)
    assert method.momentum_copy is not None
    momentum = method.momentum_copy.momentum
    if expected is None:
        assert momentum(progress) == momentum(0.25)
    else:
        assert momentum(progress) == pytest.approx(expected)
    assert momentum(1.0) == 1.0


@pytest.mark.parametrize("when", ["after_step", "before_keys"])
def test_when_the_momentum_encoder_moves(when: str) -> None:
    method = make(momentum_update=when, momentum=0.5)
    with torch.no_grad():
        method.encoder.norm.weight.add_(1.0)
    moved = method.momentum_copy.network[0].norm.weight  # type: ignore[union-attr, index]
    method.before_step(0.0)
    assert moved.mean().item() == pytest.approx(1.5 if when == "before_keys" else 1.0)
    method.after_step(0.0)
    assert moved.mean().item() == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"momentum": 1.5}, "momentum is 1.5"),
        ({"num_mix": 0}, "num_mix is 0"),
        ({"weights": (0, 0, 0)}, "at least one of the three"),
        ({"mix": "cutmix", "region_weight": 1.0}, "region_weight needs --mix patchmix"),
        ({"mix_blocks": ()}, "mix_blocks is"),
    ],
)
def test_impossible_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_share_of_a_mixed_batch_is_what_the_objective_uses() -> None:
    method = make(num_mix=4)
    assert torch.equal(method.mix(views(6)[0]).share, share(6, 4))
