"""One process or many: rank, world size, and the few collectives that pre-training needs.

Everything here is the identity in a single process, so callers never ask which it is.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

TIMEOUT_MINUTES = 10.0
RENDEZVOUS = "PATCHMIX_RENDEZVOUS"  # in the environment: where processes meet, if not at torchrun's address


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Also right before the group is joined and after it is left."""
    return rank() == 0 if dist.is_initialized() else os.environ.get("RANK", "0") == "0"


def check_alone(what: str) -> None:
    """A ValueError where torchrun started several processes for `what`, which each of them would do as a whole."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1:
        raise ValueError(f"{what} is the work of one process, but {started} were started; start it without torchrun")


class PeerLost(RuntimeError):
    """Another process of the group ended, or did not answer in time: this one can't go on."""


@contextmanager
def process_group(device: torch.device, timeout_minutes: float = TIMEOUT_MINUTES) -> Iterator[None]:
    """Joins the group that torchrun or `--devices` describes in the environment; nothing to do in a single process.

    No wait for another process lasts longer than `timeout_minutes`; then, or when one is gone, PeerLost is raised.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    me, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(minutes=timeout_minutes)
    try:
        place = os.environ.get(RENDEZVOUS)
        store, *_ = next(rendezvous(place or "env://", me, world, timeout=timeout))
        if place is None:
            store = only_of_this_start(store, me, world, timeout)
        dist.init_process_group(backend, store=store, rank=me, world_size=world, timeout=timeout)
        yield
    except RuntimeError as error:
        if not _is_about_peers(error):
            raise
        text = str(error).lower()
        late = ("timed out" in text or "timeout" in text) and "refused" not in text
        reason = f"no answer within {timeout_minutes:g} min" if late else "it ended, or the network failed"
        raise PeerLost(
            f"process {me} of {world} lost another one ({reason}); the last checkpoint is whole, continue with "
            "--resume auto (runtime.timeout_minutes sets how long to wait)"
        ) from error
    finally:
        if dist.is_initialized() and (backend == "gloo" or sys.exc_info()[0] is None):
            dist.destroy_process_group()  # after a failure NCCL would wait here for operations that never end


def only_of_this_start(store: Store, me: int, world: int, timeout: timedelta) -> Store:
    """A part of `store` in which only processes that were started together read and write.

    torchrun's store lives as long as torchrun. After a restart it still has the addresses of the processes before, and
    one that looks for a peer which is not there yet would find a dead one's. So each says a word that nobody has said
    before; the first repeats them beside a name for the part, until all have seen their own word and said that name.
    """
    mine = uuid.uuid4().hex
    said, named, agreed = "patchmix/said/{}", "patchmix/named", "patchmix/agreed/{}"
    others = range(1, world)
    deadline = time.monotonic() + timeout.total_seconds()
    if me == 0:
        name = mine
        while world > 1:
            words = store.multi_get([said.format(other) for other in others])  # waits until each has said one
            store.set(named, " ".join([name, *(word.decode() for word in words)]))
            answers = store.multi_get([agreed.format(other) for other in others])
            if all(answer.decode() == name for answer in answers):
                break
            _wait_a_little(deadline)
    else:
        store.set(agreed.format(me), "nothing yet")
        store.set(said.format(me), mine)
        while mine not in (heard := store.get(named).decode().split()):
            _wait_a_little(deadline)
        name = heard[0]
        store.set(agreed.format(me), name)
    return PrefixStore(f"patchmix/{name}", store)


def _wait_a_little(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise dist.DistStoreError("timed out: the processes of this start did not find each other")
    time.sleep(0.02)


def _is_about_peers(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.14


@torch.no_grad()
def gather(x: Tensor) -> Tensor:
    """Concatenates x of all processes in the order of their ranks, without gradient. (n, …) → (n·world, …)."""
    if world_size() == 1:
        return x
    out = x.new_empty((world_size() * x.shape[0], *x.shape[1:]))
    _all_gather(out, x.contiguous())
    return out


class _GatherWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return gather(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(world_size())[rank()]


def gather_with_gradient(x: Tensor) -> Tensor:
    """As `gather`, but every process's use of x counts in its gradient: their sum. (n, …) → (n·world, …)."""
    if world_size() == 1:
        return x
    return _GatherWithGradient.apply(x)  # type: ignore[no-any-return]


def broadcast_float(value: float, device: torch.device) -> float:
    """Rank 0's value on every rank."""
    if world_size() == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.broadcast(tensor, src=0)
    return float(tensor)


def average(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """The mean of each value over the processes, on every process."""
    if world_size() == 1:
        return values
    tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return dict(zip(values, (tensor / world_size()).tolist(), strict=True))


def any_process(flag: bool, device: torch.device) -> bool:
    """True everywhere as soon as it is true on one process."""
    if world_size() == 1:
        return flag
    tensor = torch.tensor(float(flag), device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return bool(tensor)


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad


def all_reduce_sum(x: Tensor) -> Tensor:
    """Sum over processes; gradients are summed too."""
    if world_size() == 1:
        return x
    return _AllReduceSum.apply(x)  # type: ignore[no-any-return]
