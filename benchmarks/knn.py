"""kNN of 10 000 queries in a bank of 50 000, 192 wide, against the bare matrix product of that size."""

from __future__ import annotations

import torch

from benchmarks.result import Result, ratio
from patchmix.evaluate import knn
from patchmix.study.bench import in_turns, seconds

BANK, QUERIES, WIDTH, CLASSES = 50_000, 10_000, 192, 10


def run(quick: bool = False) -> list[Result]:
    generator = torch.Generator().manual_seed(0)
    bank = torch.randn(BANK, WIDTH, generator=generator)
    queries = torch.randn(QUERIES // 10 if quick else QUERIES, WIDTH, generator=generator)
    labels = torch.randint(CLASSES, (BANK,), generator=generator)

    similarities = torch.zeros(len(queries), BANK)  # memory that is there: none has to be found in the product's time

    def product() -> None:
        torch.mm(queries, bank.T, out=similarities)

    def vote(ks: tuple[int, ...]) -> float:
        return seconds(lambda: knn.knn_predict(bank, labels, queries, ks=ks))

    times = in_turns(
        {"headline": lambda: vote((20,)), "product": lambda: seconds(product), "usual": lambda: vote(knn.USUAL_KS)},
        rounds=3,
    )
    return [
        Result("kNN, k = 20 ÷ bare product", ratio(times["headline"], times["product"]), at_most=1.2),
        Result("kNN, k = 10, 20, 100, 200 ÷ bare product", ratio(times["usual"], times["product"])),
    ]
