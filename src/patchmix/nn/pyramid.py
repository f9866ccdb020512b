"""From a ViT's tokens, all of one stride, to the maps of strides 4, 8, 16, 32 and 64 that a detector wants.

Shapes: N images of H × W px, patches of p px, tokens of dim D, C channels in every map of the pyramid.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d  # type: ignore[attr-defined]
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

from patchmix.nn.vit import patch_size_of
from patchmix.nn.windowed import windowed_block

STRIDES = (4, 8, 16, 32)
PATCH_SIZES = (4, 8, 16, 32)  # from these every stride is some doublings or halvings away
PyramidName = Literal["fpn", "simple"]


def even_blocks(depth: int, count: int) -> tuple[int, ...]:
    """The last block of each of `count` equal parts of the network: 12 blocks in 4 parts → 2, 5, 8, 11."""
    if not 1 <= count <= depth:
        raise ValueError(f"{count} blocks at even depths need as many blocks, the encoder has {depth}; take fewer")
    return tuple((part + 1) * depth // count - 1 for part in range(count))


class TokenMaps(nn.Module):
    """A ViT's patch tokens after some of its blocks, as maps; before its last norm, which is taken out.

    The position embedding is interpolated, each axis for itself, to the image that comes in. With a `window`,
    attention stays inside windows of so many tokens except in the blocks `global_blocks`. With `recompute`,
    activations inside blocks are computed again in the backward pass instead of kept.
    """

    def __init__(
        self,
        encoder: VisionTransformer,
        *,
        blocks: Sequence[int],
        window: int = 0,
        global_blocks: Sequence[int] = (),
        recompute: bool = False,
    ) -> None:
        super().__init__()
        if not encoder.dynamic_img_size:
            raise ValueError("the encoder takes one image size only; create it with any_image_size=True")
        windowed = [i for i in range(len(encoder.blocks)) if window and i not in global_blocks]
        if odd := [type(encoder.blocks[i]).__name__ for i in windowed if type(encoder.blocks[i]) is not Block]:
            raise ValueError(f"window is {window}, but a {odd[0]} can't be windowed; take window 0")
        # Without these, the last block alone ends in parameters that no loss reaches, which DDP would wait for.
        encoder.norm, encoder.fc_norm, encoder.head = nn.Identity(), nn.Identity(), nn.Identity()
        self.encoder = encoder
        self.blocks = tuple(blocks)
        self.window = window
        self.windowed = frozenset(windowed)
        self.recompute = recompute
        self.patch_size = patch_size_of(encoder)
        self.dim = int(encoder.embed_dim)

    def forward(self, images: Tensor) -> list[Tensor]:
        """(N, 3, H, W), sides multiples of p → for each of `blocks` (N, D, H/p, W/p)."""
        encoder = self.encoder
        grid = (images.shape[2] // self.patch_size, images.shape[3] // self.patch_size)
        tokens = encoder.norm_pre(encoder.patch_drop(encoder._pos_embed(encoder.patch_embed(images))))
        maps = {}
        for i in range(len(encoder.blocks)):
            if self.recompute and torch.is_grad_enabled():
                tokens = checkpoint(self._block, i, tokens, grid, use_reentrant=False)
            else:
                tokens = self._block(i, tokens, grid)
            if i in self.blocks:
                patches = tokens[:, encoder.num_prefix_tokens :]
                maps[i] = patches.transpose(1, 2).reshape(len(images), self.dim, *grid)
        return [maps[i] for i in self.blocks]

    def _block(self, i: int, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        block: Any = self.encoder.blocks[i]
        if i in self.windowed:
            prefix = self.encoder.num_prefix_tokens
            return windowed_block(block, tokens, grid=grid, window=self.window, prefix=prefix)
        out: Tensor = block(tokens)
        return out


class Pyramid(nn.Module):
    """A ViT as a detector's backbone: (N, 3, H, W) → {"0", …, "3", "pool"}: (N, C, H/s, W/s), s = 4, 8, 16, 32, 64.

    `fpn`: four blocks at even depths, one for each stride, then a feature pyramid network (Li et al. 2021, MAE's
    benchmark). `simple`: every stride from the last block, no top-down path (ViTDet, Li et al. 2022).
    All norms are layer norms over channels, as in ViTDet: they don't depend on the batch or on other processes.
    """

    def __init__(
        self,
        encoder: VisionTransformer,
        *,
        kind: PyramidName = "fpn",
        channels: int = 256,
        window: int = 0,
        global_blocks: int = 4,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        depth, patch = len(encoder.blocks), patch_size_of(encoder)
        if kind not in ("fpn", "simple"):
            raise ValueError(f"pyramid is {kind!r}; it must be fpn or simple")
        if patch not in PATCH_SIZES:
            raise ValueError(f"patches of {patch} px don't give strides 4 to 32; resample them to 16 (patch_size=16)")
        if kind == "fpn" and depth < len(STRIDES):
            raise ValueError(f"pyramid fpn takes 4 blocks at even depths, the encoder has {depth}; take simple")
        self.tokens = TokenMaps(
            encoder,
            blocks=even_blocks(depth, len(STRIDES)) if kind == "fpn" else (depth - 1,),
            window=window,
            global_blocks=even_blocks(depth, min(global_blocks, depth)) if window and global_blocks else (),
            recompute=recompute,
        )
        self.kind = kind
        self.out_channels = channels  # torchvision asks for it under this name
        dim = self.tokens.dim
        if kind == "fpn":
            self.scaled = nn.ModuleList(rescale(dim, patch, stride)[0] for stride in STRIDES)
            self.merge = FeaturePyramidNetwork(
                [dim] * len(STRIDES), channels, extra_blocks=LastLevelMaxPool(), norm_layer=LayerNorm2d
            )
        else:
            self.scaled = nn.ModuleList(_lateral(dim, patch, stride, channels) for stride in STRIDES)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps = self.tokens(images)
        if self.kind == "simple":
            maps = maps * len(STRIDES)
        levels = OrderedDict((str(i), scale(one)) for i, (scale, one) in enumerate(zip(self.scaled, maps, strict=True)))
        if self.kind == "fpn":
            merged: dict[str, Tensor] = self.merge(levels)
            return merged
        levels["pool"] = F.max_pool2d(levels["3"], kernel_size=1, stride=2)
        return levels


def rescale(dim: int, patch: int, stride: int, *, narrow: bool = False) -> tuple[nn.Sequential, int]:
    """(N, dim, H/patch, W/patch) → (N, out, H/stride, W/stride), and out.

    Up by transposed convolutions of stride two, norm and GELU between them; down by max pooling. With `narrow` each
    doubling halves the channels.
    """
    layers: list[nn.Module] = []
    while patch > stride:
        if layers:
            layers += [LayerNorm2d(dim), nn.GELU()]
        out = max(1, dim // 2) if narrow else dim
        layers.append(nn.ConvTranspose2d(dim, out, kernel_size=2, stride=2))
        dim, patch = out, patch // 2
    if patch < stride:
        layers.append(nn.MaxPool2d(stride // patch))
    return nn.Sequential(*layers), dim


def _lateral(dim: int, patch: int, stride: int, channels: int) -> nn.Sequential:
    scale, out = rescale(dim, patch, stride, narrow=True)
    return nn.Sequential(
        *scale,
        nn.Conv2d(out, channels, kernel_size=1, bias=False),
        LayerNorm2d(channels),
        nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False),
        LayerNorm2d(channels),
    )
