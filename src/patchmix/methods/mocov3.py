"""MoCo v3 (Chen, Xie, He: "An Empirical Study of Training Self-Supervised Vision Transformers", ICCV 2021).

Algorithm 1: two crops, each predicted from the other; the keys are the batch's own, by a momentum encoder.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchmix import distributed
from patchmix.losses import Contrasts, place
from patchmix.methods.method import Method
from patchmix.methods.options import MoCoV3Options
from patchmix.nn.heads import mlp_head
from patchmix.nn.momentum import MomentumCopy
from patchmix.nn.passes import project
from patchmix.schedules import Cosine


class MoCoV3(Method):
    """Defaults are the paper's for ViT (Section 3 and Section 4.2, "Stability")."""

    def __init__(self, encoder: VisionTransformer, options: MoCoV3Options = MoCoV3Options()) -> None:
        super().__init__()
        self.options = options
        self.encoder = encoder
        if options.frozen_patch_embed:
            encoder.patch_embed.requires_grad_(False)
        self.projector = mlp_head(3, encoder.num_features, options.head_hidden, options.head_out)
        self.predictor = mlp_head(2, options.head_out, options.head_hidden, options.head_out)
        self.momentum_copy = MomentumCopy(self._online())
        self.momentum = Cosine(options.momentum, 1.0)

    def forward(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """views: x1, x2 (N, C, H, W), then any number of local crops, which are queries for both keys."""
        x1, x2, *local_crops = views
        q1, q2, *q_local = [self.predictor(z) for z in project(self.encoder, self.projector, views)]
        with torch.no_grad():
            f, g = self.momentum_copy.network
            k1, k2 = (distributed.gather(z) for z in project(f, g, (x1, x2)))

        n = len(x1)
        own = place(torch.eye(n, device=x1.device), len(k1), distributed.rank() * n)
        terms = Contrasts(self.options.temperature)
        terms.add("contrast", 2 * self.options.temperature, [(q1, k2), (q2, k1)], own)  # ctr(q1, k2) + ctr(q2, k1)
        if local_crops:
            q, targets = torch.cat(q_local), own.repeat(len(local_crops), 1)
            terms.add("local", 2 * self.options.temperature, [(q, k1), (q, k2)], targets)
        return terms.total()

    def after_step(self, progress: float) -> None:
        self.scalars["momentum"] = self.momentum(progress)
        self.momentum_copy.update(self._online(), self.scalars["momentum"])

    def _online(self) -> nn.ModuleList:
        return nn.ModuleList([self.encoder, self.projector])
