"""Attention inside windows, for images that are too large for every token to see every other.

Shapes: N images, H × W patch tokens of dim D, P prefix tokens (the class token), K windows of h × w tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block
from torch import Tensor, nn


def windowed_block(block: Block, tokens: Tensor, *, grid: tuple[int, int], window: int, prefix: int) -> Tensor:
    """timm's pre-norm block with its attention kept inside windows: (N, P + H·W, D) → the same shape."""
    attended = windowed_attention(block.attn, block.norm1(tokens), grid=grid, window=window, prefix=prefix)
    tokens = tokens + block.drop_path1(block.ls1(attended))
    out: Tensor = tokens + block.drop_path2(block.ls2(block.mlp(block.norm2(tokens))))
    return out


def windowed_attention(
    attention: nn.Module, tokens: Tensor, *, grid: tuple[int, int], window: int, prefix: int
) -> Tensor:
    """`attention` in each window of `window` × `window` tokens: (N, P + H·W, D) → the same shape.

    Prefix tokens take part in every window and come back as their mean over the windows. So one window that covers
    the whole image is full attention, exactly. Windows that reach over the edge do not see what is not there.
    """
    (height, width), count = grid, len(tokens)
    h, w = min(window, height), min(window, width)
    patches = tokens[:, prefix:].reshape(count, height, width, -1)
    down, right = -height % h, -width % w
    if down or right:
        patches = F.pad(patches, (0, 0, 0, right, 0, down))
    rows, columns = (height + down) // h, (width + right) // w
    inside = patches.reshape(count, rows, h, columns, w, -1).transpose(2, 3)  # (N, rows, columns, h, w, D)
    inside = inside.reshape(count * rows * columns, h * w, -1)  # (N·K, h·w, D)
    ahead = tokens[:, :prefix].repeat_interleave(rows * columns, dim=0)  # (N·K, P, D)
    inside = torch.cat([ahead, inside], dim=1)
    if down or right:
        seen = _seen(grid, (h, w), (rows, columns), prefix, tokens.device).repeat(count, 1)[:, None, None]
        attended = attention(inside, attn_mask=seen)
    else:
        attended = attention(inside)
    ahead = attended[:, :prefix].reshape(count, rows * columns, prefix, attended.shape[-1]).mean(dim=1)
    patches = attended[:, prefix:].reshape(count, rows, columns, h, w, -1).transpose(2, 3)
    patches = patches.reshape(count, height + down, width + right, -1)[:, :height, :width]
    return torch.cat([ahead, patches.flatten(1, 2)], dim=1)


def _seen(
    grid: tuple[int, int], window: tuple[int, int], windows: tuple[int, int], prefix: int, device: torch.device
) -> Tensor:
    """(K, P + h·w): which tokens of a window are the image's own, not padding."""
    (h, w), (rows, columns) = window, windows
    down = torch.arange(rows * h, device=device).view(rows, 1, h, 1) < grid[0]
    across = torch.arange(columns * w, device=device).view(1, columns, 1, w) < grid[1]
    own = (down & across).reshape(rows * columns, h * w)
    return torch.cat([own.new_ones(len(own), prefix), own], dim=1)
