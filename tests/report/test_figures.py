"""Mixes, targets and shares in words; figures that any format takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from patchmix.mixing import Mixed, PatchMix
from patchmix.mixing.patchmix import share
from patchmix.report.figures import (
    mix_figure,
    share_text,
    show_mix,
    targets_figure,
)
from patchmix.report.style import look, write
from patchmix.settings import ShowMix


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ([1 / 3, 1 / 3, 1 / 3, 0], "1/3 each of 0, 1, 2"),
        ([1, 0], "all of 0"),
        ([1 / 3, 2 / 3], "2/3 of 1,\n1/3 of 0"),
        ([0.619, 0, 0, 0.381], "0.62 of 0,\n0.38 of 3"),
        ([1 / 6] * 6, "1/6 each of 0 … 5"),
        ([0.5, 0, 0.5], "1/2 each of 0, 2"),
    ],
)
def test_shares_read_as_words(row: list[float], text: str) -> None:
    assert share_text(torch.tensor(row)) == text


@pytest.mark.parametrize("num_mix", [1, 2, 3, 4])
def test_every_patch_is_framed_in_the_color_of_the_image_it_is_from(num_mix: int) -> None:
    values = (torch.arange(4) * 60).to(torch.uint8)  # each image has one value: pixels tell the owner
    images = values.view(4, 1, 1, 1).expand(4, 16, 16, 3).contiguous()
    figure, mixed = mix_figure(images, PatchMix(4, num_mix))
    below = figure.axes[4:]
    for i, axis in enumerate(below):
        frames = [patch for patch in axis.patches if isinstance(patch, Rectangle)]
        assert len(frames) == 16
        for frame in frames:
            x, y = (int(c + 2) for c in frame.get_xy())
            owner = round(float(mixed.images[i, 0, y, x]) * 255 / 60)
            assert frame.get_edgecolor()[:3] == tuple(int(look(owner)[0][k : k + 2], 16) / 255 for k in (1, 3, 5))


def test_the_mix_goes_on_as_if_it_had_not_been_watched() -> None:
    images = torch.randint(0, 256, (4, 16, 16, 3), dtype=torch.uint8)
    watched, free = (PatchMix(4, (2, 3), torch.Generator().manual_seed(3)) for _ in range(2))
    for _ in range(3):
        seen = mix_figure(images, watched)[1]
        expected = free(images.permute(0, 3, 1, 2).float() / 255)
        assert torch.equal(seen.images, expected.images) and torch.equal(seen.share, expected.share)


class Blend:
    """A mix of another kind."""

    def __call__(self, images: torch.Tensor) -> Mixed:
        assert images.is_floating_point() and images.min() >= 0 and images.max() <= 1
        own = torch.eye(len(images))
        return Mixed(0.71 * images + 0.29 * images.roll(-1, 0), 0.71 * own + 0.29 * own.roll(1, 1))


def test_other_mixes_show_shares_without_frames(tmp_path: Path) -> None:
    figure, mixed = mix_figure(torch.randint(0, 256, (3, 8, 8, 3), dtype=torch.uint8), Blend())
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[3:] == ["0.71 of 0,\n0.29 of 1", "0.71 of 1,\n0.29 of 2", "0.71 of 2,\n0.29 of 0"]
    assert not figure.axes[3].patches
    written = show_mix(ShowMix("shapes:8", tmp_path / "blend.svg", mix="mixup", images=3, size=32))
    assert [path.name for path in written] == ["blend.svg", "blend-targets.svg"]
    assert targets_figure(mixed.share).axes[2].images[0].get_array()[0, 1] == pytest.approx(0.29)


def test_the_three_target_matrices_are_those_of_the_losses() -> None:
    figure = targets_figure(share(9, 3))
    shown = [np.asarray(axis.images[0].get_array()) for axis in figure.axes]
    omega = np.array([[max(0, 1 - min((i - j) % 9, (j - i) % 9) / 3) for j in range(9)] for i in range(9)])
    np.testing.assert_allclose(shown[0], np.eye(9))
    np.testing.assert_allclose(shown[1], share(9, 3).numpy())
    np.testing.assert_allclose(shown[2], omega, atol=1e-6)
    texts = {text.get_text() for text in figure.axes[2].texts}
    assert texts == {"1", "2/3", "1/3"}


def test_figures_come_as_png_svg_and_pdf_only(tmp_path: Path) -> None:
    for ending, start in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")):
        (path,) = write({tmp_path / f"t{ending}": targets_figure(share(9, 2))})
        assert path.read_bytes().startswith(start)
    with pytest.raises(ValueError, match="must end in"):
        show_mix(ShowMix("shapes:8", tmp_path / "mix.gif"))
    with pytest.raises(ValueError, match="at least 2"):
        show_mix(ShowMix("shapes:8", tmp_path / "mix.png", images=1))


def test_a_figure_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    class Full(Figure):
        def savefig(self, file: Path, **_: object) -> None:  # type: ignore[override]
            file.write_bytes(b"half")
            raise OSError("no space left on device")

    (tmp_path / "a.png").write_bytes(b"old")
    with pytest.raises(OSError, match="no space left"):
        write({tmp_path / "a.png": Full()})
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]
