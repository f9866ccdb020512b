"""How methods send views through an encoder and its heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchmix.nn.blocks import through
from patchmix.nn.class_token import class_tokens


def project(encoder: nn.Module, head: nn.Module, batches: Sequence[Tensor]) -> list[Tensor]:
    """head(encoder(x)) of each batch: one pass of the encoder for each image size, heads batch by batch.

    Batch norms in the head so see one view at a time, as if every batch had its own pass. It has where that saves
    memory at no loss: without gradients on the CPU, where a larger pass is no faster, and where activations are
    computed again, so that only one batch's are there at a time.
    """
    alone = not torch.is_grad_enabled() and not any(batch.is_cuda for batch in batches)
    if alone or (torch.is_grad_enabled() and getattr(encoder, "grad_checkpointing", False)):
        return [head(class_tokens(encoder, batch)) for batch in batches]
    features: list[Tensor] = []
    for start, stop in _runs([batch.shape[-2:] for batch in batches]):
        together = class_tokens(encoder, torch.cat(list(batches[start:stop])))
        features += torch.split(together, [len(batch) for batch in batches[start:stop]])
    return [head(f) for f in features]


def _runs(shapes: Sequence[torch.Size]) -> list[tuple[int, int]]:
    """Where neighbours have equal shapes: (start, stop) of each run."""
    if not shapes:
        return []
    edges = [i for i in range(len(shapes)) if i == 0 or shapes[i] != shapes[i - 1]]
    return list(zip(edges, [*edges[1:], len(shapes)], strict=True))


def all_tokens(
    encoder: nn.Module, images: Tensor, mask: Tensor | None = None, mask_token: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(class token (N, D), patch tokens (N, T, D)), both after the last norm.

    mask: (N, T), true where `mask_token` (D,) takes the place of the embedded patch, before positions are added.
    """
    assert isinstance(encoder, VisionTransformer)
    x = encoder.patch_embed(images)  # (N, T, D), or (N, rows, columns, D) where any image size may come
    if mask is not None:
        assert mask_token is not None
        x = torch.where(mask.view(*x.shape[:-1], 1), mask_token.to(x.dtype), x)
    x = encoder.norm_pre(encoder.patch_drop(encoder._pos_embed(x)))
    for block in encoder.blocks:
        x = through(block, x, recompute=encoder.grad_checkpointing)
    x = encoder.norm(x)
    return x[:, 0], x[:, encoder.num_prefix_tokens :]
