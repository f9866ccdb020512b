"""Algorithm 1 with loops, one image and one patch at a time; indices and weights as Eqs. 8-12 print them."""

from __future__ import annotations

import torch
from torch import Tensor


def patchify(image: Tensor, p: int) -> list[Tensor]:
    _, height, width = image.shape
    return [image[:, r : r + p, c : c + p] for r in range(0, height, p) for c in range(0, width, p)]


def unpatchify(patches: list[Tensor], height: int, width: int, p: int) -> Tensor:
    image = torch.empty(patches[0].shape[0], height, width, dtype=patches[0].dtype)
    places = [(r, c) for r in range(0, height, p) for c in range(0, width, p)]
    for (r, c), patch in zip(places, patches, strict=True):
        image[:, r : r + p, c : c + p] = patch
    return image


def mix(images: Tensor, p: int, m: int, k: list[int]) -> Tensor:
    """Eqs. 1-7 with the permutation k; left-over patches stay with their own image."""
    n, _, height, width = images.shape
    patches = [patchify(image, p) for image in images]
    t = len(patches[0])
    s = t // m
    mixed = []
    for i in range(n):
        shuffled_mix = [patches[i][k[j]] for j in range(t)]
        for group in range(m):
            for j in range(group * s, (group + 1) * s):
                shuffled_mix[j] = patches[(i + group) % n][k[j]]
        r = sorted(range(t), key=lambda j: k[j])  # argsort
        mixed.append(unpatchify([shuffled_mix[r[j]] for j in range(t)], height, width, p))
    return torch.stack(mixed)


def groups_by_flat_index(n: int, m: int) -> list[tuple[int, int]]:
    """Which (image, group) stands at every place of the mixed batch, by u(i, m), in the order of Eq. 8."""
    return [((i + group) % n, group) for i in range(n) for group in range(m)]


def mix_index(n: int, m: int) -> Tensor:
    """q of Eq. 9: which of the L = N·M flattened patch groups stands at place l after mixing. Returns (L,)."""
    groups = torch.arange(n * m)  # l, Eq. 8
    return (groups + (groups % m) * m) % (n * m)


def y_mto(n: int, m: int) -> Tensor:
    """Eq. 10: the M originals in each mixed image, u(i, m) = (i + m) mod N. Returns (N, M)."""
    return (torch.arange(n).unsqueeze(1) + torch.arange(m)) % n


def y_mtm(n: int, m: int) -> Tensor:
    """Eq. 11: the 2M − 1 mixed images of the other view that overlap with each. Returns (N, 2M − 1)."""
    return (torch.arange(n).unsqueeze(1) + torch.arange(1 - m, m)) % n


def omega_mtm(n: int, m: int) -> Tensor:
    """Eq. 12: the weights of y_mtm, 1 − |M − j − 1| / M. Returns (N, 2M − 1)."""
    weights = 1.0 - (m - torch.arange(2 * m - 1) - 1).abs() / m
    return weights.expand(n, -1)
