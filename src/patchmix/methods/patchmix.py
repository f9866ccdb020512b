"""PatchMix (Section 3.2, Algorithm 2): contrasts mix-to-origin, mix-to-mix and origin-to-origin.

N images a process, K keys over all processes, M images a mix. x1, x2 are the two views; h are predicted queries,
z are projected keys; F is the encoder, G the projection head, H the prediction head, Ξ the momentum copy of G∘F.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchmix import distributed
from patchmix.losses import Contrasts, place, smooth
from patchmix.methods.method import Method
from patchmix.methods.options import PatchMixOptions
from patchmix.mixing import Mix, Mixed, create_mix, overlap
from patchmix.nn.heads import mlp_head
from patchmix.nn.momentum import MomentumCopy
from patchmix.nn.passes import project
from patchmix.nn.vit import patch_size_of
from patchmix.schedules import Cosine


class PatchMixMethod(Method):
    """Defaults are the paper's; the arguments are the named switches of docs/fidelity.md."""

    def __init__(self, encoder: VisionTransformer, options: PatchMixOptions = PatchMixOptions()) -> None:
        super().__init__()
        self.options = options
        self.encoder = encoder
        self.projector = mlp_head(3, encoder.num_features, options.head_hidden, options.head_out)
        self.predictor = mlp_head(2, options.head_out, options.head_hidden, options.head_out)
        self.momentum_copy = MomentumCopy(self._online()) if options.momentum_encoder else None
        generator = self.shared_generator if options.mix_across else self.generator
        self.mix = create_mix(
            options.mix, patch_size=patch_size_of(encoder), num_mix=options.num_mix, generator=generator
        )

    def forward(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """views: x1, x2 (N, C, H, W), then any number of smaller local crops."""
        x1, x2, *local_crops = views
        if self.options.mixed_query == 2:
            x1, x2 = x2, x1
        mix = self.mix.for_one_step()
        mix1, mix2 = self.mixed(mix, x1), self.mixed(mix, x2)  # Algorithm 2, lines 5-6

        n, k = len(x1), len(x1) * distributed.world_size()
        offset = distributed.rank() * n
        similarity = overlap(mix1.share, mix2.share)  # ω of Eq. 12
        if self.options.normalize_mix_to_mix:
            similarity = similarity / similarity.sum(dim=1, keepdim=True)
        origin = smooth(place(torch.eye(n, device=x1.device), k, offset), self.options.label_smoothing)
        contrasts = [  # weight, query, key, target
            ("oto", self.options.weights[0], "2", "1", origin),  # Eq. 15
            ("mto", self.options.weights[1], "mix1", "2", self.own_rows(mix1.share, n)),  # Eq. 13
            ("mtm", self.options.weights[2], "mix1", "mix2", self.own_rows(similarity, n)),  # Eq. 14
        ]
        contrasts = [each for each in contrasts if each[1] != 0]  # a term that is off costs no pass

        images = {"1": x1, "2": x2, "mix1": mix1.images, "mix2": mix2.images}
        asked = sorted({query for _, _, query, _, _ in contrasts})
        known = sorted({key for _, _, _, key, _ in contrasts} | ({"1", "2"} if local_crops else set()))
        h = dict(zip(asked, self.queries(*(images[name] for name in asked)), strict=True))  # line 8
        keys = self.keys(*(images[name] for name in known))  # line 9
        z = {name: distributed.gather(key) for name, key in zip(known, keys, strict=True)}

        terms = Contrasts(self.options.temperature)
        for name, weight, query, key, target in contrasts:
            terms.add(name, weight, [(h[query], z[key])], target)
        if local_crops:
            mixed = [self.mixed(mix, crop) for crop in local_crops]
            share = torch.cat([self.own_rows(crop.share, n) for crop in mixed])
            h_local, h_mix = self.queries(torch.cat(local_crops), torch.cat([crop.images for crop in mixed]))
            terms.add("local", 1.0, [(h_local, z["1"]), (h_local, z["2"])], origin.repeat(len(local_crops), 1))
            terms.add("mixlocal", 1.0, [(h_mix, z["1"]), (h_mix, z["2"])], share)
        return terms.total()  # Eq. 16

    def mixed(self, mix: Mix, x: Tensor) -> Mixed:
        """A process's own images mixed, share (N, N); or across processes its part of the whole mix, share (K, K)."""
        if not self.options.mix_across:
            return mix(x)
        whole, start = mix(distributed.gather(x)), distributed.rank() * len(x)
        return Mixed(whole.images[start : start + len(x)], whole.share)

    def own_rows(self, target: Tensor, n: int) -> Tensor:
        """What a process's N queries should be similar to among the keys of all: (N, N) or (K, K) → (N, K)."""
        start = distributed.rank() * n
        if self.options.mix_across:
            return target[start : start + n]
        return place(target, n * distributed.world_size(), start)

    def queries(self, *batches: Tensor) -> list[Tensor]:
        """H(G(F(x))) of each batch: one pass of the encoder, heads batch by batch for their batch norms."""
        return [self.predictor(z) for z in project(self.encoder, self.projector, batches)]

    @torch.no_grad()
    def keys(self, *batches: Tensor) -> list[Tensor]:
        """sg(G(F(x))) of each batch by the momentum copy, or by the base encoder where there is none."""
        if self.momentum_copy is None:
            return project(self.encoder, self.projector, batches)
        return project(self.momentum_copy.network[0], self.momentum_copy.network[1], batches)

    def before_step(self, progress: float) -> None:
        if self.options.momentum_update == "before_keys":
            self._follow(progress)

    def after_step(self, progress: float) -> None:
        if self.options.momentum_update == "after_step":
            self._follow(progress)

    def momentum_at(self, progress: float) -> float:
        """μ: cosine from its start to 1."""
        if self.options.momentum_stages:
            progress = math.floor(progress * self.options.momentum_stages + 1e-9) / self.options.momentum_stages
        return Cosine(self.options.momentum, 1.0)(progress)

    def _follow(self, progress: float) -> None:
        if self.momentum_copy is not None:
            self.scalars["momentum"] = self.momentum_at(progress)
            self.momentum_copy.update(self._online(), self.scalars["momentum"])

    def _online(self) -> nn.ModuleList:
        return nn.ModuleList([self.encoder, self.projector])
