"""Patch tokens as colors, against components by NumPy."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from patchmix.report.attention import patches_figure, show_patches, token_colors
from patchmix.settings import ShowPatches


def test_colors_are_the_first_three_components_over_all_images() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, 5, 7, 6, generator=generator) * torch.tensor([9.0, 5.0, 3.0, 1.0, 0.5, 0.1])
    colors = token_colors(tokens)
    assert colors.shape == (2, 5, 7, 3) and colors.min() == 0 and colors.max() == 1
    rows = tokens.reshape(-1, 6).double().numpy()
    values, vectors = np.linalg.eigh(np.cov(rows.T))
    components = (rows - rows.mean(0)) @ vectors[:, np.argsort(-values)[:3]]
    for i in range(3):
        inside = (colors.view(-1, 3)[:, i] > 0) & (colors.view(-1, 3)[:, i] < 1)
        together = np.corrcoef(colors.view(-1, 3)[inside, i].numpy(), components[inside.numpy(), i])[0, 1]
        assert abs(together) == pytest.approx(1, abs=1e-9)


def test_the_foreground_is_the_side_away_from_the_borders() -> None:
    tokens = torch.randn(2, 6, 6, 8)
    tokens[:, 2:4, 2:4, 0] += 50
    colors = token_colors(tokens, foreground=True)
    shown = colors.sum(dim=-1) > 0
    assert shown[:, 2:4, 2:4].float().mean() > 0.8 and shown.sum() <= 8


def test_show_patches_of_a_run_and_its_mistakes(run: Path, other: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.png"
    (path,) = show_patches(ShowPatches((str(run), str(other)), "shapes:64", out=out, images=2, size=64))
    picture = cv2.imread(str(path))
    height, width = picture.shape[:2]
    assert picture.std() > 5 and width / height == pytest.approx(3 / 2, rel=0.15)  # two rows of three squares
    figure = patches_figure(torch.zeros(1, 32, 32, 3, dtype=torch.uint8), [("a", torch.rand(1, 4, 8, 3))])
    assert [axis.images[0].get_array().shape for axis in figure.axes] == [(32, 32, 3), (4, 8, 3)]
    with pytest.raises(ValueError, match="multiple of its patch size 8"):
        show_patches(ShowPatches((str(run),), "shapes:64", out=out, size=33))
    with pytest.raises(ValueError, match="block is 7"):
        show_patches(ShowPatches((str(run),), "shapes:64", out=out, block=7))
    with pytest.raises(ValueError, match="give either --data"):
        show_patches(ShowPatches((str(run),), out=out))
