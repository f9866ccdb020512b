"""Draws the pictures of README and docs: `make figures RUN=runs/fast PHOTOS=clothing`.

The photos must be free to show; those in the repository are of a clothing set under CC0.
"""

from __future__ import annotations

import sys
from pathlib import Path

from patchmix.report.curves import show_curves
from patchmix.report.figures import show_mix
from patchmix.settings import ShowCurves, ShowMix

IMAGES = Path(__file__).parent / "images"


def main(run: Path, photos: str) -> None:
    show_mix(ShowMix(photos, IMAGES / "mix.png", num_mix=3, patch_size=16, size=96, images=6, seed=3))
    show_curves(ShowCurves((str(run),), IMAGES / "curves.png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
