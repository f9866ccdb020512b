"""PatchMix (Section 3.2, Algorithm 2): contrasts mix-to-origin, mix-to-mix and origin-to-origin.

N images per process, K keys over all processes, M images per mix. x1, x2 are the two views; h are predicted queries,
z projected keys; F is the encoder, G the projection head, H the prediction head, Ξ the momentum copy of Θ.
"""

from collections.abc import Sequence

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchmix import distributed
from patchmix.losses import Contrasts, pad_targets, smooth
from patchmix.methods.method import Method
from patchmix.methods.options import PatchMixOptions
from patchmix.mixing import Mix, create_mix, overlap
from patchmix.nn import MomentumCopy, mlp_head, patch_size_of, project
from patchmix.schedules import Cosine


class PatchMixMethod(Method):
    def __init__(self, encoder: VisionTransformer, options: PatchMixOptions = PatchMixOptions()) -> None:
        super().__init__()
        if not any(options.weights):
            raise ValueError(f"weights are {options.weights}; at least one of the three must not be 0")
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
        x_mix1, y_mto = self.mixed(mix, x1)  # Algorithm 2, line 5
        x_mix2, y_mto2 = self.mixed(mix, x2)  # line 6
        y_mtm = overlap(y_mto, y_mto2)  # line 7: ω of Eq. 12
        if self.options.normalize_mix_to_mix:
            y_mtm = y_mtm / y_mtm.sum(dim=1, keepdim=True)
        y_oto = smooth(self.targets(torch.eye(len(y_mto), device=x1.device)), self.options.label_smoothing)

        oto, mto, mtm = self.options.weights  # a batch that only terms of weight 0 need is not computed
        h2, h_mix1 = self.queries(x2 if oto else None, x_mix1 if mto or mtm else None)  # line 8
        z1, z2, z_mix2 = self.keys(  # line 9
            x1 if oto or crops else None, x2 if mto or crops else None, x_mix2 if mtm else None
        )

        terms = Contrasts(self.options.temperature)  # line 10
        if oto:
            terms.add("oto", oto, (h2, z1), target=y_oto)  # Eq. 15
        if mto:
            terms.add("mto", mto, (h_mix1, z2), target=self.targets(y_mto))  # Eq. 13
        if mtm:
            terms.add("mtm", mtm, (h_mix1, z_mix2), target=self.targets(y_mtm))  # Eq. 14
        if crops:
            mixed = [self.mixed(mix, crop) for crop in crops]
            y_mix = torch.cat([self.targets(share) for _, share in mixed])
            h, h_mix = self.queries(torch.cat(crops), torch.cat([images for images, _ in mixed]))
            terms.add("local", 1.0, (h, z1), (h, z2), target=y_oto.repeat(len(crops), 1))
            terms.add("mixlocal", 1.0, (h_mix, z1), (h_mix, z2), target=y_mix)
        return terms.total()  # Eq. 16

    def mixed(self, mix: Mix, x: Tensor) -> tuple[Tensor, Tensor]:
        """This process's mixed images, and the share: (N, N) within the process, (K, K) across all processes."""
        if not self.options.mix_across:
            mixed = mix(x)
            return mixed.images, mixed.share
        mixed = mix(distributed.gather(x))
        return mixed.images.chunk(distributed.world_size())[distributed.rank()], mixed.share

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
