"""iBOT (Zhou et al.: "Image BERT Pre-Training with Online Tokenizer", ICLR 2022), Algorithm 1.

The student sees the two global views u, v with blocks of patches masked, the teacher sees them whole. L_CLS: the
class token of one view predicts the teacher's of the other. L_MIM: masked patch tokens predict the teacher's own.
"""

import math
from collections.abc import Sequence

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchmix.losses import Terms, cross_entropy, entropy, swapped_prediction
from patchmix.methods.method import Center, Method, MomentumCopy
from patchmix.methods.options import IBOTOptions
from patchmix.nn import PrototypeHead, all_tokens, patch_size_of, project
from patchmix.nn.heads import decayed
from patchmix.schedules import Cosine, Linear

ATTEMPTS = 30  # rectangles tried per image; one that adds nothing or too much is left out
LOWEST_ASPECT = 0.3  # BEiT: aspect ratios between 0.3 and 1/0.3, uniform in the logarithm


class IBOT(Method):
    def __init__(self, encoder: VisionTransformer, options: IBOTOptions = IBOTOptions()) -> None:
        super().__init__()
        self.options = options
        self.encoder = encoder
        sizes = options.head_hidden, options.head_bottleneck, options.head_out
        self.head = PrototypeHead(encoder.num_features, *sizes, fixed_length=options.norm_last_layer)
        self.momentum_copy = MomentumCopy(encoder, self.head, momentum=Cosine(options.momentum, 1.0))  # the teacher
        self.mask_token = decayed(nn.Parameter(torch.zeros(encoder.embed_dim)))  # e_[MASK]
        self.center = Center(options.head_out, options.center_momentum)  # C
        self.center_patch = Center(options.head_out, options.center_patch_momentum)  # C′
        self.patch_size = patch_size_of(encoder)
        self.before_step(0.0)

    def before_step(self, progress: float) -> None:
        options = self.options
        both = options.teacher_temperature, options.teacher_patch_temperature
        for name, ends in zip(("teacher_temperature", "teacher_patch_temperature"), both, strict=True):
            self.scalars[name] = Linear(*ends, options.teacher_warmup)(progress)
        self.head.frozen = progress < options.freeze_last_layer

    def draw(self, views: Sequence[Tensor]) -> tuple[tuple[Tensor, Tensor, Tensor]]:
        """The masks (2N, T) of u and v, and of each masked patch its place in 2N·T and its weight in L_MIM."""
        device, mask = views[0].device, self.draw_masks(torch.cat(list(views[:2])))
        places = mask.flatten().nonzero()[:, 0]
        # Each masked view counts once, however many of its patches are masked (Eq. 3).
        weight = (1.0 / mask.sum(dim=1, keepdim=True).clamp_min(1)).expand_as(mask)[mask] / len(mask)
        mask, places, weight = (x.to(device, non_blocking=True) for x in (mask, places, weight))
        return ((mask, places, weight),)

    def forward(self, views: Sequence[Tensor], drawn: tuple[Tensor, Tensor, Tensor] | None = None) -> dict[str, Tensor]:
        """views: u, v (N, C, H, W), then any number of local crops, for L_CLS only; drawn: of `draw`."""
        both, n = torch.cat(list(views[:2])), len(views[0])
        mask, places, weight = drawn or self.draw(views)[0]
        tokens, patches = all_tokens(self.encoder, both, mask, self.mask_token)
        s = [*self.head(tokens).split(n), *project(views[2:], self.encoder, self.head)]
        s_masked = self.head(patches.flatten(0, 1)[places])  # (masked, K)
        with torch.no_grad():
            f, g = self.momentum_copy.network
            assert isinstance(g, PrototypeHead)
            whole, whole_patches = all_tokens(f, both)
            t, z_patch = g(whole).float(), g.embed(whole_patches)
            p = torch.softmax((t - self.center.value) / self.scalars["teacher_temperature"], dim=-1)
            centered = g.logits(z_patch.flatten(0, 1)[places]).float() - self.center_patch.value
            p_masked = torch.softmax(centered / self.scalars["teacher_patch_temperature"], dim=-1)
            self.center.observe(t)
            self.center_patch.observe(g.logits(z_patch.float().mean(dim=(0, 1), keepdim=True)))  # logits are linear

        terms, tau, chance = Terms(), self.options.student_temperature, math.log(t.shape[-1])
        cls = swapped_prediction(s, p.chunk(2), tau)  # Eq. 2
        mim = (weight * cross_entropy(s_masked, p_masked, tau)).sum()
        terms.add_value("cls", self.options.weights[0], cls, chance=chance, floor=entropy(p).mean())
        floor = (weight * entropy(p_masked)).sum()
        terms.add_value("mim", self.options.weights[1], mim, chance=weight.sum() * chance, floor=floor)
        return terms.total()

    def draw_masks(self, images: Tensor) -> Tensor:
        """(N, T), true where a patch is masked; on the CPU, from the method's own generator."""
        rows, columns = (side // self.patch_size for side in images.shape[-2:])
        options = self.options
        return block_masks(len(images), rows, columns, options.mask_probability, options.mask_ratio, self.generator)


def block_masks(
    n: int,
    rows: int,
    columns: int,
    probability: float = 0.5,
    ratio: tuple[float, float] = (0.1, 0.5),
    generator: torch.Generator | None = None,
) -> Tensor:
    """Block-wise masks (BEiT, Algorithm 1): rectangles until the wanted share of patches is masked.

    (N, rows·columns), true where masked: with `probability` a share drawn from U(ratio), otherwise nothing.
    The share is an upper bound that rectangles come close to; all images are processed at once.
    """
    uniform = torch.rand(2, n, generator=generator)
    wanted = (ratio[0] + (ratio[1] - ratio[0]) * uniform[0]) * rows * columns
    left_over = torch.where(uniform[1] < probability, wanted, 0.0)
    masked = torch.zeros(n, rows, columns, dtype=torch.bool)
    smallest = float((min(rows, columns) // 3) ** 2)
    y, x = torch.arange(rows).view(1, -1, 1), torch.arange(columns).view(1, 1, -1)
    for area_at, aspect_at, top_at, left_at in torch.rand(ATTEMPTS, 4, n, generator=generator):
        area = smallest + area_at * (left_over - smallest)
        aspect = torch.exp((2.0 * aspect_at - 1.0) * math.log(1.0 / LOWEST_ASPECT))
        h = (area.clamp_min(0.0) * aspect).sqrt().round()
        w = (area.clamp_min(0.0) / aspect).sqrt().round()
        top = (top_at * (rows - h + 1)).floor().view(-1, 1, 1)
        left = (left_at * (columns - w + 1)).floor().view(-1, 1, 1)
        block = (y >= top) & (y < top + h.view(-1, 1, 1)) & (x >= left) & (x < left + w.view(-1, 1, 1))
        added = (block & ~masked).sum(dim=(1, 2))
        fits = (added > 0) & (added <= left_over) & (h < rows) & (w < columns)  # no whole rows or columns
        masked |= block & fits.view(-1, 1, 1)
        left_over = left_over - torch.where(fits, added, 0)
    return masked.flatten(1)
