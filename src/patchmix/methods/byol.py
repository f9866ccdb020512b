"""BYOL (Grill et al.: "Bootstrap Your Own Latent", NeurIPS 2020): predict the other view's target projection."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchmix.methods.method import Method, MomentumCopy
from patchmix.methods.options import BYOLOptions
from patchmix.nn import BatchNorm, project
from patchmix.schedules import Cosine


class BYOL(Method):
    def __init__(self, encoder: VisionTransformer, options: BYOLOptions = BYOLOptions()) -> None:
        super().__init__()
        self.options = options
        self.encoder = encoder
        self.projector = _head(encoder.num_features, options.head_hidden, options.head_out)  # g
        self.predictor = _head(options.head_out, options.head_hidden, options.head_out)  # q
        self.momentum_copy = MomentumCopy(encoder, self.projector, momentum=Cosine(options.momentum, 1.0))  # ξ

    def forward(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """views: x1, x2 (N, C, H, W), then any number of local crops, which predict both targets."""
        q1, q2, *q_local = project(views, self.encoder, self.projector, self.predictor)
        z1, z2 = self.momentum_copy.project(*views[:2])
        loss = regression(q1, z2) + regression(q2, z1)  # Eq. 2, and the same with the views exchanged
        chance = loss.new_full((), 4.0)  # of orthogonal vectors: 2 each way
        entries = {"loss": loss, "byol": loss, "byol/chance": chance, "byol/floor": 0 * chance}
        if q_local:
            local = torch.stack([regression(q, z) for q in q_local for z in (z1, z2)]).sum() / len(q_local)
            entries |= {"loss": loss + local, "local": local, "local/chance": chance, "local/floor": 0 * chance}
        return entries


def regression(q: Tensor, z: Tensor) -> Tensor:
    """‖q̄ − z̄‖² = 2 − 2·cos(q, z), averaged over the batch (Eq. 2)."""
    with torch.autocast(q.device.type, enabled=False):
        return (2.0 - 2.0 * F.cosine_similarity(q.float(), z.float(), dim=1)).mean()


def _head(in_dim: int, hidden: int, out_dim: int) -> nn.Sequential:
    """Linear, batch norm, ReLU, linear without bias; unlike MoCo v3's there is no batch norm on the output."""
    return nn.Sequential(
        nn.Linear(in_dim, hidden), BatchNorm(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, out_dim, bias=False)
    )
