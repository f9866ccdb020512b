"""Weighted k-nearest-neighbour classification: cosine similarity s, votes weighted by exp(s / τ′).

Shapes: B images in the bank, Q queries, D = the encoder's width, K = the largest k asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from patchmix import distributed
from patchmix.device import resolve_device
from patchmix.evaluate.features import LAYERS, Pool
from patchmix.evaluate.features import check_finite as check_finite  # those who vote need it, too
from patchmix.evaluate.labelled import open_labelled
from patchmix.evaluate.results import Result, append_result
from patchmix.evaluate.stored import Reader
from patchmix.interop.backbone import Backbone
from patchmix.progress import progress_bar

TEMPERATURE = 0.07  # τ′
HEADLINE_K = 20
USUAL_KS = (10, 20, 100, 200)
BLOCK_ELEMENTS = 1 << 27  # similarities held at a time: 512 MB
QUERY_ROWS = 4096  # queries that go through the bank together
BANK_ROWS = 1 << 16  # images of the bank that are compared at a time
TILE_ROWS = 2048  # queries of one matrix product on a CPU


def evaluate_knn(
    backbone: Backbone,
    data: str | Path,
    *,
    ks: Sequence[int] | None = None,
    pool: Pool = "token",
    resize: int | None = None,
    temperature: float = TEMPERATURE,
    device: str = "auto",
    workers: int = 0,
    batch_size: int = 256,
    cache: bool = True,
    out: Path | None = None,
) -> Result:
    """Classifies the test images of `data` by a weighted vote of their nearest training images (the paper's kNN).

    Votes weigh exp(s / τ′), s = cosine similarity, τ′ = `temperature`. Where `data` has no test split, every training
    image is classified by all the others (leave-one-out). Metrics: "top1" and "top5" at the headline k (20, or the
    first k given), and "top1@k" for each k; top-5 only where there are more than five classes.

    data: a name, folder or parquet with labels; in a folder without train/, sub-folders are classes.
    ks: numbers of neighbours; None takes those of 10, 20, 100, 200 that the data allows. A k that is too large fails.
    pool: "token", the class token, or "mean" of the patch tokens; both after the last norm.
    resize: shorter side before the central crop. None: small images (to 64 px) are taken whole, larger ones get the
        margin 224 → 256. The authors' code has 36 for CIFAR's 32 px.
    cache: keep features on disk (see `stored.cache_folder`) and use those of an earlier evaluation.
    out: a folder; one line is added to its results.jsonl.
    Under torchrun every process calls this; the work is split and all return the same.
    """
    target = resolve_device(device)
    with distributed.process_group(target):
        labelled = open_labelled(data)
        reader = Reader(
            backbone, device=target, pool=pool, resize=resize, workers=workers, batch_size=batch_size, cache=cache
        )
        alone = labelled.test is None
        voters = len(labelled.train) - int(alone)
        if ks is not None:
            check_ks(ks, voters)  # before the long part
        bank = reader.read(labelled.train)
        asked = bank if labelled.test is None else reader.read(labelled.test)
        assert bank.labels is not None and asked.labels is not None
        ks = fitting_ks(len(bank.vectors) - int(alone)) if ks is None else tuple(dict.fromkeys(ks))
        predicted = knn_predict(
            bank.vectors,
            bank.labels,
            asked.vectors,
            ks=ks,
            temperature=temperature,
            leave_one_out=alone,
            device=target,
            progress=True,
        )
        headline = HEADLINE_K if HEADLINE_K in ks else ks[0]
        metrics = {"top1": accuracy(predicted[headline], asked.labels)}
        if labelled.classes > 5:
            metrics["top5"] = accuracy(predicted[headline], asked.labels, top=5)
        for k in ks:
            metrics[f"top1@{k}"] = accuracy(predicted[k], asked.labels)
            if labelled.classes > 5:
                metrics[f"top5@{k}"] = accuracy(predicted[k], asked.labels, top=5)
        result = Result(
            protocol="knn",
            metrics=metrics,
            images=len(asked.vectors),
            data=str(data),
            fingerprint=labelled.fingerprint(),
            encoder=reader.encoder_name,
            weights=reader.digest,
            settings={
                "k": headline,
                "temperature": temperature,
                "layer": LAYERS[pool],
                **reader.settings(),
                "bank": len(bank.vectors),
                "test": "leave-one-out" if alone else "test split",
            },
        )
        if out is not None and distributed.is_main():
            append_result(out, result)
        return result


@torch.inference_mode()
def knn_predict(
    bank: Tensor,
    labels: Tensor,
    queries: Tensor,
    *,
    ks: Sequence[int] = (HEADLINE_K,),
    temperature: float = TEMPERATURE,
    leave_one_out: bool = False,
    top: int = 5,
    device: torch.device | None = None,
    progress: bool = False,
) -> dict[int, Tensor]:
    """The `top` most voted classes of every query, for every k in one pass.

    bank: (B, D) with labels (B,), queries: (Q, D); with `leave_one_out` query i is image i of the bank, and no image
    votes for itself. Returns for each k an int64 tensor (Q, min(top, classes)) on the CPU, the best class first and
    -1 where no further class got a vote. Works on `device` (None: the bank's) in blocks of the queries and of the
    bank, so that the memory needed beyond the arguments does not grow with B · Q.
    """
    check_ks(ks, len(bank) - int(leave_one_out))
    check_finite(bank, "the bank")
    check_finite(queries, "the queries")
    if temperature <= 0:
        raise ValueError(f"kNN's temperature is {temperature}; it must be above 0, the paper's is {TEMPERATURE}")
    device = bank.device if device is None else device
    labels = labels.to(device)
    classes = int(labels.max()) + 1
    parts: dict[int, list[Tensor]] = {k: [] for k in ks}
    rows = max(1, min(QUERY_ROWS, BLOCK_ELEMENTS // max(classes, max(ks))))  # also what the tally may hold
    with progress_bar("kNN", len(queries), progress and distributed.is_main()) as advance:
        for start in range(0, len(queries), rows):
            asked = F.normalize(queries[start : start + rows].to(device).float(), dim=1)
            similarity, where = _nearest(bank, asked, max(ks), first=start if leave_one_out else None)
            # Relative to the nearest: that changes no ranking, and no vote overflows.
            votes = torch.exp((similarity - similarity[:, :1]) / temperature)  # (rows, K)
            voted = labels[where]
            for k in ks:
                tally = votes.new_zeros(len(votes), classes).scatter_add_(1, voted[:, :k], votes[:, :k])
                most = tally.topk(min(top, classes), dim=1)
                parts[k].append(most.indices.where(most.values > 0, -1).cpu())
            advance(len(asked))
    return {k: torch.cat(found) for k, found in parts.items()}


def _nearest(bank: Tensor, asked: Tensor, k: int, *, first: int | None) -> tuple[Tensor, Tensor]:
    """The k most similar images of the bank: similarities and positions, both (rows, k), the nearest first.

    asked: (rows, D), of length 1. With `first`, query i is image first + i of the bank and is not its own neighbour.
    """
    similarity = asked.new_empty(len(asked), 0)
    where = torch.empty(len(asked), 0, dtype=torch.int64, device=asked.device)
    tile = TILE_ROWS if asked.device.type == "cpu" else len(asked)
    size = max(k, min(BANK_ROWS, BLOCK_ELEMENTS // min(tile, len(asked))))
    for start in range(0, len(bank), size):
        block = F.normalize(bank[start : start + size].to(asked.device).float(), dim=1)
        room = asked.new_empty(min(tile, len(asked)), len(block))  # for one product after the other
        parts = []
        for row in range(0, len(asked), tile):
            part = asked[row : row + tile]
            found = torch.mm(part, block.T, out=room[: len(part)])  # (tile, block)
            if first is not None:
                own = torch.arange(len(found), device=found.device) + first + row - start
                inside = ((own >= 0) & (own < len(block))).nonzero()[:, 0]
                found[inside, own[inside]] = -torch.inf
            parts.append(largest(found, min(k, len(block))))
        values, places = (torch.cat(some) for some in zip(*parts, strict=True))
        similarity, where = torch.cat([similarity, values], dim=1), torch.cat([where, places + start], dim=1)
        similarity, order = similarity.topk(min(k, similarity.shape[1]), dim=1)  # of this and of all blocks before
        where = where.gather(1, order)
    return similarity, where


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their positions, in any order: (rows, n) → (rows, k) twice.

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


def fitting_ks(available: int, ks: Sequence[int] = USUAL_KS) -> tuple[int, ...]:
    """Those of the usual k that `available` voters allow; all voters where even the smallest is too many."""
    return tuple(k for k in ks if k <= available) or (available,)


def check_ks(ks: Sequence[int], available: int) -> None:
    if not ks:
        raise ValueError("ks is empty; give at least one k, such as 20")
    for k in ks:
        if k < 1:
            raise ValueError(f"k is {k}; it must be at least 1")
        if k > available:
            raise ValueError(
                f"k is {k}, but only {available} labelled images can vote; take a k up to {available}, or more images"
            )


def accuracy(predictions: Tensor, labels: Tensor, top: int = 1) -> float:
    """The share of rows whose label is among the first `top` predictions. predictions: (Q, ≥ top), labels: (Q,)."""
    hits = (predictions[:, :top] == labels.unsqueeze(1)).any(dim=1)
    return float(hits.double().mean())
