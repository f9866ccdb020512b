"""Two views of an image on one core: ours against torchvision's transforms on Pillow images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import cv2
import numpy as np
import torch

from benchmarks import plain_views
from benchmarks.pictures import jpeg, picture
from benchmarks.plain_views import two_views
from benchmarks.result import Result, ratio
from patchmix.data.decode import decode, read_reduced
from patchmix.data.views import Views
from patchmix.study.bench import in_turns, seconds


def run(quick: bool = False) -> list[Result]:
    threads, opencv_threads = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(1)  # as in a worker
    cv2.setNumThreads(0)
    try:
        rounds = 3 if quick else 7
        return [
            *small(rounds),
            *files("500 × 375", 375, 500, 32, rounds, at_least=4.0),  # as ImageNet
            *files("1600 × 1200", 1200, 1600, 8, rounds, at_least=None),
        ]
    finally:
        torch.set_num_threads(threads)
        cv2.setNumThreads(opencv_threads)


def small(rounds: int) -> list[Result]:
    images = [picture(seed, 32, 32) for seed in range(256)]
    views = two_views(32, (0.1, 1.0))
    ours, theirs, indices = Views(views, seed=0), [plain_views.pipeline(view) for view in views], np.arange(256)
    times = in_turns(
        {
            "ours": _timed(lambda: ours(images, epoch=0, indices=indices)),
            "plain": _timed(lambda: [plain_views.of_pixels(theirs, image) for image in images]),
        },
        rounds,
    )
    return [Result("views at 32 px: plain ÷ ours", ratio(times["plain"], times["ours"]), at_least=6.0)]


def files(what: str, height: int, width: int, count: int, rounds: int, at_least: float | None) -> list[Result]:
    data = [jpeg(picture(seed, height, width)) for seed in range(count)]
    views = two_views(224)
    ours, theirs, indices = Views(views, seed=0), [plain_views.pipeline(view) for view in views], np.arange(count)

    def reduced() -> None:
        images = []
        for index, each in enumerate(data):
            images.append(read_reduced(each, "", 3, partial(ours.reduction, epoch=0, index=index)))
        ours(images, epoch=0, indices=indices)

    times = in_turns(
        {
            "ours": _timed(reduced),
            "plain": _timed(lambda: [plain_views.of_bytes(theirs, each) for each in data]),
            "whole": _timed(lambda: ours([decode(each, "") for each in data], epoch=0, indices=indices)),
        },
        rounds,
    )
    name = f"views at 224 px of JPEGs, {what}"
    return [
        Result(f"{name}: plain ÷ ours", ratio(times["plain"], times["ours"]), at_least=at_least),
        Result(f"{name}: decoded whole ÷ ours", ratio(times["whole"], times["ours"])),
    ]


def _timed(function: Callable[[], object]) -> Callable[[], float]:
    return lambda: seconds(function)
