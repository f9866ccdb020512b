"""The attentive probe: a learned query looks at the patch tokens of a frozen encoder, then a linear layer classifies.

The query has a part for each head, compared with the tokens themselves, without a projection to keys ("efficient
probing", Psomas et al. 2025). Shapes: N images of T patch tokens with D numbers, H heads, K classes.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchmix.progress import progress_bar

LRS = (1e-3, 3e-3)
DECAY = 0.05
_BATCH = 256
_LEAST_STEPS = 300  # small sets get more epochs
_LEAST_EPOCHS = 5


class AttentiveProbe(nn.Module):
    """Tokens are standardized by `mean` and `scale`, both (D,). At the start every head takes the mean over tokens."""

    def __init__(self, mean: Tensor, scale: Tensor, heads: int, classes: int) -> None:
        super().__init__()
        dim = len(mean)
        self.mean, self.scale = nn.Buffer(mean), nn.Buffer(scale)
        self.query = nn.Parameter(torch.zeros(heads, dim))
        self.value = nn.Parameter(torch.randn(heads, dim, dim // heads) / math.sqrt(dim))
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, T, D) → logits (N, K)."""
        x = (tokens.float() - self.mean) * self.scale
        share = torch.softmax(x @ self.query.T / math.sqrt(x.shape[2]), dim=1)  # (N, T, H)
        seen = share.mT @ x  # (N, H, D): values are projected after the sum over tokens, which is T times cheaper
        values = torch.einsum("nhd,hdc->nhc", seen, self.value)
        logits: Tensor = self.head(values.flatten(1))
        return logits


def usual_epochs(images: int) -> int:
    return max(_LEAST_EPOCHS, math.ceil(_LEAST_STEPS / math.ceil(images / _BATCH)))


def fit(
    tokens: Tensor,
    labels: Tensor,
    *,
    classes: int,
    heads: int,
    lr: float,
    epochs: int,
    rows: Tensor | None = None,
    seed: int = 0,
    device: torch.device | None = None,
) -> AttentiveProbe:
    """Trains a probe on tokens (N, T, D) with labels (N,), or on some `rows` of them: AdamW, cosine schedule."""
    rows = torch.arange(len(tokens)) if rows is None else rows
    some = tokens[rows[:: math.ceil(len(rows) / 1024)]].float().flatten(0, 1)
    deviation = some.std(dim=0, correction=0)
    scale = torch.where(deviation > 1e-6 * deviation.max(), 1 / deviation, 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        probe = AttentiveProbe(some.mean(dim=0), scale, heads, classes).to(device)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=lr, weight_decay=DECAY)
    generator = torch.Generator().manual_seed(seed)
    total = epochs * math.ceil(len(rows) / _BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / total)))
    with progress_bar("attentive probe", total, unit="steps") as advance:
        for _ in range(epochs):
            for chosen in rows[torch.randperm(len(rows), generator=generator)].split(_BATCH):  # type: ignore[no-untyped-call]
                loss = F.cross_entropy(probe(tokens[chosen].to(device)), labels[chosen].to(device))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                advance(1)
    return probe


@torch.inference_mode()
def logits(probe: AttentiveProbe, tokens: Tensor) -> Tensor:
    """(N, T, D) → (N, K), on the CPU."""
    blocks = tokens.split(_BATCH)  # type: ignore[no-untyped-call]
    return torch.cat([probe(block.to(probe.mean.device)).cpu() for block in blocks])
