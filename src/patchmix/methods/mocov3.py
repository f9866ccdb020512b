"""MoCo v3 (Chen, Xie, He: "An Empirical Study of Training Self-Supervised Vision Transformers", ICCV 2021).

Algorithm 1: each of two crops predicts the other; the keys are those of the batch, by a momentum encoder.
"""

from collections.abc import Sequence

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchmix import distributed
from patchmix.losses import Terms
from patchmix.methods.method import Method, MomentumCopy, among_all
from patchmix.methods.options import MoCoV3Options
from patchmix.nn import mlp_head, project
from patchmix.schedules import Cosine


class MoCoV3(Method):
    def __init__(self, encoder: VisionTransformer, options: MoCoV3Options = MoCoV3Options()) -> None:
        super().__init__()
        self.options = options
        self.encoder = encoder
        if options.frozen_patch_embed:
            encoder.patch_embed.requires_grad_(False)
        self.projector = mlp_head(3, encoder.num_features, options.head_hidden, options.head_out)
        self.predictor = mlp_head(2, options.head_out, options.head_hidden, options.head_out)
        self.momentum_copy = MomentumCopy(encoder, self.projector, momentum=Cosine(options.momentum, 1.0))

    def forward(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """views: x1, x2 (N, C, H, W), then any number of local crops, which are queries for both keys."""
        x1, x2, *local_crops = views
        q1, q2, *q_local = project(views, self.encoder, self.projector, self.predictor)
        k1, k2 = (distributed.gather(k) for k in self.momentum_copy.project(x1, x2))  # (K, D), of all processes

        same_image = among_all(torch.eye(len(x1), device=x1.device))  # (N, K)
        terms, scale = Terms(self.options.temperature), 2 * self.options.temperature
        terms.add("contrast", scale, (q1, k2), (q2, k1), target=same_image)  # ctr(q1, k2) + ctr(q2, k1)
        if local_crops:
            q = torch.cat(q_local)
            terms.add("local", scale, (q, k1), (q, k2), target=same_image.repeat(len(local_crops), 1))
        return terms.total()
