"""Figures from the command line: read, draw, write, say where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from patchmix.data.sources import open_source
from patchmix.data.views import CentreCrop
from patchmix.report.figures import curves_figure, mix_figure, targets_figure
from patchmix.report.style import save
from patchmix.train.log import read_metrics


def show_mix(data: str, out: Path, *, num_mix: int, patch_size: int, size: int, images: int, seed: int) -> list[Path]:
    """Writes the mix and, beside it, its target matrices."""
    source = open_source(data, "train")
    picks = np.linspace(0, len(source) - 1, min(images, len(source))).round().astype(np.int64)
    (crops,) = CentreCrop(size)([source.load(int(i)) for i in picks], epoch=0, indices=picks)
    figure = mix_figure(torch.from_numpy(crops), patch_size=patch_size, num_mix=num_mix, seed=seed)
    targets = out.with_name(f"{out.stem}-targets{out.suffix}")
    return _say([save(figure, out), save(targets_figure(max(9, 2 * num_mix - 1), num_mix), targets)])


def show_curves(runs: Sequence[Path], out: Path) -> list[Path]:
    written = []
    for run in runs:
        path = run / "metrics.jsonl"
        if not path.is_file():
            raise ValueError(f"{run} has no metrics.jsonl; is it a run's folder?")
        name = out if len(runs) == 1 else out.with_name(f"{out.stem}-{run.name}{out.suffix}")
        written.append(save(curves_figure(read_metrics(path)), name))
    return _say(written)


def _say(paths: list[Path]) -> list[Path]:
    for path in paths:
        print(f"wrote {path}")
    return paths
