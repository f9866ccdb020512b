from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from patchmix.methods.options import PatchMixOptions
from patchmix.methods.patchmix import PatchMixMethod
from patchmix.nn.vit import create_encoder
from tests.faults.elastic import ELASTIC, Row, finish, start
from tests.faults.trainee import MEAN_OF_IT, SUBTRACTED_AGAIN, with_effect


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


@pytest.mark.slow
@pytest.mark.parametrize("inject", ELASTIC, ids=lambda f: f.__name__)
def test_the_group_goes_on(inject: Callable[..., Row], folder: Path) -> None:
    inject(folder)


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    output = finish(start(tmp_path / "run", 2, "--batch-size", "33"), code=1)
    assert "patchmix: batch size 33 must be a multiple of 2" in output


def test_what_is_left_out_of_comparisons_has_no_effect() -> None:
    """Shifted by up to 1, it changes neither loss nor any other gradient; the rest of the same biases changes both."""
    torch.manual_seed(0)
    encoder = create_encoder("vit_tiny_patch8_32", dim=24, depth=2)
    method = PatchMixMethod(encoder, PatchMixOptions(head_hidden=32, head_out=16)).double().train()
    views = [torch.randn(8, 3, 32, 32, dtype=torch.float64) for _ in range(2)]

    def loss_and_gradients() -> dict[str, torch.Tensor]:
        method.zero_grad()
        method.generator.manual_seed(0)
        loss = method(views)["loss"]
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in method.named_parameters() if p.grad is not None}
        return {"loss": loss.detach(), **with_effect(gradients)}

    before, state = loss_and_gradients(), method.state_dict()
    assert set(state) >= (SUBTRACTED_AGAIN - {"norm.bias"}) | MEAN_OF_IT
    biases = [tensor for name, tensor in state.items() if name.endswith("attn.qkv.bias")]
    assert len(biases) == 4
    for shifted in (
        *(state[name] for name in state if name in SUBTRACTED_AGAIN | MEAN_OF_IT),
        *(b[24:48] for b in biases),
    ):
        shifted += torch.rand_like(shifted)
    after = loss_and_gradients()
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=1e-9, atol=1e-12, msg=name)
    for part in (slice(0, 24), slice(48, 72)):
        biases[0][part] += torch.rand(24)
        assert abs(loss_and_gradients()["loss"] - before["loss"]) > 1e-6
