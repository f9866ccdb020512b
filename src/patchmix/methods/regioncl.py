"""RegionCL (Xu et al.: "Exploring Contrastive Region Pairs for Self-Supervised Representation Learning", ECCV 2022).

Images i and N − 1 − i of view 1 exchange a region. The pasted region's feature must match the image it comes from, and
the canvas around it its own image, among the keys of view 2; each is a negative of the other.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchmix import distributed
from patchmix.losses import Terms, mean_of_rows
from patchmix.methods.method import Method, MomentumCopy, among_all
from patchmix.methods.options import RegionCLOptions
from patchmix.mixing import RegionSwap, partners
from patchmix.nn import all_tokens, mlp_head, patch_size_of, project
from patchmix.schedules import Cosine


class RegionCL(Method):
    def __init__(self, encoder: VisionTransformer, options: RegionCLOptions = RegionCLOptions()) -> None:
        super().__init__()
        self.options = options
        self.encoder = encoder
        self.projector = mlp_head(3, encoder.num_features, options.head_hidden, options.head_out)
        self.predictor = mlp_head(2, options.head_out, options.head_hidden, options.head_out)
        self.momentum_copy = MomentumCopy(encoder, self.projector, momentum=Cosine(options.momentum, 1.0))
        self.swap = RegionSwap(patch_size_of(encoder), options.region_sides, self.generator)

    def draw(self, views: Sequence[Tensor]) -> tuple[tuple[Tensor, Tensor]]:
        """View 1 with swapped regions, and where they are: (T,), true inside the region."""
        region = self.swap.draw(views[0])
        height, width = (side // self.swap.patch_size for side in views[0].shape[-2:])
        inside = torch.zeros(height, width, dtype=torch.bool)
        inside[region] = True
        return ((self.swap(views[0], region).images, inside.flatten().to(views[0].device, non_blocking=True)),)

    def forward(self, views: Sequence[Tensor], drawn: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
        """views: x1, x2 (N, C, H, W), then any number of local crops, queries for the key; drawn: of `draw`."""
        x1, x2, *local_crops = views
        swapped, inside = drawn or self.draw(views)[0]
        q, *q_local = project([x1, *local_crops], self.encoder, self.projector, self.predictor)
        paste, canvas = (self.predictor(self.projector(f)) for f in self.region_features(swapped, inside))
        k = distributed.gather(self.momentum_copy.project(x2)[0])

        weights, tau = self.options.weights, self.options.temperature
        same_image = among_all(torch.eye(len(x1), device=x1.device))
        terms = Terms(tau)
        terms.add("instance", weights[0], (q, k), target=same_image)
        if local_crops:
            terms.add("local", 1.0, (torch.cat(q_local), k), target=same_image.repeat(len(local_crops), 1))
        own = same_image.argmax(dim=1)  # which key is the image's
        of_canvas = region_contrast(canvas, k, paste, own, tau)
        of_paste = region_contrast(paste, k, canvas, partners(own), tau)
        level = torch.stack([of_canvas, of_paste]).mean()
        terms.add_value("region", weights[1], level, chance=math.log(len(k) + 1))
        return terms.total()

    def region_features(self, swapped: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
        """Means of the patch tokens inside and outside the region: (N, D) each."""
        _, patches = all_tokens(self.encoder, swapped)
        pasted = patches.where(inside.unsqueeze(1), 0).sum(dim=1) / inside.sum()
        return pasted, patches.where(~inside.unsqueeze(1), 0).sum(dim=1) / (~inside).sum()


def region_contrast(q: Tensor, keys: Tensor, negative: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """InfoNCE among the K keys and one more negative per query, which gets no gradient."""
    with torch.autocast(q.device.type, enabled=False):
        q, keys, negative = (F.normalize(x.float(), dim=1) for x in (q, keys, negative.detach()))

        def of(q: Tensor, negative: Tensor, labels: Tensor) -> Tensor:
            logits = torch.cat([q @ keys.T, (q * negative).sum(dim=1, keepdim=True)], dim=1)
            return F.cross_entropy(logits / temperature, labels, reduction="none")

        return mean_of_rows(of, q, negative, labels, width=len(keys))
