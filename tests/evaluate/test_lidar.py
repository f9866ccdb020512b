"""LiDAR against the paper's formula, and what the monitor makes of it: views, heads, processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from benchmarks.plain_views import two_views
from patchmix.build import METHODS
from patchmix.config import validate
from patchmix.data.shapes import shapes_source
from patchmix.evaluate.monitor import lidar, lidar_monitor
from patchmix.methods.method import Method
from patchmix.methods.options import METHOD_OPTIONS
from patchmix.nn.vit import create_encoder

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.2, 0.2)


def paper_lidar(embeddings: npt.NDArray[np.float64], delta: float) -> float:
    """Thilak et al., Eqs. 1 to 4, as they stand there; embeddings: (n, q, D)."""
    n, q, dim = embeddings.shape
    mu = embeddings.mean(axis=(0, 1))
    sigma_b, sigma_w = np.zeros((dim, dim)), np.zeros((dim, dim))
    for views in embeddings:
        mu_x = views.mean(axis=0)
        sigma_b += np.outer(mu_x - mu, mu_x - mu) / (n - 1)
        for view in views:
            sigma_w += np.outer(view - mu_x, view - mu_x) / (n * (q - 1))
    sigma_w += delta * np.eye(dim)
    values, vectors = np.linalg.eigh(sigma_w)
    root = vectors @ np.diag(values**-0.5) @ vectors.T  # Σ_w^-½
    eigenvalues = np.linalg.eigvalsh(root @ sigma_b @ root).clip(0)
    p = eigenvalues / eigenvalues.sum()
    p = p[p > 0]
    return float(np.exp(-(p * np.log(p)).sum()))


@pytest.mark.parametrize(("n", "q", "dim"), [(40, 5, 12), (7, 3, 12), (30, 2, 20)])
@pytest.mark.parametrize("scale", [1.0, 0.01])  # where δ = 1e-4 hardly counts, and where it does
def test_the_papers_formula(n: int, q: int, dim: int, scale: float) -> None:
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(n, 1, dim)) * np.linspace(2, 0.01, dim)
    embeddings = scale * (centers + 0.3 * rng.normal(size=(n, q, dim)))
    assert lidar(torch.from_numpy(embeddings)) == pytest.approx(paper_lidar(embeddings, 1e-4), rel=1e-6)


def test_it_counts_directions_of_images_and_not_of_their_views() -> None:
    images = torch.zeros(200, 8, 16)
    images[..., :3] += torch.randn(200, 1, 3)
    noise = 0.01 * torch.randn(200, 8, 16)
    noise[..., 3:9] += torch.randn(200, 8, 6)  # a rank of the features would count these, too
    assert lidar(images + noise) == pytest.approx(3, abs=0.2)
    assert lidar(torch.ones(20, 8, 16)) == pytest.approx(1)


def small(name: str) -> Method:
    torch.manual_seed(0)
    encoder = create_encoder("vit_tiny_patch8_32", dim=24, depth=2, heads=2)
    sizes = {"head_hidden": 16, "head_out": 12} | ({"head_bottleneck": 8} if name in ("dino", "ibot") else {})
    return METHODS[name](encoder, validate(METHOD_OPTIONS[name], sizes)).train()


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_embeddings_and_is_left_as_it_was(name: str) -> None:
    method = small(name)
    before = {key: value.clone() for key, value in method.state_dict().items()}
    features = torch.randn(4, 24)
    embedded = method.embed(method.encoder, features)
    assert embedded.shape == (4, 8 if name in ("dino", "ibot") else 12)
    torch.testing.assert_close(method.embed(method.encoder, features[:1]), embedded[:1])  # not the batch's statistics
    copy = method.momentum_encoder()
    if copy is not None:
        torch.testing.assert_close(method.embed(copy, features), embedded)  # it starts equal
        heads = [parameter for key, parameter in method.named_parameters() if key.startswith("momentum_copy.network.1")]
        with torch.no_grad():
            for parameter in heads:
                parameter.add_(torch.randn_like(parameter))
        assert not torch.allclose(method.embed(copy, features), embedded)
        assert torch.equal(method.embed(method.encoder, features), embedded)
    assert all(module.training for module in method.modules())
    after = method.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items() if "momentum_copy" not in key)


def value(seed: int = 0, images: int = 13) -> float:
    method = small("patchmix")
    seen: list[Tensor] = []

    def embed(encoder: nn.Module, features: Tensor) -> Tensor:
        seen.append(features)
        return method.embed(encoder, features)

    settings: dict[str, Any] = {"seed": seed, "mean": MEAN, "std": STD, "device": torch.device("cpu")}
    evaluate = lidar_monitor(shapes_source("train", 61), two_views(32), embed, images=images, **settings)
    method.encoder.eval()
    with torch.no_grad():  # as the loop does
        ((name, found),) = evaluate(method.encoder)
    assert name == "lidar" and 1 <= found <= 12
    if not torch.distributed.is_initialized():
        assert len(torch.cat(seen)) == 8 * images
        assert len(torch.unique(torch.cat(seen).round(decimals=4), dim=0)) == 8 * images, "all views differ"
    return found


def test_the_same_weights_have_the_same_value_and_other_views_another() -> None:
    assert value() == value()
    assert value() != value(seed=1)


def _worker(rank: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.save([value(), value(images=1)], f"{out}.{rank}")  # with one image, a process has none
    torch.distributed.destroy_process_group()


def test_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    mp.spawn(_worker, args=(str(tmp_path / "store"), str(tmp_path / "out")), nprocs=2)
    first, second = (torch.load(tmp_path / f"out.{rank}") for rank in (0, 1))
    assert first == second
    assert first == pytest.approx([value(), value(images=1)], rel=1e-4)
