"""PatchMix (Section 3.2, Algorithm 2): contrasts mix-to-origin, mix-to-mix and origin-to-origin.

N images per process, K keys over all processes, M images per mix. x1, x2 are the two views; h are predicted queries,
z projected keys; F is the encoder, G the projection head, H the prediction head, Ξ the momentum copy of Θ.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchmix import distributed
from patchmix.losses import Terms, smooth
from patchmix.methods.method import Method, MomentumCopy, among_all
from patchmix.methods.options import PatchMixOptions
from patchmix.mixing import Mix, Mixed, create_mix, overlap
from patchmix.nn import is_plain, mlp_head, patch_size_of, project, region_tokens
from patchmix.schedules import Cosine, Linear, stage


class PatchMixMethod(Method):
    def __init__(self, encoder: VisionTransformer, options: PatchMixOptions = PatchMixOptions()) -> None:
        super().__init__()
        _check(options, encoder)
        self.options = options
        self.encoder = encoder
        self.patch_size = patch_size_of(encoder)
        self.projector = mlp_head(3, encoder.num_features, options.head_hidden, options.head_out)
        self.predictor = mlp_head(2, options.head_out, options.head_hidden, options.head_out)
        self.momentum_copy: MomentumCopy | None = None
        if options.momentum_encoder:
            momentum = Cosine(options.momentum, 1.0, stages=options.momentum_stages)  # μ
            self.momentum_copy = MomentumCopy(encoder, self.projector, momentum=momentum)
        self.ramp = nn.Buffer(torch.ones(()), persistent=False)  # factor of the weights of mixed terms
        self.set_mix(0.0)

    def set_mix(self, progress: float) -> None:
        """How this part of the training mixes, and how much its mixed terms count."""
        options = self.options
        self.block = stage(options.mix_blocks, progress)
        self.mix = create_mix(
            options.mix,
            patch_size=self.patch_size * (self.block if options.mix == "patchmix" else 1),
            num_mix=options.num_mix_at(progress),
            generator=self.shared_generator if options.mix_across else self.generator,
        )
        self.ramp.fill_(Linear(0.0, 1.0, options.mixed_ramp)(progress))

    def draw(self, views: Sequence[Tensor]) -> tuple[list[Mixed]]:
        """x1, x2 and the local crops, mixed (Algorithm 2, lines 5 and 6); x1 also in the place of x2 if only mix-to-mix
        would need that."""
        mix, (x1, x2, *crops) = self.mix.for_one_step(), self.in_order(views)
        mix1 = self.mixed(mix, x1)
        needed = self.options.weights[2] or self.options.directions == "symmetric"
        return ([mix1, self.mixed(mix, x2) if needed else mix1, *(self.mixed(mix, crop) for crop in crops)],)

    def in_order(self, views: Sequence[Tensor]) -> Sequence[Tensor]:
        """x1, of which the mixed query is made, x2, and the local crops."""
        return [views[1], views[0], *views[2:]] if self.options.mixed_query == 2 else views

    def forward(self, views: Sequence[Tensor], drawn: Sequence[Mixed] = ()) -> dict[str, Tensor]:
        """views: two of (N, C, H, W), then any number of smaller local crops; drawn: of `draw`."""
        x1, x2, *crops = self.in_order(views)
        mix1, mix2, *mixed_crops = drawn or self.draw(views)[0]  # lines 5 and 6
        oto, mto, mtm = self.options.weights  # a batch that only terms of weight 0 need is not computed
        region, directions = self.options.region_weight, self.options.directions
        shared, symmetric = directions == "shared", directions == "symmetric"
        local = bool(crops) and bool(oto or mto)
        # Without a momentum encoder the keys of x2 are the projections of its queries: no pass of their own.
        reuse = self.momentum_copy is None and bool(oto) and self.options.plain_share == 1.0 and directions == "paper"
        z1, z2, z_mix1, z_mix2 = self.keys(  # line 9
            x1 if symmetric or ((oto or local) and not shared) else None,
            x2 if symmetric or local or ((mto or region) and not reuse) or (oto and shared) else None,
            mix1.images if mtm and symmetric else None,
            mix2.images if mtm else None,
        )
        contrasts = [(x1, z2, mix1, z2, mix2, z_mix2) if shared else (x2, z1, mix1, z2, mix2, z_mix2)]
        if symmetric:
            contrasts += [(x1, z2, mix2, z1, mix1, z_mix1)]

        terms = Terms(self.options.temperature)
        same = torch.eye(len(mix1.share), device=x1.device)
        y_oto = smooth(self.targets(same), self.options.label_smoothing)
        plain_rows = spread(self.options.plain_share, len(x1), x1.device)
        mixed_rows = spread(self.options.mixed_share, len(x1), x1.device)
        for x, z, mixed, z_origin, other, z_mix in contrasts:
            images = mixed.images[mixed_rows]
            batches = x[plain_rows] if oto else None, images if (mto or mtm) and not region else None
            projected = project(batches, self.encoder, self.projector)
            h, h_mix = (self.predictor(each) if len(each) else each for each in projected)  # line 8
            if reuse:
                z_origin = distributed.gather(projected[0].detach())
            if region:
                assert mixed.groups is not None
                h_mix, h_region = self.region_queries(images, mixed.groups)
                of_groups = [same.roll(m, dims=1) for m in range(len(mixed.groups))]  # group m of i is of u(i, m)
            if oto:  # line 10, Eq. 15
                terms.add("oto", oto, (h, z), target=y_oto[plain_rows])
            if mto:  # Eq. 13
                terms.add("mto", mto * self.ramp, (h_mix, z_origin), target=self.targets(mixed.share)[mixed_rows])
            if mtm:  # line 7, Eqs. 12 and 14
                y_mtm = overlap(mixed.share, other.share)
                y_mtm = y_mtm / y_mtm.sum(dim=1, keepdim=True) if self.options.normalize_mix_to_mix else y_mtm
                terms.add("mtm", mtm * self.ramp, (h_mix, z_mix), target=self.targets(y_mtm)[mixed_rows])
            if region:
                y_region = torch.cat([self.targets(y)[mixed_rows] for y in of_groups])
                terms.add("region", region * self.ramp, (h_region, z_origin), target=y_region)

        if local:
            y_mto = torch.cat([self.targets(crop.share) for crop in mixed_crops])
            mixed_images = torch.cat([crop.images for crop in mixed_crops])
            h, h_mix = self.queries(torch.cat(crops) if oto else None, mixed_images if mto else None)
            for z in [z2] if shared else [z1, z2]:
                if oto:
                    terms.add("local", 1.0, (h, z), target=y_oto.repeat(len(crops), 1))
                if mto:
                    terms.add("mixlocal", self.ramp, (h_mix, z), target=y_mto)
        return terms.total()  # Eq. 16

    def mixed(self, mix: Mix, x: Tensor) -> Mixed:
        """This process's mixed images, and the share: (N, N) within the process, (K, K) across all processes."""
        if not self.options.mix_across:
            return mix(x)
        mixed = mix(distributed.gather(x))
        return replace(mixed, images=own_rows(mixed.images))

    def targets(self, similarity: Tensor) -> Tensor:
        """Of this process's N queries among the K keys of all: similarity (N, N), or (K, K) across → (N, K)."""
        return own_rows(similarity) if self.options.mix_across else among_all(similarity)

    def queries(self, *batches: Tensor | None) -> list[Tensor]:
        """h = H(G(F_Θ(x))) of each batch."""
        return project(batches, self.encoder, self.projector, self.predictor)

    def region_queries(self, images: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """h of mixed images, (N, D), and of their M regions, group after group: (M·N, D). groups: (M, blocks)."""
        rows = images.shape[-2] // (self.patch_size * self.block)
        blocks, least = groups.view(len(groups), rows, -1), groups.shape[1] // len(groups) * self.block**2
        groups = blocks.repeat_interleave(self.block, 1).repeat_interleave(self.block, 2).flatten(1)  # (M, T)
        token, *regions = region_tokens(self.encoder, images, groups, least).unbind(dim=1)
        h, h_region = (self.predictor(self.projector(f)) for f in (token, torch.cat(regions)))
        return h, h_region

    @torch.no_grad()
    def keys(self, *batches: Tensor | None) -> list[Tensor]:
        """sg(z) = G(F_Ξ(x)) of each batch, of all processes; by Θ itself where there is no momentum encoder."""
        network = (self.encoder, self.projector) if self.momentum_copy is None else self.momentum_copy.network
        return [distributed.gather(z) if len(z) else z for z in project(batches, *network)]

    def before_step(self, progress: float) -> None:
        self.set_mix(progress)
        if self.options.momentum_update == "before_keys":
            super().after_step(progress)

    def after_step(self, progress: float) -> None:
        if self.options.momentum_update == "after_step":
            super().after_step(progress)  # line 11


def own_rows(x: Tensor) -> Tensor:
    """This process's part of the rows of all: (K, …) → (N, …)."""
    return x.chunk(distributed.world_size())[distributed.rank()]


def spread(share: float, n: int, device: torch.device) -> Tensor | slice:
    """Rows of a batch, evenly spread, so that any number of processes chooses the same images; two for batch norm."""
    count = max(2, round(share * n))
    return torch.arange(count, device=device) * n // count if count < n else slice(None)


def _check(options: PatchMixOptions, encoder: VisionTransformer) -> None:
    if not any([*options.weights, options.region_weight]):
        raise ValueError(f"weights are {options.weights}; at least one of the three must not be 0")
    patches = options.mix == "patchmix"
    if options.region_weight and not (patches and is_plain(encoder)):
        reason = "a ViT of plain blocks with a class token" if patches else "--mix patchmix, which mixes whole patches"
        raise ValueError(f"region_weight needs {reason}; add --region-weight 0")
