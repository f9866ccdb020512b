"""From a ViT's tokens, all of one stride, to a detector's feature maps of strides 4, 8, 16, 32 and 64.

Shapes: N images of H × W px, patches of p px, tokens of dim D, C channels in every map of the pyramid;
in windowed attention h × w patch tokens, P prefix tokens (the class token), K windows.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d  # type: ignore[attr-defined]
from timm.models.vision_transformer import Block, VisionTransformer
from timm.models.vision_transformer_sam import window_partition, window_unpartition
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

from patchmix.nn.vit import patch_size_of

STRIDES = (4, 8, 16, 32)


class Pyramid(nn.Module):
    """A ViT as a detector's backbone: (N, 3, H, W) → {"0", …, "3", "pool"}: (N, C, H/s, W/s), s = 4, 8, 16, 32, 64.

    As in MAE's benchmark (Li et al. 2021): the tokens after four blocks at even depths, one for each stride, then a
    feature pyramid network. All norms are layer norms over channels.
    """

    def __init__(
        self,
        encoder: VisionTransformer,
        *,
        channels: int = 256,
        window: int = 0,
        global_blocks: int = 4,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        depth, patch = len(encoder.blocks), patch_size_of(encoder)
        if patch not in STRIDES:  # from these every stride is some doublings or halvings away
            raise ValueError(f"patches of {patch} px don't give strides 4 to 32; resample them to 16 (patch_size=16)")
        self.tokens = TokenMaps(
            encoder,
            blocks=even_blocks(depth, len(STRIDES)),
            window=window,
            global_blocks=even_blocks(depth, min(global_blocks, depth)) if window and global_blocks else (),
            recompute=recompute,
        )
        self.out_channels = channels  # torchvision's name
        dims = [self.tokens.dim] * len(STRIDES)
        self.scaled = nn.ModuleList(rescale(self.tokens.dim, patch, stride) for stride in STRIDES)
        self.merge = FeaturePyramidNetwork(dims, channels, extra_blocks=LastLevelMaxPool(), norm_layer=LayerNorm2d)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps = zip(self.scaled, self.tokens(images), strict=True)
        merged: dict[str, Tensor] = self.merge(OrderedDict((str(i), scale(one)) for i, (scale, one) in enumerate(maps)))
        return merged


class TokenMaps(nn.Module):
    """A ViT's patch tokens after some of its blocks, as maps, before the last norm.

    The encoder takes any image size: it interpolates its position embedding. With a `window`, attention stays inside
    windows of this size except in the blocks `global_blocks`. With `recompute`, blocks are computed again in the
    backward pass instead of keeping their activations.
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
        if not isinstance(encoder, VisionTransformer):
            raise ValueError(f"a {type(encoder).__name__} with rotary positions can't be a detector's backbone here")
        windowed = [i for i in range(len(encoder.blocks)) if window and i not in global_blocks]
        if odd := [type(encoder.blocks[i]).__name__ for i in windowed if type(encoder.blocks[i]) is not Block]:
            raise ValueError(f"window is {window}, but attention in a {odd[0]} has no windows; use window 0")
        # DDP would wait for the gradients of parameters that no loss reaches.
        encoder.norm, encoder.fc_norm, encoder.head = nn.Identity(), nn.Identity(), nn.Identity()
        self.encoder, self.blocks, self.recompute = encoder, tuple(blocks), recompute
        self.window, self.windowed = window, frozenset(windowed)
        self.patch_size, self.dim = patch_size_of(encoder), int(encoder.embed_dim)

    def forward(self, images: Tensor) -> list[Tensor]:
        """(N, 3, H, W), sides multiples of p → for each of `blocks` (N, D, H/p, W/p)."""
        encoder = self.encoder
        grid = (images.shape[2] // self.patch_size, images.shape[3] // self.patch_size)
        tokens = encoder.norm_pre(encoder.patch_drop(encoder._pos_embed(encoder.patch_embed(images))))
        maps = []
        for i in range(len(encoder.blocks)):
            if self.recompute and torch.is_grad_enabled():
                tokens = checkpoint(self._block, i, tokens, grid, use_reentrant=False)
            else:
                tokens = self._block(i, tokens, grid)
            if i in self.blocks:
                patches = tokens[:, encoder.num_prefix_tokens :]
                maps.append(patches.transpose(1, 2).reshape(len(images), self.dim, *grid))
        return maps

    def _block(self, i: int, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        block: Any = self.encoder.blocks[i]
        if i not in self.windowed:
            return cast("Tensor", block(tokens))
        # timm's pre-norm block with its attention in windows
        prefix = self.encoder.num_prefix_tokens
        attended = windowed_attention(block.attn, block.norm1(tokens), grid=grid, window=self.window, prefix=prefix)
        tokens = tokens + block.drop_path1(block.ls1(attended))
        return cast("Tensor", tokens + block.drop_path2(block.ls2(block.mlp(block.norm2(tokens)))))


def even_blocks(depth: int, count: int) -> tuple[int, ...]:
    """The last block of each of `count` equal parts of the network: 12 blocks in 4 parts → 2, 5, 8, 11."""
    if not 1 <= count <= depth:
        raise ValueError(
            f"a pyramid takes {count} blocks at even depths, but the encoder has {depth}; use a deeper one"
        )
    return tuple((part + 1) * depth // count - 1 for part in range(count))


def rescale(dim: int, patch: int, stride: int) -> nn.Sequential:
    """(N, dim, H/patch, W/patch) → (N, dim, H/stride, W/stride).

    Up by transposed convolutions of stride two with norm and GELU between them; down by max pooling.
    """
    layers: list[nn.Module] = []
    while patch > stride:
        if layers:
            layers += [LayerNorm2d(dim), nn.GELU()]
        layers.append(nn.ConvTranspose2d(dim, dim, kernel_size=2, stride=2))
        patch //= 2
    if patch < stride:
        layers.append(nn.MaxPool2d(stride // patch))
    return nn.Sequential(*layers)


def windowed_attention(
    attention: nn.Module, tokens: Tensor, *, grid: tuple[int, int], window: int, prefix: int
) -> Tensor:
    """`attention` in each window of `window` × `window` tokens: (N, P + h·w, D) → the same shape.

    Prefix tokens take part in every window and come back as their mean over the windows, so that one window over the
    whole image is full attention. Padding at the edges is masked.
    """
    count, size = len(tokens), min(window, max(grid))
    inside, padded = window_partition(tokens[:, prefix:].reshape(count, *grid, -1), size)  # (N·K, size, size, D)
    windows, mask = len(inside) // count, None
    ahead = tokens[:, :prefix].repeat_interleave(windows, dim=0)  # (N·K, P, D)
    if padded != grid:
        in_image, _ = window_partition(tokens.new_ones(count, *grid, 1, dtype=torch.bool), size)
        mask = F.pad(in_image.flatten(1), (prefix, 0), value=True)[:, None, None]  # (N·K, 1, 1, P + size²)
    attended = attention(torch.cat([ahead, inside.flatten(1, 2)], dim=1), attn_mask=mask)
    ahead = attended[:, :prefix].reshape(count, windows, prefix, attended.shape[-1]).mean(dim=1)
    patches = window_unpartition(attended[:, prefix:].reshape(len(inside), size, size, -1), size, grid, padded)
    return torch.cat([ahead, patches.flatten(1, 2)], dim=1)
