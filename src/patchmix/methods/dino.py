"""DINO (Caron et al.: "Emerging Properties in Self-Supervised Vision Transformers", ICCV 2021), Algorithm 1.

s are the student's outputs of all views, t the teacher's of the two global ones, c the center (Eq. 4).
"""

import math
from collections.abc import Sequence

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchmix.losses import entropy, swapped_prediction
from patchmix.methods.method import Center, Method, MomentumCopy
from patchmix.methods.options import DINOOptions
from patchmix.nn import PrototypeHead, project
from patchmix.schedules import Cosine, Linear


class DINO(Method):
    def __init__(self, encoder: VisionTransformer, options: DINOOptions = DINOOptions()) -> None:
        super().__init__()
        self.options = options
        self.encoder = encoder
        sizes = options.head_hidden, options.head_bottleneck, options.head_out
        self.head = PrototypeHead(encoder.num_features, *sizes, fixed_length=options.norm_last_layer)
        self.momentum_copy = MomentumCopy(encoder, self.head, momentum=Cosine(options.momentum, 1.0))  # the teacher
        self.center = Center(options.head_out, options.center_momentum)
        self.before_step(0.0)

    def before_step(self, progress: float) -> None:
        options = self.options
        self.scalars["teacher_temperature"] = Linear(*options.teacher_temperature, options.teacher_warmup)(progress)
        self.head.frozen = progress < options.freeze_last_layer

    def forward(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """views: x1, x2 (N, C, H, W), which the teacher sees too, then any number of local crops."""
        s = project(views, self.encoder, self.head)
        with torch.no_grad():
            t = torch.stack(self.momentum_copy.project(*views[:2])).float()
            p = torch.softmax((t - self.center.value) / self.scalars["teacher_temperature"], dim=-1)  # (2, N, K)
            self.center.observe(t)
        loss = swapped_prediction(s, p.unbind(), self.options.student_temperature)  # H(P_t(x), P_s(x′)), Eq. 3
        chance = loss.new_full((), math.log(p.shape[-1]))
        return {"loss": loss, "dino": loss, "dino/chance": chance, "dino/floor": entropy(p).mean()}
