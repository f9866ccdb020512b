"""BYOL (Grill et al.: "Bootstrap Your Own Latent", NeurIPS 2020): predict the other view's target projection."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchmix.methods.method import Method
from patchmix.methods.options import BYOLOptions
from patchmix.nn.heads import BatchNorm
from patchmix.nn.momentum import MomentumCopy
from patchmix.nn.passes import project
from patchmix.schedules import Cosine


class BYOL(Method):
    """Defaults are the paper's (Section 3.3), for 1000 epochs."""

    def __init__(self, encoder: VisionTransformer, options: BYOLOptions = BYOLOptions()) -> None:
        super().__init__()
        self.options = options
        self.encoder = encoder
        self.projector = _head(encoder.num_features, options.head_hidden, options.head_out)  # g
        self.predictor = _head(options.head_out, options.head_hidden, options.head_out)  # q
        self.momentum_copy = MomentumCopy(self._online())  # ξ
        self.momentum = Cosine(options.momentum, 1.0)

    def forward(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """views: x1, x2 (N, C, H, W), then any number of local crops, which predict both targets."""
        q1, q2, *q_local = [self.predictor(z) for z in project(self.encoder, self.projector, views)]
        with torch.no_grad():
            f, g = self.momentum_copy.network
            z1, z2 = project(f, g, views[:2])
        loss = regression(q1, z2) + regression(q2, z1)  # Eq. 2, and the same with the views exchanged
        whole = torch.tensor(4.0, device=loss.device)  # of orthogonal vectors: 2 each way
        entries = {"loss": loss, "byol": loss, "byol/chance": whole, "byol/floor": 0 * whole}
        if q_local:
            local = torch.stack([regression(q, z) for q in q_local for z in (z1, z2)]).sum() / len(q_local)
            entries |= {"loss": loss + local, "local": local, "local/chance": whole, "local/floor": 0 * whole}
        return entries

    def after_step(self, progress: float) -> None:
        self.scalars["momentum"] = self.momentum(progress)
        self.momentum_copy.update(self._online(), self.scalars["momentum"])

    def _online(self) -> nn.ModuleList:
        return nn.ModuleList([self.encoder, self.projector])


def regression(q: Tensor, z: Tensor) -> Tensor:
    """‖q̄ − z̄‖² = 2 − 2·cos(q, z), averaged over the batch (Eq. 2)."""
    with torch.autocast(q.device.type, enabled=False):
        return (2.0 - 2.0 * F.cosine_similarity(q.float(), z.float(), dim=1)).mean()


def _head(in_dim: int, hidden: int, out_dim: int) -> nn.Sequential:
    """Linear, batch norm, ReLU, linear without bias; unlike MoCo v3's there is no batch norm on the output."""
    return nn.Sequential(
        nn.Linear(in_dim, hidden), BatchNorm(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, out_dim, bias=False)
    )
