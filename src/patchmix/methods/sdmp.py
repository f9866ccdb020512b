"""SDMP (Ren et al.: "A Simple Data Mixing Prior for Improving Self-Supervised Learning", CVPR 2022), on MoCo v3.

λ_i is what mixed image i keeps of image i; its partner gives 1 − λ_i. Both views are mixed with the same λ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchmix import distributed
from patchmix.losses import Contrasts, place
from patchmix.methods.method import Method
from patchmix.methods.options import SDMPOptions
from patchmix.mixing import CutMix, Mixup, OneOf, ResizeMix, overlap
from patchmix.nn.heads import mlp_head
from patchmix.nn.momentum import MomentumCopy
from patchmix.nn.passes import project
from patchmix.schedules import Cosine


class SDMP(Method):
    """Defaults are those of the authors for ViT; "all" draws one of the three mixes for each step."""

    def __init__(self, encoder: VisionTransformer, options: SDMPOptions = SDMPOptions()) -> None:
        super().__init__()
        self.options = options
        self.encoder = encoder
        if options.frozen_patch_embed:
            encoder.patch_embed.requires_grad_(False)
        self.projector = mlp_head(3, encoder.num_features, options.head_hidden, options.head_out)
        self.predictor = mlp_head(2, options.head_out, options.head_hidden, options.head_out)
        self.momentum_copy = MomentumCopy(self._online())
        mixes: dict[str, Mixup | CutMix | ResizeMix] = {
            "resizemix": ResizeMix(generator=self.generator),
            "cutmix": CutMix(generator=self.generator),
            "mixup": Mixup(generator=self.generator),
        }
        self.mix = OneOf(list(mixes.values()) if options.mix == "all" else [mixes[options.mix]], self.generator)
        self.momentum = Cosine(options.momentum, 1.0)

    def forward(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """views: x1, x2 (N, C, H, W), whose roles are exchanged at random, then any number of local crops."""
        x1, x2, *local_crops = views
        if torch.rand((), generator=self.generator) > 0.5:
            x1, x2 = x2, x1
        mix = self.mix.for_one_step()
        given = mix.draw(len(x1))  # 1 − λ
        mix1, mix2 = mix(x1, given), mix(x2, given)

        q1, q_mix2, *q_local = self._queries(x1, mix2.images, *local_crops)
        k1, k2, k_mix1 = (distributed.gather(z) for z in self._keys(x1, x2, mix1.images))

        n, k, offset = len(x1), len(k1), distributed.rank() * len(x1)
        own = place(torch.eye(n, device=x1.device), k, offset)
        # 1 for the same mix and λ_c = min(λ_i, 1 − λ_j) + min(1 − λ_i, λ_j) for the partner's, over their sum.
        common = overlap(mix2.share, mix1.share)
        common = place(common / common.sum(dim=1, keepdim=True), k, offset)
        scale = 2 * self.options.temperature
        terms = Contrasts(self.options.temperature)
        terms.add("source", scale * self.options.weights[0], [(q1, k2)], own)
        terms.add("mix_to_source", scale * self.options.weights[1], [(q_mix2, k1)], place(mix2.share, k, offset))
        terms.add("mix_to_mix", scale * self.options.weights[2], [(q_mix2, k_mix1)], common)
        if local_crops:
            q = torch.cat(q_local)
            terms.add("local", scale, [(q, k1), (q, k2)], own.repeat(len(local_crops), 1))
        return terms.total()

    def _queries(self, *batches: Tensor) -> list[Tensor]:
        return [self.predictor(z) for z in project(self.encoder, self.projector, batches)]

    @torch.no_grad()
    def _keys(self, *batches: Tensor) -> list[Tensor]:
        return project(self.momentum_copy.network[0], self.momentum_copy.network[1], batches)

    def after_step(self, progress: float) -> None:
        self.scalars["momentum"] = self.momentum(progress)
        self.momentum_copy.update(self._online(), self.scalars["momentum"])

    def _online(self) -> nn.ModuleList:
        return nn.ModuleList([self.encoder, self.projector])
