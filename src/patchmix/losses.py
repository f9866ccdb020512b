"""The soft-target contrast, and the values it is compared with.

N queries, K keys. A target row says how similar query i should be to every key. It sums to 1 for origin-to-origin
and mix-to-origin, and to M for mix-to-mix as printed in the paper (Eq. 12).
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS = 1 << 24  # held at a time: 64 MB. More of them are computed block by block, and again in the backward pass


def mean_of_rows(value: Callable[..., Tensor], *rows: Tensor, width: int) -> Tensor:
    """The mean of value(*rows), (n, …) each → (n,), which holds `width` numbers for each row.

    Above `LOGITS` numbers the rows are taken in blocks, and what a block holds is computed again for its gradient.
    """
    size, n = max(1, LOGITS // max(1, width)), len(rows[0])
    if n <= size:
        return value(*rows).mean()
    blocks = zip(*(each.split(size) for each in rows), strict=True)  # type: ignore[no-untyped-call]
    sums = [checkpoint(lambda *block: value(*block).sum(), *block, use_reentrant=False) for block in blocks]
    return torch.stack(sums).sum() / n


def contrast(queries: Tensor, keys: Tensor, target: Tensor, temperature: float) -> Tensor:
    """−1/N Σ_i Σ_j target_ij · log softmax_j(sim(query_i, key_j) / τ), with cosine similarity (Eqs. 13-15).

    queries: (N, D), keys: (K, D), target: (N, K). Gradients flow into queries and keys: detach the keys for the
    paper's stop-gradient. Logits are fp32 under any autocast.

    Examples:
        >>> queries, keys = torch.eye(3), torch.eye(3)
        >>> contrast(queries, keys, target=torch.eye(3), temperature=0.2)
        tensor(0.0134)
    """
    with torch.autocast(queries.device.type, enabled=False):
        k = F.normalize(keys.float(), dim=1)

        def of(q: Tensor, target: Tensor) -> Tensor:
            similarity = F.normalize(q.float(), dim=1) @ k.T
            return -(target * F.log_softmax(similarity / temperature, dim=1)).sum(dim=1)

        return mean_of_rows(of, queries, target, width=len(keys))


def cross_entropy(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """−Σ_k target_k · log softmax_k(logits / τ) of each row: (…, K), (…, K) → (…), in fp32 under any autocast."""
    with torch.autocast(logits.device.type, enabled=False):
        return -(target * F.log_softmax(logits.float() / temperature, dim=-1)).sum(dim=-1)


def swapped_prediction(scores: Sequence[Tensor], targets: Sequence[Tensor], temperature: float) -> Tensor:
    """The mean cross-entropy of every view's scores with the targets of each other view; the first views have targets.

    scores: one (N, K) per view, targets: one (N, K) for each of the first views.
    """
    pairs = [(scores[j], targets[i]) for i in range(len(targets)) for j in range(len(scores)) if j != i]
    return torch.stack([cross_entropy(s, t, temperature).mean() for s, t in pairs]).mean()


def entropy(target: Tensor) -> Tensor:
    """The lowest cross-entropy of each row that sums to 1: (…, K) → (…)."""
    value: Tensor = -torch.special.xlogy(target, target).sum(dim=-1)
    return value


def chance(target: Tensor) -> Tensor:
    """The contrast of a model for which all K keys are equally similar: ln K × row sum.

    Examples:
        >>> chance(torch.eye(8)), floor(torch.full((8, 8), 1 / 8))
        (tensor(2.0794), tensor(2.0794))
    """
    return target.sum(dim=1).mean() * math.log(target.shape[1])


def floor(target: Tensor) -> Tensor:
    """The lowest value the contrast can take with this target: its entropy, −Σ t ln(t / row sum)."""

    def of(target: Tensor) -> Tensor:
        proportion = target / target.sum(dim=1, keepdim=True)
        entropy: Tensor = -torch.special.xlogy(target, proportion).sum(dim=1)
        return entropy

    return mean_of_rows(of, target, width=target.shape[1])


def smooth(target: Tensor, smoothing: float) -> Tensor:
    """Label smoothing over all K keys: (1 − ε)·t + ε/K."""
    return (1.0 - smoothing) * target + smoothing / target.shape[1]


def pad_targets(target: Tensor, keys: int, offset: int) -> Tensor:
    """A process's (N, n) targets among the keys gathered from all processes: (N, K), zero elsewhere."""
    return F.pad(target, (offset, keys - offset - target.shape[1]))


class Terms:
    """Adds up the weighted terms of a loss, and logs each with its chance and floor."""

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature
        self.entries: dict[str, Tensor] = {}
        self.loss: Tensor | float = 0.0

    def add(self, name: str, weight: float | Tensor, *pairs: tuple[Tensor, Tensor], target: Tensor) -> None:
        """The sum of the contrasts of several (queries, keys) that have the same target."""
        value = torch.stack([contrast(h, z, target, self.temperature) for h, z in pairs]).sum()
        self.add_value(name, weight, value, chance=len(pairs) * chance(target), floor=len(pairs) * floor(target))

    def add_value(
        self, name: str, weight: float | Tensor, value: Tensor, *, chance: float | Tensor, floor: float | Tensor = 0.0
    ) -> None:
        """Any term; a known name is added to."""
        self.loss = self.loss + weight * value
        for kind, each in {"": value, "/chance": chance, "/floor": floor}.items():
            self.entries[name + kind] = self.entries.get(name + kind, torch.zeros_like(value)) + each

    def total(self) -> dict[str, Tensor]:
        assert isinstance(self.loss, Tensor)
        return {"loss": self.loss, **self.entries}
