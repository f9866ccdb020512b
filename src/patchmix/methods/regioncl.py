"""RegionCL (Xu et al.: "Exploring Contrastive Region Pairs for Self-Supervised Representation Learning", ECCV 2022).

Images i and N − 1 − i of view 1 exchange a region. The pasted region's feature must find the image it comes from,
the canvas around it its own image, among the keys of view 2; each has the other of the same picture as a negative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchmix import distributed
from patchmix.losses import Contrasts, place
from patchmix.methods.method import Method
from patchmix.methods.options import RegionCLOptions
from patchmix.mixing import Region, RegionSwap, partners
from patchmix.nn.heads import mlp_head
from patchmix.nn.momentum import MomentumCopy
from patchmix.nn.passes import all_tokens, project
from patchmix.nn.vit import patch_size_of
from patchmix.schedules import Cosine


class RegionCL(Method):
    """Region sizes and weights are the paper's, heads, keys and momentum MoCo v3's (the paper has a ResNet's)."""

    def __init__(self, encoder: VisionTransformer, options: RegionCLOptions = RegionCLOptions()) -> None:
        super().__init__()
        self.options = options
        self.encoder = encoder
        self.projector = mlp_head(3, encoder.num_features, options.head_hidden, options.head_out)
        self.predictor = mlp_head(2, options.head_out, options.head_hidden, options.head_out)
        self.momentum_copy = MomentumCopy(self._online())
        self.swap = RegionSwap(patch_size_of(encoder), options.region_sides, self.generator)
        self.momentum = Cosine(options.momentum, 1.0)

    def forward(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """views: x1, x2 (N, C, H, W), then any number of local crops, which are queries for the key."""
        x1, x2, *local_crops = views
        region = self.swap.draw(x1)
        swapped = self.swap(x1, region).images
        q, *q_local = [self.predictor(z) for z in project(self.encoder, self.projector, [x1, *local_crops])]
        paste, canvas = (self.predictor(self.projector(f)) for f in self.region_features(swapped, region))
        with torch.no_grad():
            f, g = self.momentum_copy.network
            k = distributed.gather(project(f, g, [x2])[0])

        n, offset = len(x1), distributed.rank() * len(x1)
        own = torch.arange(n, device=x1.device) + offset
        terms = Contrasts(self.options.temperature)
        targets = place(torch.eye(n, device=x1.device), len(k), offset)
        terms.add("instance", self.options.weights[0], [(q, k)], targets)
        if local_crops:
            terms.add("local", 1.0, [(torch.cat(q_local), k)], targets.repeat(len(local_crops), 1))
        regions = [
            region_contrast(canvas, k, paste, own, self.options.temperature),
            region_contrast(paste, k, canvas, partners(own), self.options.temperature),
        ]
        level = torch.stack(regions).mean()
        entries = terms.total()
        chance = torch.tensor(math.log(len(k) + 1), device=level.device)
        entries |= {"region": level, "region/chance": chance, "region/floor": torch.zeros_like(chance)}
        return entries | {"loss": entries["loss"] + self.options.weights[1] * level}

    def region_features(self, swapped: Tensor, region: Region) -> tuple[Tensor, Tensor]:
        """Means of the patch tokens inside and outside the region: (N, D) each."""
        size = self.swap.patch_size
        rows, columns = swapped.shape[-2] // size, swapped.shape[-1] // size
        inside = torch.zeros(rows, columns, dtype=torch.bool, device=swapped.device)
        inside[region.top : region.bottom, region.left : region.right] = True
        _, patches = all_tokens(self.encoder, swapped)
        flat = inside.flatten()
        return patches[:, flat].mean(dim=1), patches[:, ~flat].mean(dim=1)

    def after_step(self, progress: float) -> None:
        self.scalars["momentum"] = self.momentum(progress)
        self.momentum_copy.update(self._online(), self.scalars["momentum"])

    def _online(self) -> nn.ModuleList:
        return nn.ModuleList([self.encoder, self.projector])


def region_contrast(q: Tensor, keys: Tensor, beside: Tensor, own: Tensor, temperature: float) -> Tensor:
    """InfoNCE among the K keys and one more negative, the feature beside it in the same picture (without gradient)."""
    with torch.autocast(q.device.type, enabled=False):
        q, keys, beside = (F.normalize(x.float(), dim=1) for x in (q, keys, beside.detach()))
        logits = torch.cat([q @ keys.T, (q * beside).sum(dim=1, keepdim=True)], dim=1)
        return F.cross_entropy(logits / temperature, own)
