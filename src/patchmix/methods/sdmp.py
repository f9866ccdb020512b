"""SDMP (Ren et al.: "A Simple Data Mixing Prior for Improving Self-Supervised Learning", CVPR 2022), on MoCo v3.

λ_i is what mixed image i keeps of image i; the rest is its partner's. Both views are mixed with the same λ.
"""

from collections.abc import Sequence

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchmix import distributed
from patchmix.losses import Terms
from patchmix.methods.method import Method, MomentumCopy, among_all
from patchmix.methods.options import SDMPOptions
from patchmix.mixing import PAIR_MIXES, Mixed, OneOf, ResizeMix, overlap
from patchmix.nn import mlp_head, project
from patchmix.schedules import Cosine


class SDMP(Method):
    def __init__(self, encoder: VisionTransformer, options: SDMPOptions = SDMPOptions()) -> None:
        super().__init__()
        self.options = options
        self.encoder = encoder
        if options.frozen_patch_embed:
            encoder.patch_embed.requires_grad_(False)
        self.projector = mlp_head(3, encoder.num_features, options.head_hidden, options.head_out)
        self.predictor = mlp_head(2, options.head_out, options.head_hidden, options.head_out)
        self.momentum_copy = MomentumCopy(encoder, self.projector, momentum=Cosine(options.momentum, 1.0))
        names = list(PAIR_MIXES) if options.mix == "all" else [options.mix]
        mixes = {name: create(generator=self.generator) for name, create in PAIR_MIXES.items()}
        mixes["resizemix"] = ResizeMix(area=options.pasted_area, generator=self.generator)
        self.mix = OneOf([mixes[name] for name in names], self.generator)

    def draw(self, views: Sequence[Tensor]) -> tuple[tuple[Tensor, Tensor, Mixed, Mixed]]:
        """x1, x2, whose roles are exchanged at random, and their mixes."""
        x1, x2 = views[:2]
        if torch.rand((), generator=self.generator) > 0.5:
            x1, x2 = x2, x1
        mix = self.mix.for_one_step()
        fraction = mix.draw(len(x1))  # 1 − λ
        return ((x1, x2, mix(x1, fraction), mix(x2, fraction)),)

    def forward(
        self, views: Sequence[Tensor], drawn: tuple[Tensor, Tensor, Mixed, Mixed] | None = None
    ) -> dict[str, Tensor]:
        """views: two of (N, C, H, W), then any number of local crops; drawn: of `draw`."""
        (x1, x2, mix1, mix2), local_crops = drawn or self.draw(views)[0], views[2:]
        queries = [x1, mix2.images, *local_crops]
        q1, q_mix2, *q_local = project(queries, self.encoder, self.projector, self.predictor)
        k1, k2, k_mix1 = (distributed.gather(k) for k in self.momentum_copy.project(x1, x2, mix1.images))

        same_image = among_all(torch.eye(len(x1), device=x1.device))
        # 1 for the same mix and λ_c = min(λ_i, 1 − λ_j) + min(1 − λ_i, λ_j) for the partner's, over their sum.
        common = overlap(mix2.share, mix1.share)
        common = common / common.sum(dim=1, keepdim=True)
        weights = self.options.weights
        terms, scale = Terms(self.options.temperature), 2 * self.options.temperature
        terms.add("source", scale * weights[0], (q1, k2), target=same_image)
        terms.add("mix_to_source", scale * weights[1], (q_mix2, k1), target=among_all(mix2.share))
        terms.add("mix_to_mix", scale * weights[2], (q_mix2, k_mix1), target=among_all(common))
        if local_crops:
            q = torch.cat(q_local)
            terms.add("local", scale, (q, k1), (q, k2), target=same_image.repeat(len(local_crops), 1))
        return terms.total()
