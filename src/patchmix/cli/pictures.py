"""patchmix show …"""

from __future__ import annotations

from pathlib import Path

from tyro.conf import Positional

from patchmix.cli.arguments import Data


def show_mix(
    data: Data,
    /,
    out: Path = Path("mix.png"),
    num_mix: int = 3,
    patch_size: int = 8,
    size: int = 64,
    images: int = 6,
    seed: int = 0,
) -> None:
    """Draw originals and their mixes, every patch framed in the colour of its original.

    Args:
        data: As for pretrain.
        out: A .png, .svg or .pdf; the target matrices go beside it, as NAME-targets.
        num_mix: Images in a mix, M.
        patch_size: Side of a patch in pixels of the picture.
        size: Side of the centre crop that is shown.
        images: How many images of DATA to take.
        seed: Of the permutation.
    """
    from patchmix.report.pictures import show_mix

    show_mix(data, out, num_mix=num_mix, patch_size=patch_size, size=size, images=images, seed=seed)


def show_curves(runs: Positional[tuple[Path, ...]], /, out: Path = Path("curves.png")) -> None:
    """Draw a run's losses between floor and chance, its kNN, rank and learning rate.

    Args:
        runs: One or more run folders; each gets a picture of its own.
        out: A .png, .svg or .pdf; with several runs, NAME-RUN.
    """
    from patchmix.report.pictures import show_curves

    show_curves(runs, out)
