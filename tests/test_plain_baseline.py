"""The baseline of the benchmarks computes what the package computes: else a ratio of their times says nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.plain import PlainPatchMix, PlainViT, copy_weights, plain_optimizer
from patchmix.methods.options import PatchMixOptions
from patchmix.methods.patchmix import PatchMixMethod
from patchmix.nn.vit import create_encoder, initialize_as_mocov3
from patchmix.train.optimizer import build_optimizer, set_hyperparameters


def both(num_mix: int = 3) -> tuple[PatchMixMethod, PlainPatchMix]:
    encoder = create_encoder("vit_tiny_patch4_16", dim=24, depth=3, heads=2)
    initialize_as_mocov3(encoder)
    ours = PatchMixMethod(encoder, PatchMixOptions(num_mix=num_mix, head_hidden=32, head_out=16))
    assert ours.momentum_copy is not None
    for parameter in ours.momentum_copy.parameters():  # as after some steps: not equal to the base
        parameter.add_(0.02 * torch.randn_like(parameter))
    plain = PlainPatchMix(PlainViT(16, 4, 24, 3, 2), patch_size=4, num_mix=num_mix, head_hidden=32, head_out=16)
    copy_weights(plain, ours)
    ours.generator.manual_seed(5)
    plain.generator.manual_seed(5)
    # float64: what is left then is no rounding, which batch norms over twelve images would blow up
    return ours.double().train(), plain.double().train()


def pairs(ours: PatchMixMethod, plain: PlainPatchMix) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
    named = dict(plain.named_parameters())
    return [(n, p, named[n]) for n, p in ours.named_parameters() if not n.startswith("momentum_copy.")]


@pytest.mark.parametrize("num_mix", [1, 3, 5])
def test_losses_and_gradients_are_the_same(num_mix: int) -> None:
    ours, plain = both(num_mix)
    views = [torch.randn(12, 3, 16, 16, dtype=torch.float64) for _ in range(2)]
    one, other = ours(views), plain(views)
    for name in ("loss", "oto", "mto", "mtm"):
        torch.testing.assert_close(one[name].double(), other[name], atol=1e-5, rtol=1e-5)
    one["loss"].backward()
    other["loss"].backward()
    for name, mine, theirs in pairs(ours, plain):
        assert mine.grad is not None and theirs.grad is not None, name
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_a_whole_step_is_the_same() -> None:
    ours, plain = both()
    views = [torch.randn(12, 3, 16, 16, dtype=torch.float64) for _ in range(2)]
    optimizer, theirs = build_optimizer(ours, eps=1e-4), plain_optimizer(plain, eps=1e-4)
    set_hyperparameters(optimizer, lr=1e-4, weight_decay=0.04)
    for method, optim in ((ours, optimizer), (plain, theirs)):
        method(views)["loss"].backward()
        optim.step()
    ours.after_step(0.0)
    plain.follow(0.996)
    for name, mine, other in pairs(ours, plain):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert ours.momentum_copy is not None
    copies = (plain.momentum_encoder, plain.momentum_projector)
    for network, copied in zip(ours.momentum_copy.network, copies, strict=True):
        for mine, other in zip(network.parameters(), copied.parameters(), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)
