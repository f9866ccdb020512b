"""The encoder: a timm VisionTransformer or Eva (rotary positions), so that everything made for timm works on it."""

import difflib
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import timm
import torch
import torch.nn.functional as F
from timm.layers.patch_embed import PatchEmbed
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed
from timm.models.eva import Eva
from timm.models.vision_transformer import Attention, Block, VisionTransformer, init_weights_vit_moco  # type: ignore[attr-defined]
from torch import Tensor, nn

from patchmix.nn.heads import BatchNorm
from patchmix.nn.tokens import TokenDropout

_NAME = re.compile(r"vit_(tiny|small|base)_patch(\d+)_(\d+)")


def create_encoder(
    name: str,
    *,
    image_size: int | None = None,
    patch_size: int | None = None,
    in_chans: int = 3,
    dim: int | None = None,
    depth: int | None = None,
    heads: int | None = None,
    stem: str = "patch",
    drop_path: float = 0.0,
    any_image_size: bool = False,
) -> VisionTransformer:
    """A ViT without classifier: images (N, in_chans, H, W) → features (N, dim), the class token after the last norm.

    `name` is `vit_{tiny,small,base}_patchP_S` for any patch size P and image size S (Table "backbone" has patch 2 at
    32 px and patch 16 at 224 px), or any timm ViT. The other arguments override the name. `stem` is "patch", one
    projection per patch, or "conv", a `ConvStem`. With `any_image_size` the position embedding is interpolated to the
    size of the images.
    """
    given = {"img_size": image_size, "patch_size": patch_size, "embed_dim": dim, "depth": depth, "num_heads": heads}
    options: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    timm_name = name
    if match := _NAME.fullmatch(name):
        timm_name = f"vit_{match[1]}_patch16_224"
        options = {"img_size": int(match[3]), "patch_size": int(match[2])} | options
    elif name.split(".")[0] not in timm.list_models():
        near = difflib.get_close_matches(name, timm.list_models("vit_*"), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"model {name!r} is neither vit_{{tiny,small,base}}_patchP_S nor a timm model{hint}")
    for key, value in options.items():
        if value < 1:
            raise ValueError(f"model {name!r}: {key} is {value}; it must be at least 1")
    pixels, patch = options.get("img_size"), options.get("patch_size")
    if pixels and patch and pixels % patch:
        raise ValueError(f"model {name!r}: image size {pixels} is not a multiple of patch size {patch}")
    if any_image_size:
        options["dynamic_img_size"] = True
    try:
        encoder = timm.create_model(
            timm_name, pretrained=False, num_classes=0, in_chans=in_chans, drop_path_rate=drop_path, **options
        )
    except AssertionError as error:  # heads that do not divide the width
        sizes = ", ".join(f"{key} {value}" for key, value in options.items())
        raise ValueError(f"model {name!r} with {sizes}: {error}; change --dim or --heads") from error
    if isinstance(encoder, Eva):
        if stem != "patch":
            raise ValueError(f"model {name!r} has rotary positions, which need --stem patch")
        return cast(VisionTransformer, encoder)  # by its attributes it is one
    if not isinstance(encoder, VisionTransformer):
        raise ValueError(
            f"model {name!r} is a {type(encoder).__name__}; PatchMix needs a ViT whose tokens are image patches, "
            "e.g. vit_small_patch16_224"
        )
    if not isinstance(encoder.patch_embed, PatchEmbed):
        raise ValueError(
            f"model {name!r} embeds patches by a {type(encoder.patch_embed).__name__}, which reaches beyond them; use "
            "one without, e.g. vit_small_patch16_224"
        )
    encoder.patch_drop = TokenDropout(encoder.num_prefix_tokens)  # type: ignore[assignment]
    if stem == "conv":
        encoder.patch_embed.proj = ConvStem(in_chans, encoder.embed_dim, patch_size_of(encoder))  # type: ignore[assignment]
    return encoder


class ConvStem(nn.Sequential):
    """3 × 3 convolutions of stride 2 with batch norm and ReLU, each of twice the width, then 1 × 1, in the place of
    `patch_embed.proj` (Xiao et al. 2021, "Early Convolutions Help Transformers See Better").

    (N, in_channels, H, W) → (N, dim, H / patch, W / patch). Tokens see a few pixels beyond their patch.
    """

    def __init__(self, in_channels: int, dim: int, patch_size: int) -> None:
        halvings = patch_size.bit_length() - 1
        if patch_size != 2**halvings or halvings == 0 or dim % 2 ** (halvings - 1):
            raise ValueError(
                f"patch size {patch_size} and width {dim}: a convolutional stem halves the image and doubles the width "
                "in each layer, so the patch must be 2, 4, 8, … and the width fit it; use --stem patch"
            )
        widths = [in_channels, *(dim >> (halvings - 1 - i) for i in range(halvings))]
        layers: list[nn.Module] = []
        for narrow, wide in pairwise(widths):
            layers += [nn.Conv2d(narrow, wide, 3, stride=2, padding=1, bias=False), BatchNorm(wide), nn.ReLU()]
        super().__init__(*layers, nn.Conv2d(dim, dim, 1))
        self.in_channels = in_channels  # as a patch projection has it

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)  # faster on CPUs and GPUs
        return cast("Tensor", super().forward(x))  # type: ignore[no-untyped-call]


@torch.no_grad()
def initialize_as_mocov3(encoder: VisionTransformer) -> None:
    """Xavier-uniform weights with q, k and v as three matrices, zero biases, class token N(0, 1e-6)."""
    for name, module in encoder.named_modules():
        if isinstance(module, nn.Linear):
            init_weights_vit_moco(module, name)
    projection = encoder.patch_embed.proj
    if isinstance(projection, nn.Conv2d):
        nn.init.xavier_uniform_(projection.weight.view(encoder.embed_dim, -1))  # a linear map of flattened patches
        if projection.bias is not None:
            nn.init.zeros_(projection.bias)
    if encoder.cls_token is not None:
        nn.init.normal_(encoder.cls_token, std=1e-6)


@torch.no_grad()
def initialize_attention_as_mimetic(encoder: VisionTransformer) -> None:
    """Attention that starts like a trained one (Trockman and Kolter, "Mimetic Initialization of Self-Attention
    Layers", 2023): in each head W_q·W_kᵀ ≈ 0.7·Z + 0.7·I, in each block W_v·W_proj ≈ 0.4·Z − 0.4·I, Z ~ N(0, 1/D).
    """
    d = encoder.embed_dim
    for block in encoder.blocks:
        if not isinstance(block, Block) or not isinstance(block.attn, Attention):
            raise ValueError(f"--initialization mimetic is for plain attention, not for a {type(block).__name__}")
        q, k, v = block.attn.qkv.weight.chunk(3)  # (D, D) each, of column vectors: q = W_qᵀ in the paper
        for q_head, k_head in zip(q.chunk(block.attn.num_heads), k.chunk(block.attn.num_heads), strict=True):
            left, right = _factors(0.7 * torch.randn(d, d) / d**0.5 + 0.7 * torch.eye(d), len(q_head))
            q_head.copy_(left.T)
            k_head.copy_(right)
        left, right = _factors(0.4 * torch.randn(d, d) / d**0.5 - 0.4 * torch.eye(d), d)
        v.copy_(left.T)
        block.attn.proj.weight.copy_(right.T)


def _factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(D, rank) and (rank, D) whose product is the matrix, as well as this rank allows."""
    u, s, vt = torch.linalg.svd(matrix)
    root = s[:rank].sqrt()
    return u[:, :rank] * root, root.unsqueeze(1) * vt[:rank]


@torch.no_grad()
def set_sincos_positions(encoder: VisionTransformer, *, fixed: bool) -> None:
    """2-d sine-cosine positions, zero for the class token (MoCo v3); `fixed` ones are not trained."""
    if encoder.pos_embed is None:
        raise ValueError("the model has no position embedding but rotary positions; use --positions learned")
    if encoder.embed_dim % 4:
        raise ValueError(f"sine-cosine positions need a width that is a multiple of 4, not {encoder.embed_dim}")
    table = build_sincos2d_pos_embed(list(encoder.patch_embed.grid_size), encoder.embed_dim, interleave_sin_cos=True)
    prefix = encoder.pos_embed.shape[1] - len(table)  # class and register tokens, where they have positions
    encoder.pos_embed.copy_(F.pad(table, (0, 0, prefix, 0)))
    encoder.pos_embed.requires_grad_(not fixed)


def freeze_blocks(encoder: VisionTransformer, count: int) -> None:
    """Freezes everything up to block number `count`: patches, positions, class and register tokens, blocks."""
    if count > len(encoder.blocks):
        raise ValueError(f"freeze_blocks is {count}; the model has {len(encoder.blocks)} blocks")
    later = (*encoder.blocks[count:], encoder.norm, encoder.fc_norm, encoder.attn_pool or nn.Identity())
    above = {id(p) for module in later for p in module.parameters()}
    for parameter in encoder.parameters():
        parameter.requires_grad_(parameter.requires_grad and id(parameter) in above)


def patch_size_of(encoder: VisionTransformer) -> int:
    """The side of a square patch."""
    height, width = encoder.patch_embed.patch_size
    if height != width:
        raise ValueError(f"patches are {height} × {width} px; PatchMix mixes square patches")
    return int(height)


def check_blocks(encoder: VisionTransformer, blocks: Sequence[int]) -> list[int]:
    """Numbers of blocks, each once and increasing, counted from 0; negative ones are counted from the end."""
    depth = len(encoder.blocks)
    wrong = [block for block in blocks if not -depth <= block < depth]
    if wrong or not blocks:
        raise ValueError(f"block is {wrong[0] if wrong else 'missing'}; it must lie between {-depth} and {depth - 1}")
    return sorted({block % depth for block in blocks})


def patch_tokens(encoder: VisionTransformer, images: Tensor, blocks: Sequence[int]) -> Tensor:
    """Patch tokens after some blocks, each after the encoder's last norm, concatenated: (N, h, w, D · blocks)."""
    options: dict[str, Any] = {"norm": True, "output_fmt": "NCHW", "intermediates_only": True}
    maps: Any = encoder.forward_intermediates(images, indices=check_blocks(encoder, blocks), **options)
    return torch.cat(maps, dim=1).permute(0, 2, 3, 1)
