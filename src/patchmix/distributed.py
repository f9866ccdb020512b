"""Rank, world size, and the few collectives that pre-training needs; all work in a single process, too."""

import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

TIMEOUT_MINUTES = 10.0
RENDEZVOUS = "PATCHMIX_RENDEZVOUS"  # environment variable: where ranks meet, if not at torchrun's address


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return _pretended or (dist.get_world_size() if dist.is_initialized() else 1)


def is_main() -> bool:
    """Whether this is rank 0; also outside of the group."""
    return rank() == 0 if dist.is_initialized() else os.environ.get("RANK", "0") == "0"


def check_alone(what: str) -> None:
    """A ValueError where torchrun started several processes for `what`, which only one may do."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1:
        raise ValueError(f"{what} runs in one process, but {started} were started; start it without torchrun")


class PeerLost(RuntimeError):
    """Another process of the group ended, or did not answer in time."""

    exit_code = 4  # LOST_PEER in launch.py


@contextmanager
def process_group(device: torch.device, timeout_minutes: float = TIMEOUT_MINUTES) -> Iterator[None]:
    """Joins the group that torchrun or `--devices` describes in the environment, if there is one.

    PeerLost is raised when another process is gone, or has not answered for `timeout_minutes`.
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
            store = fresh_store(store, me, world, timeout)
        dist.init_process_group(backend, store=store, rank=me, world_size=world, timeout=timeout)
        yield
    except RuntimeError as error:
        text = str(error).lower()
        if not isinstance(error, dist.DistError) and "gloo" not in text:
            raise
        late = ("timed out" in text or "timeout" in text) and "refused" not in text
        reason = f"no answer within {timeout_minutes:g} min" if late else "it ended, or the network failed"
        raise PeerLost(
            f"process {me} of {world} lost another one ({reason}); repeat the call (pretrain and adapt: with --resume "
            "auto; --timeout-minutes sets how long they wait)"
        ) from error
    finally:
        if dist.is_initialized() and (backend == "gloo" or sys.exc_info()[0] is None):
            dist.destroy_process_group()  # after a failure NCCL would wait here for operations that never end


def fresh_store(store: Store, me: int, world: int, timeout: timedelta) -> Store:
    """A part of `store` that only ranks which were started together use.

    torchrun's store outlives a restart and still holds the addresses of the ranks before it. So each rank publishes a
    nonce; rank 0 echoes all of them with a name for the part, until every rank has found its own nonce in the echo
    and acknowledged the name.
    """
    nonce, echo, acknowledged = "patchmix/nonce/{}", "patchmix/echo", "patchmix/acknowledged/{}"
    mine = uuid.uuid4().hex
    others = range(1, world)
    deadline = time.monotonic() + timeout.total_seconds()
    if me == 0:
        name = mine
        while world > 1:
            nonces = store.multi_get([nonce.format(other) for other in others])  # waits until all are there
            store.set(echo, " ".join([name, *(value.decode() for value in nonces)]))
            names = store.multi_get([acknowledged.format(other) for other in others])
            if all(value.decode() == name for value in names):
                break
            _wait_a_little(deadline)
    else:
        store.set(acknowledged.format(me), "nothing yet")
        store.set(nonce.format(me), mine)
        while mine not in (heard := store.get(echo).decode().split()):
            _wait_a_little(deadline)
        name = heard[0]
        store.set(acknowledged.format(me), name)
    return PrefixStore(f"patchmix/{name}", store)


def _wait_a_little(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise dist.DistStoreError("timed out: the processes of this start did not find each other")
    time.sleep(0.02)


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.14
_all_reduce: Callable[..., object] = dist.all_reduce
_pretended = 0  # processes


@contextmanager
def pretended(world: int, gather: Callable[..., object], reduce: Callable[..., object]) -> Iterator[None]:
    """As in a group of `world` processes, with gather(out, x) and reduce(x) in place of torch's: to count bytes."""
    global _pretended, _all_gather, _all_reduce
    before = _pretended, _all_gather, _all_reduce
    _pretended, _all_gather, _all_reduce = world, gather, reduce
    try:
        yield
    finally:
        _pretended, _all_gather, _all_reduce = before


@torch.no_grad()
def gather(x: Tensor) -> Tensor:
    """Concatenates x of all ranks, in their order, without gradient. (n, …) → (n·world, …)."""
    if world_size() == 1:
        return x
    out = x.new_empty((world_size() * x.shape[0], *x.shape[1:]))
    _all_gather(out, x.contiguous())
    return out


def broadcast_float(value: float, device: torch.device) -> float:
    """Rank 0's value on every rank."""
    if world_size() == 1:
        return value
    return float(gather(torch.tensor([value], dtype=torch.float64, device=device))[0])


def average(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """The mean of each value over the ranks, on every rank."""
    if world_size() == 1:
        return values
    tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return dict(zip(values, (tensor / world_size()).tolist(), strict=True))


def any_process(flag: bool, device: torch.device) -> bool:
    """Whether the flag is true on any rank."""
    return average({"flag": float(flag)}, device)["flag"] > 0


class _AllReduceSum(torch.autograd.Function):
    """As torch.distributed.nn.functional.all_reduce, which is deprecated and does not compile."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        x = x.clone()
        _all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
        grad = grads[0].clone()
        _all_reduce(grad)
        return grad


def all_reduce_sum(x: Tensor) -> Tensor:
    """The sum over ranks; gradients are summed, too."""
    if world_size() == 1:
        return x
    return _AllReduceSum.apply(x)  # type: ignore[no-any-return]


@torch.no_grad()
def gather_rows(rows: Tensor, device: torch.device) -> list[Tensor]:
    """The rows of every rank, on the CPU: (n, …) each, n may differ and be 0."""
    if world_size() == 1:
        return [rows]
    shapes = gather(torch.tensor([rows.shape], device=device)).cpu()  # (world, dims)
    most, *rest = shapes.max(dim=0).values.tolist()  # a rank without a single row does not know the width
    padded = torch.zeros([most, *rest], dtype=rows.dtype, device=device)
    if len(rows):
        padded[: len(rows)] = rows.to(device)
    received = gather(padded).cpu().view(len(shapes), most, *rest)
    return [part[:count] for part, count in zip(received, shapes[:, 0].tolist(), strict=True)]


def gather_json(value: Any, device: torch.device) -> list[Any]:
    """What every rank has, sent as JSON: nothing is unpickled."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(part.numpy().tobytes()) for part in gather_rows(data, device)]


def gather_with_gradient(x: Tensor) -> Tensor:
    """As `gather`; x's gradient is the sum over what all ranks do with it. (n, …) → (n·world, …)."""
    before, after = rank() * len(x), (world_size() - rank() - 1) * len(x)
    return all_reduce_sum(F.pad(x, (*[0] * 2 * (x.ndim - 1), before, after)))  # zeros where the other ranks' rows are
