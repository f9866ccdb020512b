"""PatchMix (Section 3.1, Algorithm 1, appendix A): the patches of M images of a batch make one image.

Symbols: N images, T patches per image, M images per mix, S = ⌊T/M⌋ patches per group, k(j) the shuffled patch order,
u(i, m) = (i + m) mod N the image that gives group m of mixed image i.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mixed:
    """A mixed batch. `share[i, j]` is how much of original j is in mixed image i; rows sum to 1."""

    images: Tensor  # (N, C, H, W)
    share: Tensor  # (N, N), float32
    groups: Tensor | None = None  # (M, T): patch j belongs to group m, which comes from original (i + m) mod N


class Mix(Protocol):
    """images (N, C, H, W), which are not changed → Mixed, with images of the same shape, dtype and device."""

    def for_one_step(self) -> "Mix":
        """The mix with everything drawn that both views of a step must have in common."""
        return self

    def __call__(self, images: Tensor) -> Mixed: ...


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """How much mixed image i of one batch has in common with mixed image j of another: Σ_k min(a_ik, b_jk).

    For PatchMix with M ≤ N this is the paper's weight ω = 1 − |d|/M (Eqs. 11 and 12), wrapped around the
    batch where N < 2M − 1. a, b: (N, K) shares whose rows sum to 1; returns (N, N).

    Examples:
        >>> share = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0]])
        >>> overlap(share, share)
        tensor([[1.0000, 0.5000],
                [0.5000, 1.0000]])
    """
    # Σ min(a, b) = ½ Σ (a + b − |a − b|): an L1 distance, without an N × N × K intermediate.
    with torch.autocast(a.device.type, enabled=False):
        return (1.0 - 0.5 * torch.cdist(a.float(), b.float(), p=1.0)).clamp_min(0.0)  # rounding leaves −1e-7


def check_images(images: Tensor, mix: str, patch_size: int = 1) -> tuple[int, int, int, int]:
    """The shape (N, C, H, W); a ValueError if it is another, or if height and width are not whole patches."""
    if images.ndim != 4:
        raise ValueError(f"images have {images.ndim} dimensions {tuple(images.shape)}; {mix} takes (N, C, H, W)")
    n, c, height, width = images.shape
    for side, size in (("height", height), ("width", width)):
        if size % patch_size or size == 0:
            raise ValueError(f"image {side} is {size}; it must be a multiple of patch_size {patch_size}")
    return n, c, height, width


def check_patch_size(patch_size: int) -> None:
    if patch_size < 1:
        raise ValueError(f"patch_size is {patch_size}; it must be at least 1")


class PatchMix(Mix):
    """Mixes M images of a batch patch by patch, in one gather for any N and M.

    One permutation is drawn per call and shared by the batch, so that every position of a mixed image comes
    from exactly one original (Eqs. 2-7). The T − M·S left-over patches stay with their own image, while the
    shares stay 1/M. Of several values of `num_mix` a call draws one, unless it gets one itself.

    Examples:
        >>> mixed = PatchMix(patch_size=16, num_mix=3)(torch.randn(8, 3, 224, 224))
        >>> mixed.images.shape, mixed.share.shape
        (torch.Size([8, 3, 224, 224]), torch.Size([8, 8]))
    """

    def __init__(
        self, patch_size: int, num_mix: int | Sequence[int] = 3, generator: torch.Generator | None = None
    ) -> None:
        check_patch_size(patch_size)
        self.patch_size = patch_size
        self.choices = (num_mix,) if isinstance(num_mix, int) else tuple(num_mix)
        self.generator = generator  # None: torch's default CPU generator
        if not self.choices:
            raise ValueError("num_mix is empty; give at least one number of images to mix, e.g. 3")
        if (m := min(self.choices)) < 1:
            raise ValueError(f"num_mix is {m}; it must be at least 1 (1 leaves the images as they are)")

    def draw_num_mix(self) -> int:
        """M of this step; both views of a step need the same one, for their targets to agree."""
        if len(self.choices) == 1:
            return self.choices[0]
        return self.choices[int(torch.randint(len(self.choices), (), generator=self.generator))]

    def for_one_step(self) -> "PatchMix":
        return PatchMix(self.patch_size, self.draw_num_mix(), self.generator)

    def __call__(self, images: Tensor, num_mix: int | None = None) -> Mixed:
        """images: (N, C, H, W), not changed → Mixed with images of the same shape, dtype and device."""
        n, c, height, width = check_images(images, "PatchMix", self.patch_size)
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
        groups = (group_of(m, order) == torch.arange(m).unsqueeze(1)).to(images.device, non_blocking=True)
        index = owner.view(n, 1, rows, 1, columns, 1).expand(n, c, rows, p, columns, p)
        mixed = images.reshape(n, c, rows, p, columns, p).gather(0, index)
        return Mixed(mixed.view(n, c, height, width), share(n, m, device=images.device), groups)


def owners(n: int, m: int, order: Tensor) -> Tensor:
    """w(i, j) of Eq. 7, the original that gives patch j of mixed image i. order: k(j), (T,); returns (N, T)."""
    return (torch.arange(n).unsqueeze(1) + group_of(m, order)) % n


def group_of(m: int, order: Tensor) -> Tensor:
    """The group, 0 … M − 1, that each patch belongs to. order: k(j), (T,); returns (T,)."""
    patches = len(order)
    group = torch.arange(patches).div(patches // m, rounding_mode="floor")
    group[group >= m] = 0  # left-over patches stay with their own image
    return torch.empty_like(group).scatter_(0, order, group)  # unshuffle


def share(n: int, m: int, *, device: torch.device | str = "cpu") -> Tensor:
    """The dense form of y_mto: how often j is among u(i, 0), …, u(i, M−1), divided by M. Returns (N, N)."""
    i = torch.arange(n, device=device)
    distance = (i - i.unsqueeze(1)) % n  # (j − i) mod N
    times = (m - 1 - distance).div(n, rounding_mode="floor").add(1).clamp(min=0)  # more than once where M > N
    return times / m
