"""patchmix shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from patchmix.cli.arguments import Count, Data, Text


def shards(
    data: Data,
    /,
    out: Path,
    split: Annotated[Literal["train", "test"] | None, arg(metavar="{train,test}")] = None,
    shard_size: Text = None,
    per_shard: Count = None,
    workers: int = 4,
    quality: Count = None,
    shuffle: bool = True,
) -> None:
    """Write data as tar shards with an index, for sets that are large or far away.

    Args:
        data: Any DATA: a name, a folder of images, parquet, or other shards.
        out: The folder to write to; empty, or with shards of the same call that was interrupted.
        split: One split only; by default all there are.
        shard_size: About how large a shard is; 256MB if not given.
        per_shard: How many images a shard has, instead.
        workers: Shards that are written at a time.
        quality: Write JPEG of this quality, 1 to 100; by default files keep their bytes, generated images become PNG.
        shuffle: Write in a random order, which training from shards wants.
    """
    from patchmix.data.write_shards import write_shards

    for done in write_shards(
        data,
        out,
        split=split,
        shard_size=shard_size,
        per_shard=per_shard,
        workers=workers,
        quality=quality,
        shuffle=shuffle,
    ):
        print(f"{done.split}: {done.samples:,} images in {done.shards:,} shards, {done.bytes / 1e6:,.1f} MB, checked")
        for text in done.left_out[:5]:
            print(f"  left out: {text}")
        if len(done.left_out) > 5:
            print(f"  left out: {len(done.left_out) - 5} more")
