"""The class token of a ViT without the work that only other tokens would need."""

from __future__ import annotations

import torch.nn.functional as F
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from patchmix.nn.blocks import through


def class_tokens(encoder: nn.Module, images: Tensor) -> Tensor:
    """encoder(images), (N, D): the last block works for the class token only.

    Its queries, projection and MLP concern one token; keys and values still come from all. The result is the same up
    to rounding, for ViTs of plain blocks that pool by class token; any other encoder is called as it is.
    """
    if not _is_plain(encoder):
        features: Tensor = encoder(images)
        return features
    assert isinstance(encoder, VisionTransformer)
    x = encoder.norm_pre(encoder.patch_drop(encoder._pos_embed(encoder.patch_embed(images))))  # (N, T, D)
    for block in encoder.blocks[:-1]:
        x = through(block, x, recompute=encoder.grad_checkpointing)
    x = _last_block(encoder.blocks[-1], x)  # (N, 1, D)
    pooled: Tensor = encoder.forward_head(encoder.norm(x))
    return pooled


def _is_plain(encoder: nn.Module) -> bool:
    if not isinstance(encoder, VisionTransformer) or encoder.global_pool != "token" or encoder.attn_pool is not None:
        return False
    last = encoder.blocks[-1]
    return type(last) is Block and type(last.attn) is Attention and last.attn.gate is None


def _last_block(block: nn.Module, x: Tensor) -> Tensor:
    """The first token of block(x): (N, T, D) → (N, 1, D)."""
    assert isinstance(block, Block) and isinstance(block.attn, Attention)
    token = x[:, :1]
    token = token + block.drop_path1(block.ls1(_attend(block.attn, block.norm1(x))))
    out: Tensor = token + block.drop_path2(block.ls2(block.mlp(block.norm2(token))))
    return out


def _attend(attn: Attention, x: Tensor) -> Tensor:
    """The first token of attn(x)."""
    n, t, _ = x.shape
    heads, width = attn.num_heads, attn.head_dim
    bias_q, bias_kv = (None, None) if attn.qkv.bias is None else attn.qkv.bias.tensor_split([attn.attn_dim])
    weight_q, weight_kv = attn.qkv.weight.tensor_split([attn.attn_dim])
    q = F.linear(x[:, :1], weight_q, bias_q).view(n, 1, heads, width).transpose(1, 2)
    k, v = F.linear(x, weight_kv, bias_kv).view(n, t, 2, heads, width).permute(2, 0, 3, 1, 4).unbind(0)
    dropout = attn.attn_drop.p if attn.training else 0.0
    y = F.scaled_dot_product_attention(attn.q_norm(q), attn.k_norm(k), v, dropout_p=dropout)
    out: Tensor = attn.proj_drop(attn.proj(attn.norm(y.transpose(1, 2).reshape(n, 1, attn.attn_dim))))
    return out
