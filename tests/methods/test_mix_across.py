"""Mixing over the batch of all processes: two of N images compute what one computes with 2N, for every mix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from patchmix import distributed
from patchmix.config import validate
from patchmix.methods.options import PatchMixOptions
from patchmix.methods.patchmix import PatchMixMethod
from patchmix.mixing import MIXES
from patchmix.nn.vit import create_encoder
from patchmix.train.loop import seed_pass

STEPS = 2
SMALL = {"head_hidden": 32, "head_out": 16}
CASES: dict[str, dict[str, Any]] = {mix: {"mix": mix} for mix in MIXES} | {
    "drawn": {"num_mix": [2, 3], "label_smoothing": 0.1, "normalize_mix_to_mix": True},
    "regions": {"region_weight": 1.0, "num_mix": 3},
}


def views(n: int = 32) -> list[Tensor]:
    """Not too few: the batch norms of a handful of images magnify the rounding of fp32."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 3, size, size, generator=generator) for size in (16, 16, 8)]


def run(options: dict[str, Any], images: list[Tensor], world: int) -> dict[str, Any]:
    torch.manual_seed(0)
    encoder = create_encoder("vit_tiny_patch4_16", dim=24, depth=2, heads=2, any_image_size=True)
    method = PatchMixMethod(encoder, validate(PatchMixOptions, SMALL | {"mix_across": True} | options)).train()
    wrapped: Any = torch.nn.parallel.DistributedDataParallel(method, broadcast_buffers=False) if world > 1 else method
    losses = []
    for step in range(STEPS):
        seed_pass(7, step, method)
        method.zero_grad()
        out = wrapped(images)
        out["loss"].backward()
        method.after_step(0.5)
        losses.append(torch.stack([distributed.all_reduce_sum(v.detach()) / world for v in out.values()]))
    gradients = {key: p.grad for key, p in method.named_parameters() if p.grad is not None}
    return {"losses": torch.stack(losses), "gradients": gradients}


def _worker(rank: int, world: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mine = [x.chunk(world)[rank] for x in views()]
    results = {name: run(options, mine, world) for name, options in CASES.items()}
    results["local"] = run({"mix_across": False}, mine, world)
    if rank == 0:
        torch.save(results, out)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("across")
    mp.start_processes(_worker, args=(2, str(folder / "store"), str(folder / "out.pt")), nprocs=2, start_method="spawn")
    loaded: dict[str, Any] = torch.load(folder / "out.pt", weights_only=True)
    return loaded


@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one_with_twice_the_batch(name: str, two: dict[str, Any]) -> None:
    one, both = run(CASES[name], views(), 1), two[name]
    torch.testing.assert_close(both["losses"], one["losses"], atol=1e-5, rtol=1e-5)
    assert one["gradients"].keys() == both["gradients"].keys()
    left, right = (torch.cat([g.flatten() for g in found["gradients"].values()]) for found in (one, both))
    assert (left - right).norm() <= 1e-5 * left.norm()
    assert (left - right).abs().max() <= 3e-5 * left.abs().max()  # single entries, as in test_processes.py: fp32


def test_mixing_within_each_process_is_something_else(two: dict[str, Any]) -> None:
    one = run({"mix_across": False}, views(), 1)
    assert (one["losses"] - two["local"]["losses"]).abs().max() > 1e-3


def test_in_a_single_process_it_changes_nothing() -> None:
    across, local = run({}, views(), 1), run({"mix_across": False}, views(), 1)
    assert torch.equal(across["losses"], local["losses"])
