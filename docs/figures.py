"""Draws the pictures of README and docs from a real run: `make figures RUN=runs/cifar-small`.

Pictures of images show the generated set, which is ours to show; of other data only curves are drawn.
"""

from __future__ import annotations

import sys
from pathlib import Path

from patchmix.report.curves import show_curves
from patchmix.report.figures import show_mix
from patchmix.settings import ShowCurves, ShowMix

IMAGES = Path(__file__).parent / "images"


def main(run: Path) -> None:
    show_mix(ShowMix("shapes", IMAGES / "mix.png", num_mix=3, patch_size=8, size=32, images=6))
    show_curves(ShowCurves((str(run),), IMAGES / "curves.png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
