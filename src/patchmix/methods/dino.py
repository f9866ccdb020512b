"""DINO (Caron et al.: "Emerging Properties in Self-Supervised Vision Transformers", ICCV 2021), Algorithm 1.

s are the student's outputs of all views, t the teacher's of the two global ones, c the centre (Eq. 4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchmix.losses import cross_entropy, entropy
from patchmix.methods.method import Method
from patchmix.methods.options import DINOOptions
from patchmix.nn.momentum import MomentumCopy
from patchmix.nn.passes import project
from patchmix.nn.prototypes import Centre, PrototypeHead
from patchmix.schedules import Cosine


class DINO(Method):
    """Defaults are the paper's for ViT (Section 3.2); what it gives in epochs is a share of the training here."""

    def __init__(self, encoder: VisionTransformer, options: DINOOptions = DINOOptions()) -> None:
        super().__init__()
        self.options = options
        self.encoder = encoder
        self.head = PrototypeHead(
            encoder.num_features,
            options.head_out,
            hidden=options.head_hidden,
            bottleneck=options.head_bottleneck,
            fixed_length=options.norm_last_layer,
        )
        self.momentum_copy = MomentumCopy(self._student())
        self.centre = Centre(options.head_out, options.center_momentum)
        self.momentum = Cosine(options.momentum, 1.0)
        self.before_step(0.0)

    def forward(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """views: x1, x2 (N, C, H, W), which the teacher sees too, then any number of local crops."""
        s = project(self.encoder, self.head, views)
        with torch.no_grad():
            f, g = self.momentum_copy.network
            t = torch.stack(project(f, g, views[:2])).float()
            p = torch.softmax((t - self.centre.value) / self.scalars["teacher_temperature"], dim=-1)  # (2, N, K)
            self.centre.observe(t)
        terms = [
            cross_entropy(s[j], p[i], self.options.student_temperature).mean()  # H(P_t(x), P_s(x′)), Eq. 3
            for i in (0, 1)
            for j in range(len(views))
            if j != i
        ]
        loss = torch.stack(terms).mean()
        chance = torch.tensor(math.log(p.shape[-1]), device=loss.device)
        return {"loss": loss, "dino": loss, "dino/chance": chance, "dino/floor": entropy(p).mean()}

    def before_step(self, progress: float) -> None:
        low, high = self.options.teacher_temperature
        rise = min(1.0, progress / self.options.teacher_warmup) if self.options.teacher_warmup else 1.0
        self.scalars["teacher_temperature"] = low + (high - low) * rise
        self.head.frozen = progress < self.options.freeze_last_layer

    def fixed_parameters(self) -> list[nn.Parameter]:
        return self.head.fixed_parameters()

    def after_step(self, progress: float) -> None:
        self.scalars["momentum"] = self.momentum(progress)
        self.momentum_copy.update(self._student(), self.scalars["momentum"])
        self.centre.update()

    def _student(self) -> nn.ModuleList:
        return nn.ModuleList([self.encoder, self.head])
