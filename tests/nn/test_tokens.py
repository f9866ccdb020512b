"""Class tokens and lean blocks against timm's own forward: values, gradients, random paths, memory and FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from patchmix.methods.method import MomentumCopy
from patchmix.nn import tokens
from patchmix.nn.tokens import class_tokens, project, region_tokens, run_block
from patchmix.nn.vit import create_encoder

IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def build(**options: Any) -> VisionTransformer:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        **{"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 3, "depth": 3, "num_classes": 0} | options,
    )
    assert isinstance(model, VisionTransformer)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"depth": 1},
        {"qkv_bias": False, "qk_norm": True},
        {"init_values": 0.1, "reg_tokens": 2},
        {"drop_path_rate": 0.5, "proj_drop_rate": 0.0},
        {"class_token": False, "global_pool": "avg"},  # no class token: the encoder's own way
        {"fc_norm": True, "pre_norm": True},
        {"scale_attn_norm": True, "scale_mlp_norm": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_equals_the_encoder_in_values_and_gradients(options: dict[str, Any]) -> None:
    encoder = build(**options).train()
    torch.manual_seed(1)
    expected = encoder(IMAGES)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    wanted = torch.autograd.grad((expected * weight).sum(), list(encoder.parameters()))
    torch.manual_seed(1)
    found = class_tokens(encoder, IMAGES)
    gradients = torch.autograd.grad((found * weight).sum(), list(encoder.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for gradient, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("few", [1024, 1], ids=["products", "fused"])
@pytest.mark.parametrize("options", [{}, {"qk_norm": True}], ids=["plain", "qk_norm"])
def test_attention_in_bf16_on_the_cpu(options: dict[str, Any], few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, attend, fused = build(**options).train(), F.scaled_dot_product_attention, []
    regions = torch.arange(16) % 2 == torch.tensor([[0], [1]])

    def spy(*inputs: Tensor, **how: Any) -> Tensor:
        fused.append(inputs)
        return attend(*inputs, **how)

    def run() -> list[Tensor]:
        both = class_tokens(encoder, IMAGES).unsqueeze(1), region_tokens(encoder, IMAGES, regions, 8)
        x = torch.cat(both, dim=1).float()  # (N, 1 + 3, D)
        assert run_block(encoder.blocks[0], torch.zeros(1, 2, 24), recompute=False).dtype == torch.float32  # the stream
        return [x, *torch.autograd.grad((x * torch.linspace(-1, 1, 24)).sum(), list(encoder.parameters()))]

    expected = run()
    monkeypatch.setattr(tokens, "_FEW_TOKENS", few)
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    with torch.autocast("cpu", torch.bfloat16):
        found = run()
    assert len(fused) == (0 if few == 1024 else 7)
    for x, y in zip(found, expected, strict=True):
        assert (x - y).norm() < 0.02 * max(1, y.norm())  # some gradients are 0


def test_the_last_block_costs_little() -> None:
    encoder = create_encoder("vit_tiny_patch2_32", dim=48, depth=2, heads=3)
    with FlopCounterMode(display=False) as whole:
        encoder(IMAGES)
    with FlopCounterMode(display=False) as short:
        class_tokens(encoder, IMAGES)
    assert short.get_total_flops() < 0.62 * whole.get_total_flops()


def test_recomputation_changes_nothing_but_memory() -> None:
    encoder = build(drop_path_rate=0.3).train()

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(3)
        return list(torch.autograd.grad(class_tokens(encoder, IMAGES).square().sum(), list(encoder.parameters())))

    kept = gradients()
    encoder.set_grad_checkpointing()
    for again, before in zip(gradients(), kept, strict=True):
        torch.testing.assert_close(again, before)
    with_recomputation = kept_numbers(encoder, lambda: class_tokens(encoder, IMAGES))
    encoder.set_grad_checkpointing(False)
    assert with_recomputation < 0.6 * kept_numbers(encoder, lambda: class_tokens(encoder, IMAGES))


def test_batch_norms_of_a_stem_see_the_same_batches_with_recomputation() -> None:
    encoder = create_encoder("vit_tiny_patch4_16", dim=24, depth=2, heads=2, stem="conv").train()
    batches = [torch.randn(4, 3, 16, 16), 2 * torch.randn(4, 3, 16, 16) + 1]
    plain = project(batches, encoder)
    encoder.set_grad_checkpointing(True)
    torch.testing.assert_close(project(batches, encoder), plain)
    with torch.no_grad():  # keys: each batch by itself, on a GPU as well
        keys = project(batches, encoder)
        torch.testing.assert_close(keys[:1], project(batches[:1], encoder))


def test_norm_and_activation_are_not_kept() -> None:
    """For each number of its input a block of timm's keeps 4 of the activation and 1 of the norm, which are spared."""
    block = build().blocks[0].train()
    x = torch.randn(4, 17, 24, requires_grad=True)
    lean = kept_numbers(block, lambda: run_block(block, x, recompute=False))
    statistics = 2 * 4 * 17  # of the norm: a mean and a deviation of each token
    assert kept_numbers(block, lambda: block(x)) - lean == 5 * x.numel() + statistics
    with FlopCounterMode(display=False) as counter:
        run_block(block, x, recompute=False).sum().backward()
    with FlopCounterMode(display=False) as whole:
        block(x).sum().backward()
    assert counter.get_total_flops() == whole.get_total_flops()  # no matrix is multiplied twice


def test_dropout_in_the_mlp_is_the_same_in_both_directions() -> None:
    block = build(proj_drop_rate=0.5).blocks[0].train()
    x = torch.randn(4, 17, 24)

    def gradients(forward: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        out = forward(x).square().sum()
        torch.manual_seed(1)  # what happens in between must not matter
        return list(torch.autograd.grad(out, list(block.parameters())))

    wanted = gradients(block)
    for found, expected in zip(gradients(lambda x: run_block(block, x, recompute=False)), wanted, strict=True):
        torch.testing.assert_close(found, expected)


def kept_numbers(module: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> int:
    """How many numbers the graph of `forward` keeps for the backward pass, each storage once, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    assert out.requires_grad
    return sum(count for place, count in storages.items() if place not in parameters)


def test_dropped_tokens_are_the_same_in_the_batch_and_only_the_query_encoder_drops() -> None:
    encoder = create_encoder("vit_tiny_patch4_16", dim=24, depth=2, heads=2)
    copy = MomentumCopy(encoder, momentum=lambda progress: 0.9)
    encoder.patch_drop.share = 0.75
    seen: dict[str, Tensor] = {}
    encoder.norm_pre.register_forward_hook(lambda module, arguments, out: seen.update(query=out))
    copy.network[0].norm_pre.register_forward_hook(lambda module, arguments, out: seen.update(key=out))
    images = torch.randn(1, 3, 16, 16).expand(5, -1, -1, -1)
    project([images], encoder)
    copy.project(images)
    assert seen["query"].shape == (5, 1 + 4, 24) and seen["key"].shape == (5, 1 + 16, 24)
    assert all(torch.equal(row, seen["query"][0]) for row in seen["query"])  # equal images stay equal
    first = seen["query"].clone()
    project([images], encoder)
    assert not torch.equal(first, seen["query"])  # new positions in every pass
    encoder.eval()
    encoder(images)
    assert seen["query"].shape == (5, 1 + 16, 24)
