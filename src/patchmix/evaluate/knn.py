"""Weighted k-nearest-neighbor classification: cosine similarity s, votes weighted by exp(s / τ′).

Shapes: B images in the bank, Q queries, D = the encoder's width, K = the largest k.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from patchmix.evaluate.features import check_finite
from patchmix.evaluate.protocol import Task, accuracy, open_task, wants_few_labels
from patchmix.evaluate.results import Result
from patchmix.interop.backbone import Backbone
from patchmix.progress import progress_bar
from patchmix.settings import Knn

TEMPERATURE = 0.07  # τ′
HEADLINE_K = 20
USUAL_KS = (10, 20, 100, 200)
BLOCK_ELEMENTS = 1 << 27  # similarities held at a time: 512 MB
QUERY_ROWS = 4096  # queries that go through the bank together
BANK_ROWS = 1 << 16  # images of the bank that are compared at a time
TILE_ROWS = 2048  # queries of one matrix product on a CPU


def knn(settings: Knn, backbone: Backbone | None = None) -> Result:
    """Classifies the test images by a weighted vote of their nearest training images (the paper's kNN).

    Without a test split, every training image is classified by all the others (leave-one-out). Metrics: "top1" and
    "top5" at the headline k (20, or the first k given), "top1@k" for each k, and with `settings.layers` "top1 of block
    3", …; top-5 only where there are more than five classes. `backbone` takes the place of `settings.weights`.
    """
    if settings.layers and settings.pool == "pixels":
        raise ValueError("--layers needs the blocks of an encoder, which --pool pixels does not use; drop one of them")
    with open_task(settings, backbone, needs_test=wants_few_labels(settings)) as task:
        return knn_of(task)


def knn_of(task: Task) -> Result:
    """`knn` of an open task."""
    settings, data, draws = task.settings, task.data, task.draws()
    assert isinstance(settings, Knn)
    leave_one_out = data.test is None
    if settings.k:
        check_ks(settings.k, min(map(len, draws)) - int(leave_one_out))  # before the long part
    pool, depth = settings.pool, task.backbone.architecture.depth
    blocks = {block: pool if block == depth else f"{pool}-{block}" for block in chosen_blocks(settings.layers, depth)}
    extractor, pools = task.extractor(), list(dict.fromkeys([pool, *blocks.values()]))
    bank = extractor.all_features(data.train, pools)
    queries = bank if data.test is None else extractor.all_features(data.test, pools)
    voters = min(len(bank[pool].at(positions).vectors) for positions in draws)
    ks = tuple(dict.fromkeys(settings.k)) or fitting_ks(voters - int(leave_one_out))
    headline = HEADLINE_K if HEADLINE_K in ks else ks[0]
    tops = (1, 5) if data.classes > 5 else (1,)
    truth = queries[pool].labels
    assert truth is not None
    how: dict[str, Any] = {"leave_one_out": leave_one_out, "device": task.device, "progress": True}
    found = []
    for positions in draws:
        predicted = {}
        for each in pools:
            voting, wanted = bank[each].at(positions), ks if each == pool else [headline]
            assert voting.labels is not None
            predicted[each] = knn_predict(voting.vectors, voting.labels, queries[each].vectors, ks=wanted, **how)
        metrics = {f"top{top}": accuracy(predicted[pool][headline], truth, top) for top in tops}
        metrics |= {f"top{top}@{k}": accuracy(predicted[pool][k], truth, top) for k in ks for top in tops}
        for block, name in blocks.items():
            metrics[f"top1 of block {block}"] = accuracy(predicted[name][headline], truth)
        found.append(metrics)
    record = {"k": headline, "temperature": TEMPERATURE, **extractor.record(), "bank": voters}
    record["test"] = "leave-one-out" if leave_one_out else data.tested_on
    details: dict[str, Any] = {}
    if blocks:
        best = max(blocks, key=lambda block: sum(metrics[f"top1 of block {block}"] for metrics in found))
        details = {"best_block": best, "best": "chosen on the test images"}
    return task.result("knn", found, len(truth), record, details)


def chosen_blocks(layers: Sequence[str | int], depth: int) -> list[int]:
    """Numbers of blocks from 1 to `depth`, in order."""
    chosen = sorted({block for each in layers for block in (range(1, depth + 1) if each == "all" else [int(each)])})
    if chosen and (last := chosen[-1]) > depth:
        raise ValueError(f"--layers {last}: the encoder has {depth} blocks; use numbers from 1 to {depth}, or all")
    return chosen


@torch.inference_mode()
def knn_predict(
    bank: Tensor,
    labels: Tensor,
    queries: Tensor,
    *,
    ks: Sequence[int] = (HEADLINE_K,),
    temperature: float = TEMPERATURE,
    leave_one_out: bool = False,
    device: torch.device | None = None,
    progress: bool = False,
) -> dict[int, Tensor]:
    """The five most voted classes of every query, for every k in one pass.

    bank: (B, D) with labels (B,), queries: (Q, D); with `leave_one_out` query i is image i of the bank, and no image
    votes for itself. Returns for each k an int64 tensor (Q, min(5, classes)) on the CPU, the best class first and
    -1 where no further class got a vote. Works on `device` (None: the bank's) in blocks of the queries and of the
    bank, so that the memory needed beyond the arguments does not grow with B · Q.
    """
    check_ks(ks, len(bank) - int(leave_one_out))
    check_finite(bank, "the bank")
    check_finite(queries, "the queries")
    device = bank.device if device is None else device
    classes = int(labels.max()) + 1
    labels = labels.to(device, non_blocking=True)
    parts: dict[int, list[Tensor]] = {k: [] for k in ks}
    rows = max(1, min(QUERY_ROWS, BLOCK_ELEMENTS // max(classes, max(ks))))  # also what the tally may hold
    with progress_bar("kNN", len(queries), progress) as advance:
        for start in range(0, len(queries), rows):
            block = F.normalize(queries[start : start + rows].to(device, non_blocking=True).float(), dim=1)
            similarity, where = nearest(bank, block, max(ks), first=start if leave_one_out else None)
            # Relative to the nearest: that changes no ranking, and no vote overflows.
            votes = torch.exp((similarity - similarity[:, :1]) / temperature)  # (rows, K)
            voted = labels[where]
            for k in ks:
                tally = votes.new_zeros(len(votes), classes).scatter_add_(1, voted[:, :k], votes[:, :k])
                most = tally.topk(min(5, classes), dim=1)
                parts[k].append(most.indices.where(most.values > 0, -1))
            advance(len(block))
    return {k: torch.cat(blocks).cpu() for k, blocks in parts.items()}


def nearest(bank: Tensor, queries: Tensor, k: int, *, first: int | None) -> tuple[Tensor, Tensor]:
    """The k most similar images of the bank: similarities and positions, both (rows, k), the nearest first.

    queries: (rows, D), of length 1. With `first`, query i is image first + i of the bank and is not its own neighbor.
    """
    similarity = queries.new_empty(len(queries), 0)
    where = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    tile = TILE_ROWS if queries.device.type == "cpu" else len(queries)
    size = max(k, min(BANK_ROWS, BLOCK_ELEMENTS // min(tile, len(queries))))
    for start in range(0, len(bank), size):
        block = F.normalize(bank[start : start + size].to(queries.device, non_blocking=True).float(), dim=1)
        room = queries.new_empty(min(tile, len(queries)), len(block))  # for one product after the other
        parts = []
        for row in range(0, len(queries), tile):
            part = queries[row : row + tile]
            products = torch.mm(part, block.T, out=room[: len(part)])  # (tile, block)
            if first is not None and -len(products) < (shift := first + row - start) < len(block):
                products.diagonal(shift).fill_(-torch.inf)  # query i of these is image i + shift of the block
            parts.append(largest(products, min(k, len(block))))
        values, places = (torch.cat(some) for some in zip(*parts, strict=True))
        similarity, where = torch.cat([similarity, values], dim=1), torch.cat([where, places + start], dim=1)
        similarity, order = similarity.topk(min(k, similarity.shape[1]), dim=1)  # of this and of all blocks before
        where = where.gather(1, order)
    return similarity, where


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their positions, in any order: (rows, n) → two of (rows, k).

    What is among the k largest lies in one of the k groups with the largest maxima. So most of a long row is only
    read once, several values at a time, where `topk` would sort pairs of value and position.
    """
    rows, n = values.shape
    size = 16 if k <= 32 else 8  # large groups have few maxima, small ones few members
    if values.device.type != "cpu" or n < max(2 * size * k, 8192):
        found = values.topk(k, dim=1, sorted=False)
        return found.values, found.indices
    groups = n // size  # value j belongs to group j mod `groups`; what is left over is always looked at
    maxima = values[:, : groups * size].view(rows, size, groups).amax(dim=1)
    _, best = largest(maxima, k)
    members = (best.unsqueeze(1) + groups * torch.arange(size).view(1, size, 1)).flatten(1)
    members = torch.cat([members, torch.arange(groups * size, n).expand(rows, -1)], dim=1)
    found = values.gather(1, members).topk(k, dim=1, sorted=False)
    return found.values, members.gather(1, found.indices)


def fitting_ks(available: int) -> tuple[int, ...]:
    """Those of the usual k that `available` voters allow; all voters where even the smallest is too many."""
    return tuple(k for k in USUAL_KS if k <= available) or (available,)


def check_ks(ks: Sequence[int], available: int) -> None:
    for k in ks:
        if not 1 <= k <= available:
            raise ValueError(
                f"k is {k}, but only {available} labeled images can vote; use a k from 1 to {available}, or more images"
            )
