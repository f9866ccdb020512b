from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from patchmix.evaluate.attentive import AttentiveProbe, fit, logits
from patchmix.evaluate.features import Features
from patchmix.evaluate.linear import _attentive, linear
from patchmix.interop.backbone import Backbone
from patchmix.settings import Linear
from tests.oracles.attentive import class_scores


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), heads=st.sampled_from([1, 2, 3]), tokens=st.integers(1, 7))
def test_the_probe_is_the_plain_loop(seed: int, heads: int, tokens: int) -> None:
    torch.manual_seed(seed)
    probe = AttentiveProbe(torch.randn(6), torch.rand(6) + 0.5, heads, classes=4)
    torch.nn.init.normal_(probe.query, std=2.0)
    images = torch.randn(3, tokens, 6)
    wanted = [
        class_scores(
            image.tolist(),
            mean=probe.mean.tolist(),
            scale=probe.scale.tolist(),
            query=probe.query.tolist(),
            value=probe.value.tolist(),
            weight=probe.head.weight.tolist(),
            bias=probe.head.bias.tolist(),
        )
        for image in images
    ]
    torch.testing.assert_close(logits(probe, images), torch.tensor(wanted), rtol=1e-4, atol=1e-4)


def needles(images: int, seed: int) -> tuple[Tensor, Tensor]:
    """Of 16 tokens of noise one has a mark, and beside it the class; as many others have the class of another image."""
    generator = torch.Generator().manual_seed(seed)
    tokens = 0.3 * torch.randn(images, 16, 8, generator=generator)
    labels = torch.randint(4, (images,), generator=generator)
    others = torch.randint(4, (images, 3), generator=generator)
    for i in range(images):
        first, *rest = torch.randperm(16, generator=generator)[:4].tolist()
        tokens[i, first, 7] += 4
        tokens[i, first, labels[i]] += 2
        for place, other in zip(rest, others[i], strict=True):
            tokens[i, place, other] += 2
    return tokens, labels


def test_it_finds_the_token_that_counts() -> None:
    """The mean over tokens can't tell which of the marked ones counts; attention can."""
    (tokens, labels), (unseen, truth) = needles(1000, seed=1), needles(500, seed=2)
    probe = fit(tokens, labels, classes=4, heads=1, lr=1e-2, epochs=40)
    assert float((logits(probe, unseen).argmax(dim=1) == truth).double().mean()) > 0.95
    with torch.no_grad():
        probe.query.zero_()
    assert float((logits(probe, unseen).argmax(dim=1) == truth).double().mean()) < 0.8


def test_rows_train_as_their_copies_do_and_the_seed_decides() -> None:
    tokens, labels = needles(100, seed=1)
    rows = torch.arange(0, 100, 2)
    options = {"classes": 4, "heads": 2, "lr": 1e-3, "epochs": 3}
    some = fit(tokens, labels, rows=rows, **options)  # type: ignore[arg-type]
    copies = fit(tokens[rows], labels[rows], **options)  # type: ignore[arg-type]
    other = fit(tokens[rows], labels[rows], seed=1, **options)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(some.parameters(), copies.parameters(), strict=True))
    assert not torch.equal(copies.value, other.value)


def test_a_whole_evaluation(backbone: Backbone) -> None:
    settings = Linear("", "shapes:200", protocol="fast", pool="attentive", workers=0)
    result = linear(settings, backbone)
    assert result.protocol == "attentive"
    assert result.settings["layer"] == "patch tokens after the last norm"
    assert result.top1 > 0.15 and set(result.metrics) == {"top1", "top5"}
    assert linear(settings, backbone).metrics == result.metrics
    few = linear(Linear("", "shapes:200", protocol="fast", pool="attentive", shots=1, draws=2, workers=0), backbone)
    assert few.protocol == "attentive@1-shot" and len(few.details["top1_of_draws"]) == 2


def test_with_one_image_of_each_class_there_is_nothing_to_choose() -> None:
    tokens = Features(torch.randn(3, 4, 6), torch.arange(3), torch.arange(3))
    _, record, details = _attentive(tokens, tokens, epochs=1, classes=3, heads=2)
    assert record["candidates"] == 1 and set(details) == {"lr"}


def test_mistakes_are_named(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="add --protocol fast"):
        linear(Linear("", "shapes:50", pool="attentive"), backbone)
    monkeypatch.setattr("patchmix.evaluate.features.MOST_BYTES", 1000)
    with pytest.raises(ValueError, match=r"patch tokens of the 2,000 images of shapes .* give fewer images"):
        linear(Linear("", "shapes:50", pool="attentive", protocol="fast"), backbone)
