"""PatchMix (Section 3.2, Algorithm 2): contrasts mix-to-origin, mix-to-mix and origin-to-origin.

N images per process, K keys over all processes, M images per mix. x1, x2 are the two views; h are predicted queries,
z projected keys; F is the encoder, G the projection head, H the prediction head, Ξ the momentum copy of Θ.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchmix import distributed
from patchmix.losses import Contrasts, pad_targets, smooth
from patchmix.methods.method import Method
from patchmix.methods.options import PatchMixOptions
from patchmix.mixing import Mix, Mixed, create_mix, overlap
from patchmix.nn import MomentumCopy, all_tokens, mlp_head, patch_size_of, project
from patchmix.schedules import Cosine


class PatchMixMethod(Method):
    def __init__(self, encoder: VisionTransformer, options: PatchMixOptions = PatchMixOptions()) -> None:
        super().__init__()
        if not any([*options.weights, options.region_weight]):
            raise ValueError(f"weights are {options.weights}; at least one of the three must not be 0")
        if options.region_weight and options.mix != "patchmix":
            raise ValueError(
                f"region_weight needs --mix patchmix; the regions of {options.mix!r} are not whole patches"
            )
        self.options = options
        self.encoder = encoder
        self.projector = mlp_head(3, encoder.num_features, options.head_hidden, options.head_out)
        self.predictor = mlp_head(2, options.head_out, options.head_hidden, options.head_out)
        self.momentum_copy: MomentumCopy | None = None
        if options.momentum_encoder:
            momentum = Cosine(options.momentum, 1.0, stages=options.momentum_stages)  # μ
            self.momentum_copy = MomentumCopy(encoder, self.projector, momentum=momentum)
        generator = self.shared_generator if options.mix_across else self.generator
        self.mix = create_mix(
            options.mix, patch_size=patch_size_of(encoder), num_mix=options.num_mix, generator=generator
        )

    def forward(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """views: x1, x2 (N, C, H, W), then any number of smaller local crops."""
        x1, x2, *crops = views
        if self.options.mixed_query == 2:
            x1, x2 = x2, x1
        mix = self.mix.for_one_step()
        mix1, mix2 = self.mixed(mix, x1), self.mixed(mix, x2)  # Algorithm 2, lines 5 and 6
        y_mto, y_mtm = mix1.share, overlap(mix1.share, mix2.share)  # line 7: ω of Eq. 12
        if self.options.normalize_mix_to_mix:
            y_mtm = y_mtm / y_mtm.sum(dim=1, keepdim=True)
        same = torch.eye(len(y_mto), device=x1.device)
        y_oto = smooth(self.targets(same), self.options.label_smoothing)

        oto, mto, mtm = self.options.weights  # a batch that only terms of weight 0 need is not computed
        region = self.options.region_weight
        h2, h_mix1 = self.queries(x2 if oto else None, mix1.images if (mto or mtm) and not region else None)  # line 8
        z1, z2, z_mix2 = self.keys(  # line 9
            x1 if oto or crops else None, x2 if mto or region or crops else None, mix2.images if mtm else None
        )

        if region:
            h_mix1, h_region = self.region_queries(mix1)

        terms = Contrasts(self.options.temperature)  # line 10
        if oto:
            terms.add("oto", oto, (h2, z1), target=y_oto)  # Eq. 15
        if mto:
            terms.add("mto", mto, (h_mix1, z2), target=self.targets(y_mto))  # Eq. 13
        if mtm:
            terms.add("mtm", mtm, (h_mix1, z_mix2), target=self.targets(y_mtm))  # Eq. 14
        if region:
            y_region = [self.targets(same.roll(m, dims=1)) for m in range(len(h_region) // len(x1))]  # original u(i, m)
            terms.add("region", region, (h_region, z2), target=torch.cat(y_region))
        if crops:
            mixed = [self.mixed(mix, crop) for crop in crops]
            y_mix = torch.cat([self.targets(crop.share) for crop in mixed])
            h, h_mix = self.queries(torch.cat(crops), torch.cat([crop.images for crop in mixed]))
            terms.add("local", 1.0, (h, z1), (h, z2), target=y_oto.repeat(len(crops), 1))
            terms.add("mixlocal", 1.0, (h_mix, z1), (h_mix, z2), target=y_mix)
        return terms.total()  # Eq. 16

    def mixed(self, mix: Mix, x: Tensor) -> Mixed:
        """This process's mixed images, and the share: (N, N) within the process, (K, K) across all processes."""
        if not self.options.mix_across:
            return mix(x)
        mixed = mix(distributed.gather(x))
        return replace(mixed, images=mixed.images.chunk(distributed.world_size())[distributed.rank()])

    def targets(self, similarity: Tensor) -> Tensor:
        """Of this process's N queries among the K keys of all: similarity (N, N), or (K, K) across → (N, K)."""
        rank, world_size = distributed.rank(), distributed.world_size()
        if self.options.mix_across:
            return similarity.chunk(world_size)[rank]
        n = len(similarity)
        return pad_targets(similarity, n * world_size, rank * n)

    def queries(self, *batches: Tensor | None) -> list[Tensor]:
        """h = H(G(F_Θ(x))) of each batch."""
        return project(batches, self.encoder, self.projector, self.predictor)

    def region_queries(self, mixed: Mixed) -> tuple[Tensor, Tensor]:
        """h of the mixed images, (N, D), and of the pooled tokens of their M regions, group after group: (M·N, D)."""
        assert mixed.groups is not None
        token, patches = all_tokens(self.encoder, mixed.images)
        share = mixed.groups / mixed.groups.sum(dim=1, keepdim=True)  # of each patch in its group, (M, T)
        regions = torch.einsum("mt,ntd->mnd", share.to(patches.dtype), patches)
        h, h_region = (self.predictor(self.projector(f)) for f in (token, regions.flatten(0, 1)))
        return h, h_region

    @torch.no_grad()
    def keys(self, *batches: Tensor | None) -> list[Tensor]:
        """sg(z) = G(F_Ξ(x)) of each batch, of all processes; by Θ itself where there is no momentum encoder."""
        if self.momentum_copy is None:
            keys = project(batches, self.encoder, self.projector)
        else:
            keys = self.momentum_copy.project(*batches)
        return [distributed.gather(z) if len(z) else z for z in keys]

    def before_step(self, progress: float) -> None:
        if self.options.momentum_update == "before_keys":
            super().after_step(progress)

    def after_step(self, progress: float) -> None:
        if self.options.momentum_update == "after_step":
            super().after_step(progress)  # line 11
