"""PatchMix (Section 3.1, Algorithm 1, appendix A): the patches of M images of a batch make one image.

Symbols: N images, T patches an image, M images a mix, S = ⌊T/M⌋ patches a group, L = N·M groups,
k(j) the shuffled patch order, u(i, m) = (i + m) mod N the image that gives group m of mixed image i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from patchmix.mixing.mixed import Mixed


class PatchMix:
    """Mixes M images of a batch patch by patch; one gather, whatever N and M are.

    One permutation is drawn per call and shared by the batch, so that every position of a mixed image comes
    from exactly one original (Eqs. 2-7). The T − M·S left-over patches stay with their own image, while the
    shares stay 1/M. With several values in `num_mix` a call draws one of them, unless it is told which.
    """

    def __init__(
        self, patch_size: int, num_mix: int | Sequence[int] = 3, generator: torch.Generator | None = None
    ) -> None:
        self.patch_size = patch_size
        self.choices = (num_mix,) if isinstance(num_mix, int) else tuple(num_mix)
        self.generator = generator  # None: torch's default CPU generator
        if patch_size < 1:
            raise ValueError(f"patch_size is {patch_size}; it must be at least 1")
        if not self.choices:
            raise ValueError("num_mix is empty; give at least one number of images to mix, e.g. 3")
        for m in self.choices:
            if m < 1:
                raise ValueError(f"num_mix is {m}; it must be at least 1 (1 leaves the images as they are)")

    def draw_num_mix(self) -> int:
        """M of this step; both views of a step must be given the same one, for their targets to agree."""
        if len(self.choices) == 1:
            return self.choices[0]
        pick = torch.randint(len(self.choices), (), generator=self.generator)
        return self.choices[int(pick)]

    def for_one_step(self) -> PatchMix:
        """Itself where M is fixed; otherwise with the M of this step."""
        if len(self.choices) == 1:
            return self
        return PatchMix(self.patch_size, self.draw_num_mix(), self.generator)

    def __call__(self, images: Tensor, num_mix: int | None = None) -> Mixed:
        """images: (N, C, H, W), never written to → Mixed with images of the same shape, dtype and device."""
        n, c, height, width = self._check(images)
        p, m = self.patch_size, self.draw_num_mix() if num_mix is None else num_mix
        rows, columns = height // p, width // p
        patches = rows * columns
        if not 1 <= m <= patches:
            raise ValueError(
                f"num_mix is {m}; with {patches} patches of {p} × {p} in {height} × {width} px it must lie "
                f"between 1 and {patches}"
            )
        order = torch.randperm(patches, generator=self.generator)  # k(j)
        owner = owners(n, m, order).to(images.device, non_blocking=True)  # w(i, j): (N, T)
        index = owner.view(n, 1, rows, 1, columns, 1).expand(n, c, rows, p, columns, p)
        mixed = images.reshape(n, c, rows, p, columns, p).gather(0, index)
        return Mixed(mixed.view(n, c, height, width), share(n, m, device=images.device))

    def _check(self, images: Tensor) -> tuple[int, int, int, int]:
        if images.ndim != 4:
            raise ValueError(f"images have {images.ndim} dimensions {tuple(images.shape)}; PatchMix takes (N, C, H, W)")
        n, c, height, width = images.shape
        for side, size in (("height", height), ("width", width)):
            if size % self.patch_size or size == 0:
                raise ValueError(f"image {side} is {size}; it must be a multiple of patch_size {self.patch_size}")
        return n, c, height, width


def owners(n: int, m: int, order: Tensor) -> Tensor:
    """w(i, j) of Eq. 7, the original that gives patch j of mixed image i. order: k(j), (T,); returns (N, T)."""
    patches = len(order)
    group = torch.arange(patches).div(patches // m, rounding_mode="floor")
    group[group >= m] = 0  # left-over patches stay with their own image
    shift = torch.empty_like(group).scatter_(0, order, group)  # unshuffle
    return (torch.arange(n).unsqueeze(1) + shift) % n


def share(n: int, m: int, *, device: torch.device | str = "cpu") -> Tensor:
    """The dense form of y_mto: how often j is among u(i, 0), …, u(i, M−1), divided by M. Returns (N, N)."""
    i = torch.arange(n, device=device)
    distance = (i - i.unsqueeze(1)) % n  # (j − i) mod N
    times = (m - 1 - distance).div(n, rounding_mode="floor").add(1).clamp(min=0)  # more than once where M > N
    return times / m


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
