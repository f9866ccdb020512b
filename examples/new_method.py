"""A new method in one file: SimSiam (Chen and He, CVPR 2021), trained on generated shapes.

    python examples/new_method.py runs/simsiam

Views, training loop, schedules, checkpoints, several processes, evaluation and export work without changes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import patchmix
from patchmix.build import METHODS
from patchmix.methods.method import Method
from patchmix.methods.options import METHOD_OPTIONS
from patchmix.nn.heads import mlp_head
from patchmix.nn.tokens import project


@dataclass(frozen=True)
class SimSiamOptions:
    head_hidden: int = 512  # Width of the heads' hidden layers.
    head_out: int = 128  # Size of the projections and predictions.


class SimSiam(Method):
    def __init__(self, encoder: VisionTransformer, options: SimSiamOptions) -> None:
        super().__init__()
        self.encoder = encoder  # what is evaluated, exported, shipped
        self.projector = mlp_head(3, encoder.num_features, options.head_hidden, options.head_out)
        self.predictor = mlp_head(2, options.head_out, options.head_hidden // 4, options.head_out)

    def forward(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        z1, z2 = project(views[:2], self.encoder, self.projector)
        p1, p2 = self.predictor(z1), self.predictor(z2)
        loss = -(cosine(p1, z2.detach()) + cosine(p2, z1.detach())) / 2
        return {"loss": loss, "spread": F.normalize(z1, dim=1).std(dim=0).mean()}  # 1/√head_out, or 0 if collapsed


def cosine(p: Tensor, z: Tensor) -> Tensor:
    return F.cosine_similarity(p, z, dim=1).mean()


METHODS["simsiam"], METHOD_OPTIONS["simsiam"] = SimSiam, SimSiamOptions


def main(out: str = "runs/simsiam", **settings: Any) -> Any:
    return patchmix.pretrain("shapes", out, recipe="demo", method="simsiam", **settings)


if __name__ == "__main__":
    print(f"kNN {100 * main(*sys.argv[1:2]).knn('shapes').top1:.1f} %")
