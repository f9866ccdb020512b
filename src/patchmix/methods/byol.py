"""BYOL (Grill et al.: "Bootstrap Your Own Latent", NeurIPS 2020): predict the other view's target projection."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchmix.losses import Terms
from patchmix.methods.method import Method, MomentumCopy
from patchmix.methods.options import BYOLOptions
from patchmix.nn import project, two_layer_head
from patchmix.schedules import Cosine


class BYOL(Method):
    def __init__(self, encoder: VisionTransformer, options: BYOLOptions = BYOLOptions()) -> None:
        super().__init__()
        self.options = options
        self.encoder = encoder
        self.projector = two_layer_head(encoder.num_features, options.head_hidden, options.head_out, bias=False)  # g
        self.predictor = two_layer_head(options.head_out, options.head_hidden, options.head_out, bias=False)  # q
        self.momentum_copy = MomentumCopy(encoder, self.projector, momentum=Cosine(options.momentum, 1.0))  # ξ

    def forward(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """views: x1, x2 (N, C, H, W), then any number of local crops, which predict both targets."""
        q1, q2, *q_local = project(views, self.encoder, self.projector, self.predictor)
        z1, z2 = self.momentum_copy.project(*views[:2])
        terms, chance = Terms(), 4.0  # of orthogonal vectors: 2 each way
        terms.add_value("byol", 1.0, regression(q1, z2) + regression(q2, z1), chance=chance)  # Eq. 2, both ways
        if q_local:
            local = torch.stack([regression(q, z) for q in q_local for z in (z1, z2)]).sum() / len(q_local)
            terms.add_value("local", 1.0, local, chance=chance)
        return terms.total()


def regression(q: Tensor, z: Tensor) -> Tensor:
    """‖q̄ − z̄‖² = 2 − 2·cos(q, z), averaged over the batch (Eq. 2)."""
    with torch.autocast(q.device.type, enabled=False):
        return (2.0 - 2.0 * F.cosine_similarity(q.float(), z.float(), dim=1)).mean()
