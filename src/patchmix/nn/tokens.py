"""Images → tokens → projections: the forward passes of a timm ViT, with less work and memory than its own.

Shapes: N images of T tokens (class token first) with D numbers each.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.layers.mlp import Mlp
from timm.models.eva import Eva
from timm.models.vision_transformer import Attention, Block, VisionTransformer  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_FEW_TOKENS = 1024  # up to here the attention of every token to every other needs little memory


def project(batches: Sequence[Tensor | None], encoder: nn.Module, *heads: nn.Module) -> list[Tensor]:
    """Each batch through the encoder, then through the heads: (N, C, H, W) → (N, D).

    None is skipped: its result is empty. Neighbors of equal image size share one pass of the encoder. Heads see one
    batch at a time, for their batch norms. Every batch has its own pass where that saves memory at no cost in time:
    without gradients on the CPU, and where activations are recomputed. With batch norms in the encoder, keys have their
    own passes and queries share one, so that the statistics are the same everywhere.
    """
    given = [batch for batch in batches if batch is not None]
    with_gradient, on_cuda = torch.is_grad_enabled(), any(batch.is_cuda for batch in given)
    apart = getattr(encoder, "grad_checkpointing", False) if with_gradient else not on_cuda
    if any(isinstance(module, nn.BatchNorm1d) for module in encoder.modules()):
        apart = not with_gradient
    if apart:
        features = [class_tokens(encoder, batch) for batch in given]
    else:
        features = []
        for _, group in groupby(given, key=lambda batch: tuple(batch.shape[-2:])):
            equal = list(group)
            features += torch.split(class_tokens(encoder, torch.cat(equal)), [len(batch) for batch in equal])
    for head in heads:
        features = [head(x) for x in features]
    results = iter(features)
    return [torch.empty(0) if batch is None else next(results) for batch in batches]


def class_tokens(encoder: nn.Module, images: Tensor) -> Tensor:
    """encoder(images), (N, D): the last block computes the class token only.

    Its queries, projection and MLP concern one token; keys and values still come from all. The result is the same up
    to rounding, for ViTs of plain blocks that pool by class token; any other encoder is called as it is.
    """
    if not is_plain(encoder):
        return cast("Tensor", encoder(images))
    assert isinstance(encoder, VisionTransformer)
    x = encoder.patch_drop(add_positions(encoder, encoder.patch_embed(images)))  # (N, T, D)
    return encoder.forward_head(_run_for_class_token(encoder, x))


def region_tokens(encoder: nn.Module, images: Tensor, regions: Tensor, least: int) -> Tensor:
    """The class token of the images and of M regions of them, (N, 1 + M, D), in one pass.

    For a region, the last block's class token attends to the patches of that region only. regions: (M, patches), bool;
    least: patches of the smallest one. Token dropout leaves equally many patches of every region.
    """
    assert isinstance(encoder, VisionTransformer) and is_plain(encoder)
    x, dropout = add_positions(encoder, encoder.patch_embed(images)), encoder.patch_drop
    if isinstance(dropout, TokenDropout) and dropout.active:
        keep = dropout.draw(regions, least)
        x, regions = dropout(x, keep), regions[:, keep]
    seen = F.pad(regions, (encoder.num_prefix_tokens, 0), value=True)  # class and register tokens are of every region
    return _run_for_class_token(encoder, x, torch.cat([torch.ones_like(seen[:1]), seen]))


def _run_for_class_token(encoder: VisionTransformer, x: Tensor, seen: Tensor | None = None) -> Tensor:
    """All blocks and the norm; the last block computes class tokens only: (N, T, D) → (N, R, D), R = 1 without `seen`.

    seen: (R, T), the tokens that each of the class tokens attends to in the last block.
    """
    x = encoder.norm_pre(x)
    for block in encoder.blocks[:-1]:
        x = run_block(block, x, recompute=encoder.grad_checkpointing)
    last = encoder.blocks[-1]
    assert isinstance(last, Block) and isinstance(last.attn, Attention)
    x = x[:, :1] + last.drop_path1(last.ls1(_attend_from_first(last.attn, last.norm1(x), seen)))
    x = x + last.drop_path2(last.ls2(last.mlp(last.norm2(x))))
    return cast("Tensor", encoder.norm(x))


def add_positions(encoder: VisionTransformer, x: Tensor) -> Tensor:
    """Patch embeddings, (N, T, D) or (N, rows, columns, D), with class token and positions.

    Images of another size have resampled positions: as timm does it, which the authors of DINO, iBOT and PatchMix do
    not do for local crops: `encoder.author_positions` resamples as they do, without antialiasing and for a size that
    is 0.1 patches larger.
    """
    grid, positions = encoder.patch_embed.grid_size, encoder.pos_embed
    same_size = x.ndim == 3 or tuple(x.shape[1:3]) == tuple(grid)
    if same_size or not getattr(encoder, "author_positions", False) or positions is None or encoder.cls_token is None:
        return encoder._pos_embed(x)
    rows, columns = x.shape[1:3]
    table = positions[:, 1:].view(1, *grid, -1).permute(0, 3, 1, 2)  # (1, D, rows, columns)
    scale = ((rows + 0.1) / grid[0], (columns + 0.1) / grid[1])
    table = F.interpolate(table, scale_factor=scale, mode="bicubic").flatten(2).mT
    tokens = torch.cat([encoder.cls_token.expand(len(x), -1, -1), x.flatten(1, 2)], dim=1)
    return cast("Tensor", encoder.pos_drop(tokens + torch.cat([positions[:, :1], table], dim=1)))


class TokenDropout(nn.Module):
    """Drops a share of the patch tokens in training, at the same random positions for the whole batch.

    It takes the place of timm's `patch_drop`; the training loop sets `share`. A momentum copy sees every token.
    """

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix  # class and register tokens, which stay
        self.share = 0.0

    @property
    def active(self) -> bool:
        return self.training and self.share > 0.0

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """x: (N, prefix + T, D); keep: positions of the patch tokens that stay, by default drawn here."""
        if keep is None:
            if not self.active:
                return x
            patches = x.shape[1] - self.prefix
            keep = self.draw(torch.ones(1, patches, dtype=torch.bool, device=x.device), patches)
        return torch.cat([x[:, : self.prefix], x[:, self.prefix :][:, keep]], dim=1)

    def draw(self, groups: Tensor, least: int) -> Tensor:
        """Positions that stay, equally many of each group of patches. groups: (M, T), bool → (T′,)."""
        stay = max(1, round((1.0 - self.share) * least))
        scores = torch.rand(groups.shape[1], device=groups.device).masked_fill(~groups, -1.0)
        return scores.topk(stay, dim=1).indices.flatten()


def is_plain(encoder: nn.Module) -> bool:
    """Whether it is a ViT whose last block is a plain one and whose feature is the class token."""
    if type(encoder) is not VisionTransformer or encoder.global_pool != "token" or encoder.attn_pool is not None:
        return False
    last = encoder.blocks[-1]
    return type(last) is Block and _is_plain_attention(last.attn)


def _is_plain_attention(attn: nn.Module) -> bool:
    return type(attn) is Attention and getattr(attn, "gate", None) is None


def _attend(attn: Attention, x: Tensor) -> Tensor:
    """attn(x), (N, T, D)."""
    n, t, _ = x.shape
    q, k, v = attn.qkv(x).view(n, t, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    return _attention(attn, attn.q_norm(q), attn.k_norm(k), v)


def _attend_from_first(attn: Attention, x: Tensor, seen: Tensor | None = None) -> Tensor:
    """The first token of attn(x), once for each row of `seen` (R, T), what it attends to: (N, T, D) → (N, R, D)."""
    n, t, _ = x.shape
    r = 1 if seen is None else len(seen)
    heads, width = attn.num_heads, attn.head_dim
    weight_q, weight_kv = attn.qkv.weight.tensor_split([heads * width])
    bias_q, bias_kv = (None, None) if attn.qkv.bias is None else attn.qkv.bias.tensor_split([heads * width])
    q = F.linear(x[:, :1], weight_q, bias_q).view(n, 1, heads, width).transpose(1, 2)
    k, v = F.linear(x, weight_kv, bias_kv).view(n, t, 2, heads, width).permute(2, 0, 3, 1, 4).unbind(0)
    return _attention(attn, attn.q_norm(q).expand(n, heads, r, width), attn.k_norm(k), v, seen)


def _attention(attn: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """attn from q (N, heads, R, d), k and v (N, heads, T, d) on → (N, R, D). seen: (R, T), what is attended to.

    In bf16 on the CPU plain products are faster than torch's fused kernel, but the attention of every token to every
    other is kept for the backward pass.
    """
    dropout = attn.attn_drop.p if attn.training else 0.0
    if v.dtype == torch.bfloat16 and not v.is_cuda and v.shape[2] <= _FEW_TOKENS:
        scores = (q * attn.scale) @ k.mT
        scores = scores if seen is None else scores.masked_fill(~seen, -math.inf)
        y = F.dropout(scores.softmax(dim=-1, dtype=v.dtype), dropout) @ v
    else:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout)
    return cast("Tensor", attn.proj_drop(attn.proj(attn.norm(y.transpose(1, 2).flatten(2)))))


def all_tokens(
    encoder: nn.Module, images: Tensor, mask: Tensor | None = None, mask_token: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(class token (N, D), or what else the model pools; patch tokens (N, T, D)), both after the last norm.

    mask: (N, T), true where `mask_token` (D,) replaces the embedded patch, before positions are added.
    """
    assert isinstance(encoder, VisionTransformer | Eva)
    x = encoder.patch_embed(images)  # (N, T, D), or (N, rows, columns, D) with dynamic_img_size
    if mask is not None:
        assert mask_token is not None
        x = torch.where(mask.view(*x.shape[:-1], 1), mask_token.to(x.dtype), x)
    arguments: list[dict[str, Any]] = [{}] * len(encoder.blocks)
    if isinstance(encoder, Eva):  # queries and keys are turned by their positions
        x, rope = encoder._pos_embed(x)
        if rope is not None and getattr(encoder, "rope_mixed", False):  # another one for each block
            arguments = [{"rope": turn} for turn in rope]
        else:
            arguments = [{"rope": rope}] * len(encoder.blocks)
    else:
        x = encoder.patch_drop(add_positions(encoder, x))
    x = encoder.norm_pre(x)
    for block, argument in zip(encoder.blocks, arguments, strict=True):
        x = run_block(block, x, recompute=encoder.grad_checkpointing, **argument)
    x = encoder.norm(x)
    return encoder.forward_head(x), x[:, encoder.num_prefix_tokens :]


def run_block(block: nn.Module, x: Tensor, *, recompute: bool, **arguments: Any) -> Tensor:
    """block(x); with `recompute` only its input is kept, and the backward pass computes the rest again."""
    run: Callable[..., Tensor] = block
    if type(block) is Block and type(block.mlp) is Mlp and _is_plain_attention(block.attn):
        run = partial(_run_plain_block, block, lean=torch.is_grad_enabled() and not recompute)
    if torch.is_grad_enabled() and recompute:
        return checkpoint(run, x, use_reentrant=False, **arguments)
    return run(x, **arguments)


def _run_plain_block(block: Block, x: Tensor, *, lean: bool) -> Tensor:
    assert isinstance(block.attn, Attention) and isinstance(block.mlp, Mlp)
    x = x + block.drop_path1(block.ls1(_attend(block.attn, block.norm1(x))))
    y = _lean_mlp(block.norm2, block.mlp, x) if lean else block.mlp(block.norm2(x))
    return cast("Tensor", x + block.drop_path2(block.ls2(y)))


def _lean_mlp(norm: nn.Module, mlp: Mlp, x: Tensor) -> Tensor:
    """mlp(norm(x)) that recomputes the outputs of norm and activation, two fifths of its memory and quick to redo.

    A checkpoint stops as soon as its last layer's input is there, so no matrix is multiplied twice.
    """
    random = mlp.training and mlp.drop1.p > 0
    hidden = checkpoint(lambda x: mlp.fc1(norm(x)), x, use_reentrant=False, preserve_rng_state=False)
    out: Tensor = checkpoint(
        lambda x: mlp.drop2(mlp.fc2(mlp.norm(mlp.drop1(mlp.act(x))))),
        hidden,
        use_reentrant=False,
        preserve_rng_state=random,
    )
    return out
