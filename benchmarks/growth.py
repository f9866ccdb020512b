"""How cost grows: not with the size of the data set, in proportion with tokens, and not with M."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.pictures import jpeg, picture
from benchmarks.plain_views import two_views
from benchmarks.result import Result, ratio
from patchmix.data.contract import Source
from patchmix.data.loader import Loader
from patchmix.data.memory import in_memory
from patchmix.data.sources import open_source
from patchmix.data.views import Views
from patchmix.mixing import PatchMix
from patchmix.nn.vit import create_encoder
from patchmix.study.bench import Spread, in_turns, seconds

SMALL, LARGE, BATCH = 500, 5000, 64


def run(quick: bool = False) -> list[Result]:
    rounds = 2 if quick else 5
    return [*data_sets(rounds), *tokens(rounds), *mixing(rounds)]


def data_sets(rounds: int) -> list[Result]:
    """The same images in a set ten times larger: two batches of each, in turns."""
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        files = [jpeg(picture(seed, 48, 48)) for seed in range(50)]
        for kind, make in (("folder", _folder), ("parquet", _parquet), ("memory", _memory)):
            timers: dict[str, Callable[[], float]] = {}
            for count in (SMALL, LARGE):
                source = make(Path(temporary) / f"{kind}{count}", files, count)
                batches = Loader(source, Views(two_views(32), seed=0), batch_size=BATCH, seed=0).batches()
                timers[str(count)] = lambda batches=batches: seconds(lambda: [next(batches) for _ in range(2)])  # type: ignore[misc]
            times = in_turns(timers, rounds)
            growth = ratio(times[str(LARGE)], times[str(SMALL)])
            results.append(Result(f"cost per image, {kind}: {LARGE} images ÷ {SMALL}", growth, at_most=1.2))
    return results


def _folder(path: Path, files: list[bytes], count: int) -> Source:
    path.mkdir()
    for number in range(count):
        (path / f"{number:05}.jpg").write_bytes(files[number % len(files)])
    return open_source(path, cache_bytes=0)


def _parquet(path: Path, files: list[bytes], count: int) -> Source:
    path.mkdir()
    images = [{"bytes": files[number % len(files)]} for number in range(count)]
    pq.write_table(pa.table({"image": images}), path / "train.parquet", row_group_size=250)
    return open_source(path, cache_bytes=0)


def _memory(path: Path, files: list[bytes], count: int) -> Source:
    return in_memory(_folder(path, files, count), 1 << 30)


def tokens(rounds: int) -> list[Result]:
    """Twice the side is four times the tokens; attention adds to that what grows with their square."""
    encoders = {side: create_encoder(f"vit_tiny_patch4_{side}", depth=4) for side in (32, 64)}
    images = {side: torch.randn(16, 3, side, side) for side in encoders}

    def forward(side: int) -> None:
        with torch.no_grad():
            encoders[side](images[side])

    times = in_turns(
        {str(side): (lambda side=side: seconds(lambda: forward(side))) for side in encoders},  # type: ignore[misc]
        rounds,
    )
    return [Result("encoder: 257 tokens ÷ 65, per token", _per(ratio(times["64"], times["32"]), 257 / 65), at_most=1.5)]


def mixing(rounds: int) -> list[Result]:
    """A mix of 64 images of 32 px for M = 2 and M = 8, and beside the forward pass of a ViT-T/2."""
    images = torch.randn(64, 3, 32, 32)
    mixes = {m: PatchMix(2, m) for m in (2, 8)}
    encoder = create_encoder("vit_tiny_patch2_32")

    def forward() -> None:
        with torch.no_grad():
            encoder(images[:8])

    times = in_turns(
        {
            "2": lambda: seconds(lambda: [mixes[2](images) for _ in range(10)]),
            "8": lambda: seconds(lambda: [mixes[8](images) for _ in range(10)]),
            "forward": lambda: seconds(forward),
        },
        rounds,
    )
    # Two mixes a step of 9 forward passes (3 of them momentum's; backward counts twice) of 64 images.
    share = _per(ratio(times["2"], times["forward"]), 10 / 2 * 9 * 64 / 8)
    return [
        Result("mixing: M = 8 ÷ M = 2", ratio(times["8"], times["2"]), at_most=1.2),
        Result("mixing: share of a step", share, at_most=0.01),
    ]


def _per(spread: Spread, divisor: float) -> Spread:
    return Spread(spread.median / divisor, spread.low / divisor, spread.high / divisor)
