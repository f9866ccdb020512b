"""SwAV (Caron et al.: "Unsupervised Learning of Visual Features by Contrasting Cluster Assignments", NeurIPS 2020).

z are unit projections, C the prototypes, q the codes (Eq. 3, Sinkhorn), p = softmax(zC/τ) (Eq. 2).
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchmix import distributed
from patchmix.losses import entropy, swapped_prediction
from patchmix.methods.method import Method
from patchmix.methods.options import SwAVOptions
from patchmix.nn import project, two_layer_head


class SwAV(Method):
    def __init__(self, encoder: VisionTransformer, options: SwAVOptions = SwAVOptions()) -> None:
        super().__init__()
        self.options = options
        self.encoder = encoder
        self.projector = two_layer_head(encoder.num_features, options.head_hidden, options.head_out, bias=True)
        self.prototypes = nn.Parameter(F.normalize(torch.randn(options.prototypes, options.head_out), dim=1))  # Cᵀ
        self.queue = nn.Buffer(torch.zeros(2, options.queue_length, options.head_out))
        self.queued = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.frozen, self.queueing = options.freeze_prototypes > 0, options.queue_start == 0

    @torch.no_grad()
    def before_step(self, progress: float) -> None:
        self.frozen = progress < self.options.freeze_prototypes
        self.queueing = progress >= self.options.queue_start
        self.prototypes.copy_(F.normalize(self.prototypes, dim=1))

    def forward(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """views: x1, x2 (N, C, H, W), which give codes, then any number of local crops, which only predict them."""
        features = torch.cat(project(views, self.encoder))
        z = F.normalize(self.projector(features).float(), dim=1).chunk(len(views))  # batch norms see all views at once
        prototypes = self.prototypes.detach() + 0.0 * self.prototypes if self.frozen else self.prototypes
        with torch.autocast(z[0].device.type, enabled=False):
            scores = [each @ prototypes.T for each in z]  # (N, prototypes)
            q = [self.codes(z[s], scores[s], self.queue[s]) for s in (0, 1)]
        if self.queueing and self.queue.shape[1]:
            self.enqueue(z[0], z[1])

        loss = swapped_prediction(scores, q, self.options.temperature)  # ℓ(z_t, q_s), Eq. 2
        chance = loss.new_full((), math.log(len(prototypes)))
        return {"loss": loss, "swav": loss, "swav/chance": chance, "swav/floor": entropy(torch.cat(q)).mean()}

    @torch.no_grad()
    def codes(self, z: Tensor, scores: Tensor, queue: Tensor) -> Tensor:
        """q of this process's images, balanced over the global batch and the queue once it is full: (N, prototypes)."""
        n, offset = len(z), distributed.rank() * len(z)
        all_scores = distributed.gather(scores.detach())
        if self.queueing and queue.shape[0]:
            full = self.queued >= len(queue)  # before, a score of −∞ leaves no weight to what is queued
            all_scores = torch.cat([all_scores, (queue @ self.prototypes.T).where(full, -math.inf)])
        return sinkhorn(all_scores, self.options.epsilon, self.options.sinkhorn_iterations)[offset : offset + n]

    @torch.no_grad()
    def enqueue(self, *views: Tensor) -> None:
        new = torch.stack([distributed.gather(z.detach()) for z in views])
        self.queue.copy_(torch.cat([new, self.queue], dim=1)[:, : self.queue.shape[1]])
        self.queued.add_(new.shape[1])

    def fixed_parameters(self) -> list[nn.Parameter]:
        return [self.prototypes] if self.frozen else []


def sinkhorn(scores: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Codes that spread a batch evenly over the prototypes (Eqs. 3-5): (B, K) scores → (B, K), rows sum to 1."""
    q = torch.exp((scores.float() - scores.max()) / epsilon)
    for _ in range(iterations):
        q = q / q.sum(dim=0, keepdim=True).clamp_min(1e-30) / q.shape[1]  # every prototype 1/K
        q = q / q.sum(dim=1, keepdim=True).clamp_min(1e-30) / q.shape[0]  # every image 1/B
    return q * q.shape[0]
