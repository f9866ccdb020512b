"""Two processes of N images against one of 2N: same losses, gradients and buffers, for every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from patchmix import distributed
from patchmix.build import METHODS, build_method
from patchmix.config import Config, validate
from patchmix.methods.distill import Distill, Teacher
from patchmix.methods.options import METHOD_OPTIONS
from patchmix.nn.vit import create_encoder
from patchmix.recipes import start
from patchmix.study.plan import traffic_of

# Mixes and masks are drawn per process: where a method has them, they are switched off or fixed.
OPTIONS: dict[str, dict[str, Any]] = {
    "patchmix": {"num_mix": 1},
    "mocov3": {},
    "simclr": {},
    "byol": {},
    "swav": {"prototypes": 12, "queue_length": 16, "queue_start": 0.0},
    "dino": {},
    "ibot": {},
    "sdmp": {"mix": "mixup"},
    "regioncl": {},
}
NAMES = [*METHODS, "distill"]
SMALL = {"head_hidden": 32, "head_out": 16}
STEPS = 3  # centers and the queue act from the second and third pass on


def views(n: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 3, size, size, generator=generator) for size in (16, 16, 8)]


def masks_by_content(images: Tensor) -> Tensor:
    return torch.nn.functional.avg_pool2d(images.mean(dim=1, keepdim=True), 4).flatten(1) > 0.05


def run(name: str, images: list[Tensor], world: int) -> dict[str, Any]:
    torch.manual_seed(0)
    stem = "conv" if name in ("patchmix", "simclr") else "patch"  # its batch norms have the statistics of all processes
    encoder = create_encoder("vit_tiny_patch4_16", dim=24, depth=2, heads=2, stem=stem, any_image_size=True)
    if name == "distill":
        same = {"mean": (0.5,), "std": (0.5,), "student_mean": (0.5,), "student_std": (0.5,)}
        method: Any = Distill(encoder, Teacher(create_encoder("vit_tiny_patch4_16", dim=32, depth=1, heads=2), **same))
    else:
        method = METHODS[name](encoder, validate(METHOD_OPTIONS[name], SMALL | OPTIONS[name])).train()
    if name == "ibot":
        method.draw_masks = masks_by_content
    if name == "sdmp":
        method.mix.mixes[0].draw = lambda n: torch.zeros(n)
    if name == "patchmix":
        images = images[:2]  # the mixed local crops of M = 1 are covered by the plain ones
    wrapped = torch.nn.parallel.DistributedDataParallel(method, broadcast_buffers=False) if world > 1 else method
    losses = []
    for step in range(STEPS):
        method.before_step(0.5)
        method.generator.manual_seed(step)  # which view is which, in SDMP
        method.zero_grad()
        out = wrapped(images)
        out["loss"].backward()
        method.after_step(0.5)
        losses.append(distributed.all_reduce_sum(out["loss"].detach()) / world)
    gradients = {key: p.grad for key, p in method.named_parameters() if p.grad is not None}
    return {"losses": torch.stack(losses), "gradients": gradients, "buffers": dict(method.named_buffers())}


def planned(name: str) -> Config:
    small = {"dim": 24, "depth": 2, "heads": 2, "local_crops": 2, "local_size": 8, "method": name}
    own = {"patchmix": {"mix_across": True}, "swav": OPTIONS["swav"], "simclr": {"stem": "conv"}}
    return start(model="vit_tiny_patch4_16").replace(**SMALL | small | own.get(name, {}))


def count_bytes(name: str) -> dict[str, int]:
    """What a step receives from the other process, and what both add up."""
    config, counted = planned(name), {"keys": 0, "statistics": 0, "mixing": 0}
    method = build_method(config).train()
    gather, reduce = distributed._all_gather, distributed._all_reduce

    def counting_gather(out: Tensor, x: Tensor) -> None:
        counted["mixing" if x.ndim == 4 else "keys"] += out.nbytes - x.nbytes
        gather(out, x)

    def counting_reduce(x: Tensor) -> None:
        counted["statistics" if x.ndim == 1 else "keys"] += x.nbytes  # 2 (D − 1) / D is 1 for two
        reduce(x)

    with distributed.pretended(2, counting_gather, counting_reduce):
        sizes = [16, 16, *[config.views.local_size] * config.views.local_crops]
        method.before_step(0.5)
        method([torch.randn(4, 3, size, size) for size in sizes])["loss"].backward()
        method.after_step(0.5)
    return counted


def _worker(rank: int, world: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    results = {name: run(name, [x.chunk(world)[rank] for x in views()], world) for name in NAMES}
    results["bytes"] = {name: count_bytes(name) for name in METHODS}
    if rank == 0:
        torch.save(results, out)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("processes")
    arguments = (2, str(folder / "store"), str(folder / "out.pt"))
    mp.start_processes(_worker, args=arguments, nprocs=2, start_method="spawn")
    loaded: dict[str, Any] = torch.load(folder / "out.pt", weights_only=True)
    return loaded


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_equal_one_with_twice_the_batch(
    name: str, two: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for user in ("mixing.pairs", "methods.regioncl"):  # pairs as two processes make them, each in its half
        monkeypatch.setattr(f"patchmix.{user}.partners", lambda x: torch.cat([half.flip(0) for half in x.chunk(2)]))
    one, both = run(name, views(), 1), two[name]
    torch.testing.assert_close(both["losses"], one["losses"], atol=2e-5, rtol=2e-5)
    assert one["gradients"].keys() == both["gradients"].keys()
    for key, gradient in one["gradients"].items():
        scale = max(1.0, gradient.abs().max().item())
        assert (gradient - both["gradients"][key]).abs().max() <= 3e-5 * scale, key
    for key, buffer in one["buffers"].items():
        torch.testing.assert_close(both["buffers"][key], buffer, atol=2e-5, rtol=2e-5, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", METHODS)
def test_the_plan_knows_the_bytes_between_processes(name: str, two: dict[str, Any]) -> None:
    traffic = traffic_of(planned(name), 4, 2, low=False)
    assert traffic.pop("gradients") and two["bytes"][name] == traffic
