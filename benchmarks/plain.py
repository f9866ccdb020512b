"""The baseline: PatchMix as one would first write it from the paper, one line of Algorithm 2 after the other.

Every input has its own pass, attention is softmax(QKᵀ/√d)V spelt out, the mix and the targets are loops, the moving
average and AdamW go parameter by parameter. Parameters have the names of timm's, so that both can have the same ones.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:  # (N, T, D)
        n, tokens, dim = x.shape
        qkv = self.qkv(x).reshape(n, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]  # (N, heads, T, d)
        scores = q @ k.transpose(-2, -1) / math.sqrt(dim // self.heads)
        return self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(n, tokens, dim))


class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class DropPath(nn.Module):
    """Leaves out a branch for some of the images, and makes up for it in the others."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return x
        keep = torch.empty(len(x), 1, 1, device=x.device).bernoulli_(1 - self.rate)
        return x * keep / (1 - self.rate)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), Attention(dim, heads)
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=1e-6), Mlp(dim)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    def __init__(self, patch_size: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class PlainViT(nn.Module):
    def __init__(
        self, image_size: int, patch_size: int, dim: int, depth: int, heads: int, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        tokens = (image_size // patch_size) ** 2 + 1
        self.dim = dim
        self.patch_embed = PatchEmbed(patch_size, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, tokens, dim))
        rates = torch.linspace(0, drop_path, depth).tolist()
        self.blocks = nn.Sequential(*[Block(dim, heads, rate) for rate in rates])
        self.norm = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) → the class token after the last norm, (N, D)."""
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.norm(self.blocks(x))[:, 0]


def head(layers: int, in_dim: int, hidden: int, out_dim: int) -> nn.Sequential:
    """Table "head": linear layers without bias, batch norm after each, ReLU between them."""
    sizes = [in_dim, *[hidden] * (layers - 1), out_dim]
    modules: list[nn.Module] = []
    for i in range(layers):
        last = i == layers - 1
        modules += [nn.Linear(sizes[i], sizes[i + 1], bias=False), nn.BatchNorm1d(sizes[i + 1], affine=not last)]
        modules += [] if last else [nn.ReLU()]
    return nn.Sequential(*modules)


def patchmix(images: Tensor, patch_size: int, m: int, order: Tensor) -> Tensor:
    """Algorithm 1 with k(j) = `order`: shuffle patches, mix groups of M images, unshuffle."""
    n, c, height, width = images.shape
    rows, columns = height // patch_size, width // patch_size
    patches = images.reshape(n, c, rows, patch_size, columns, patch_size).permute(0, 2, 4, 1, 3, 5)
    patches = patches.reshape(n, rows * columns, c * patch_size * patch_size)
    shuffled = patches[:, order]
    size = rows * columns // m
    mixed = shuffled.clone()
    for i in range(n):
        for group in range(m):
            part = slice(group * size, (group + 1) * size)
            mixed[i, part] = shuffled[(i + group) % n, part]
    restored = mixed[:, order.argsort()]
    restored = restored.reshape(n, rows, columns, c, patch_size, patch_size).permute(0, 3, 1, 4, 2, 5)
    return restored.reshape(n, c, height, width)


def contrast(h: Tensor, z: Tensor, positives: Sequence[Sequence[tuple[int, float]]], tau: float) -> Tensor:
    """−1/N Σ_i Σ_j w_ij log softmax(sim(h_i, z_j) / τ); `positives[i]` are (j, w_ij)."""
    h = h / h.norm(dim=1, keepdim=True)
    z = z / z.norm(dim=1, keepdim=True)
    logarithms = (h @ z.T / tau).log_softmax(dim=1)
    total = h.new_zeros(())
    for i, row in enumerate(positives):
        for j, weight in row:
            total = total - weight * logarithms[i, j]
    return total / len(h)


class PlainPatchMix(nn.Module):
    """Algorithm 2: F, G, H with gradient, their momentum copy Ξ without."""

    def __init__(
        self,
        encoder: PlainViT,
        *,
        patch_size: int,
        num_mix: int = 3,
        temperature: float = 0.2,
        head_hidden: int = 4096,
        head_out: int = 256,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = head(3, encoder.dim, head_hidden, head_out)
        self.predictor = head(2, head_out, head_hidden, head_out)
        self.momentum_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
        for block in self.momentum_encoder.blocks:
            block.drop_path.rate = 0.0
        self.patch_size, self.m, self.tau = patch_size, num_mix, temperature
        self.generator = torch.Generator()

    def draw_order(self, images: Tensor) -> Tensor:
        patches = (images.shape[2] // self.patch_size) * (images.shape[3] // self.patch_size)
        return torch.randperm(patches, generator=self.generator)

    def query(self, x: Tensor) -> Tensor:
        return self.predictor(self.projector(self.encoder(x)))

    @torch.no_grad()
    def key(self, x: Tensor) -> Tensor:
        return self.momentum_projector(self.momentum_encoder(x))

    def forward(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        x1, x2 = views
        mix1 = patchmix(x1, self.patch_size, self.m, self.draw_order(x1))
        mix2 = patchmix(x2, self.patch_size, self.m, self.draw_order(x2))
        h_mix1, h_2 = self.query(mix1), self.query(x2)
        z_1, z_2, z_mix2 = self.key(x1), self.key(x2), self.key(mix2)

        n, m = len(x1), self.m
        same = [[(i, 1.0)] for i in range(n)]
        originals = [[((i + j) % n, 1 / m) for j in range(m)] for i in range(n)]  # Eqs. 10 and 13
        mixes = [[((i + d) % n, 1 - abs(d) / m) for d in range(1 - m, m)] for i in range(n)]  # Eqs. 11 and 12
        oto = contrast(h_2, z_1, same, self.tau)
        mto = contrast(h_mix1, z_2, originals, self.tau)
        mtm = contrast(h_mix1, z_mix2, mixes, self.tau)
        return {"loss": oto + mto + mtm, "oto": oto, "mto": mto, "mtm": mtm}

    @torch.no_grad()
    def follow(self, momentum: float) -> None:
        """Ξ ← μ·Ξ + (1 − μ)·Θ."""
        for copied, base in (
            (self.momentum_encoder, self.encoder),
            (self.momentum_projector, self.projector),
        ):
            for theirs, ours in zip(copied.parameters(), base.parameters(), strict=True):
                theirs.data = momentum * theirs.data + (1 - momentum) * ours.data


def plain_optimizer(model: nn.Module, *, eps: float = 1e-8) -> torch.optim.AdamW:
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.04}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-4, eps=eps, foreach=False, fused=False)


def copy_weights(plain: PlainPatchMix, method: nn.Module) -> None:
    """The plain model with all weights of ours, those of the momentum copy included."""
    plain.encoder.load_state_dict(method.encoder.state_dict())
    plain.projector.load_state_dict(method.projector.state_dict())
    plain.predictor.load_state_dict(method.predictor.state_dict())
    plain.momentum_encoder.load_state_dict(method.momentum_copy.network[0].state_dict())
    plain.momentum_projector.load_state_dict(method.momentum_copy.network[1].state_dict())
