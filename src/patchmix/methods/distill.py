"""Distillation: a small encoder learns to give the features of a frozen one, on unlabeled images.

The student's class token and patch tokens, through a linear map each, are compared with the teacher's for the same
view, as in the feature distillation of DINOv2 and AM-RADIO. s: student, t: teacher, D their widths, T patches.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchmix.losses import Terms
from patchmix.methods.method import Method
from patchmix.methods.options import DistillOptions
from patchmix.nn import all_tokens, patch_size_of

Floats = Sequence[float]


class Teacher(nn.Module):
    """A frozen encoder for images that were normalized for another one, of any size."""

    def __init__(
        self, encoder: VisionTransformer, *, mean: Floats, std: Floats, student_mean: Floats, student_std: Floats
    ) -> None:
        super().__init__()
        self.encoder = encoder.eval().requires_grad_(False)
        mean_t, std_t, mean_s, std_s = (torch.tensor(x).view(-1, 1, 1) for x in (mean, std, student_mean, student_std))
        self.scale, self.shift = nn.Buffer(std_s / std_t), nn.Buffer((mean_s - mean_t) / std_t)

    @torch.no_grad()
    def forward(self, images: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Class token (N, D_t), and patch tokens averaged or interpolated to the student's grid: (N, T_s, D_t)."""
        size = self.encoder.patch_embed.img_size
        assert size is not None
        images = images * self.scale + self.shift
        if tuple(images.shape[-2:]) != tuple(size):
            images = F.interpolate(images, size=size, mode="bicubic", antialias=True)
        token, patches = all_tokens(self.encoder, images)
        own = self.encoder.patch_embed.grid_size
        if tuple(own) != tuple(grid):
            maps = patches.float().mT.reshape(len(patches), -1, *own)  # (N, D, rows, columns)
            patches = F.interpolate(maps, size=grid, mode="bilinear", antialias=True).flatten(2).mT
        return token, patches


class Distill(Method):
    def __init__(
        self, encoder: VisionTransformer, teacher: Teacher, options: DistillOptions = DistillOptions()
    ) -> None:
        super().__init__()
        self.options = options
        self.encoder = encoder
        self.patch_size = patch_size_of(encoder)
        self.projector = nn.Linear(encoder.num_features, teacher.encoder.num_features)
        self.patch_projector = nn.Linear(encoder.num_features, teacher.encoder.num_features)
        self.teacher = (teacher,)  # in a tuple: not trained, and not in checkpoints

    def forward(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """views: x1, x2 (N, C, H, W); further ones are left out."""
        images = torch.cat(list(views[:2]))
        grid = images.shape[-2] // self.patch_size, images.shape[-1] // self.patch_size
        token, patches = all_tokens(self.encoder, images)
        token_t, patches_t = self.teacher[0].to(images.device)(images, grid)
        pairs = (self.projector(token), token_t), (self.patch_projector(patches), patches_t)
        terms = Terms()
        for name, weight, (s, t) in zip(("class", "patch"), self.options.weights, pairs, strict=True):
            mean = t.float().flatten(0, -2).mean(dim=0).expand_as(t)  # of a student that gives it for all images
            terms.add_value(name, weight, self.distance(s, t), chance=self.distance(mean, t))
        return terms.total()

    def distance(self, s: Tensor, t: Tensor) -> Tensor:
        """1 − cos(s, t), or the mean of (s − t)², averaged over tokens: (…, D_t) each, fp32 under any autocast."""
        with torch.autocast(s.device.type, enabled=False):
            if self.options.distance == "mse":
                return F.mse_loss(s.float(), t.float())
            return 1.0 - F.cosine_similarity(s.float(), t.float(), dim=-1).mean()
