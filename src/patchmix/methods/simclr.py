"""SimCLR (Chen, Kornblith, Norouzi, Hinton: "A Simple Framework for Contrastive Learning", ICML 2020).

NT-Xent, Eq. 1: each of the 2K embeddings of the global batch must match its other view among the 2K − 1 others.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchmix import distributed
from patchmix.losses import Terms, mean_of_rows
from patchmix.methods.method import Method, among_all
from patchmix.methods.options import SimCLROptions
from patchmix.nn import BatchNorm, mlp_head, project


class SimCLR(Method):
    def __init__(self, encoder: VisionTransformer, options: SimCLROptions = SimCLROptions()) -> None:
        super().__init__()
        self.options = options
        self.encoder = encoder
        self.projector = mlp_head(options.head_layers, encoder.num_features, options.head_hidden, options.head_out)
        scaled = BatchNorm(options.head_out)  # the last batch norm learns a scale, but no shift
        scaled.bias.requires_grad_(False)
        self.projector[-1] = scaled

    def forward(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """views: x1, x2 (N, C, H, W), then any number of local crops, which must match both views of their image."""
        features = torch.cat(project(views, self.encoder))
        z1, z2, *z_local = self.projector(features).chunk(len(views))  # batch norms see all views at once
        keys = torch.cat([distributed.gather_with_gradient(z) for z in (z1, z2)])  # (2K, D)
        terms = Terms(self.options.temperature)
        loss = nt_xent(torch.cat([z1, z2]), keys, distributed.rank() * len(z1), self.options.temperature)
        terms.add_value("ntxent", 1.0, loss, chance=math.log(max(len(keys) - 1, 1)))
        if z_local:
            same_image = among_all(torch.eye(len(z1), device=z1.device))
            both_views = torch.cat([same_image, same_image], dim=1).repeat(len(z_local), 1) / 2
            terms.add("local", 1.0, (torch.cat(z_local), keys), target=both_views)
        return terms.total()


def nt_xent(queries: Tensor, keys: Tensor, offset: int, temperature: float) -> Tensor:
    """queries: (2N, D), this process's two views; keys: (2K, D), of all, its own from `offset` in each half."""
    n, k = len(queries) // 2, len(keys) // 2
    index = torch.arange(n, device=queries.device) + offset
    same_view, other_view = torch.cat([index, index + k]), torch.cat([index + k, index])
    with torch.autocast(queries.device.type, enabled=False):
        normalized = F.normalize(keys.float(), dim=1)

        def of(q: Tensor, same: Tensor, other: Tensor) -> Tensor:
            similarity = F.normalize(q.float(), dim=1) @ normalized.T / temperature
            similarity = similarity.scatter(1, same.unsqueeze(1), -math.inf)  # 1[k ≠ i]
            return F.cross_entropy(similarity, other, reduction="none")

        return mean_of_rows(of, queries, same_view, other_view, width=len(keys))
