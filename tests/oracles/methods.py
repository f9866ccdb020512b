"""The objectives of the methods, written out from their papers one image and one class at a time, in Python floats."""

from __future__ import annotations

import math

from torch import Tensor

Matrix = list[list[float]]


def rows(x: Tensor) -> Matrix:
    return [[float(v) for v in row] for row in x.detach().double()]


def unit(v: list[float]) -> list[float]:
    length = math.sqrt(sum(a * a for a in v))
    return [a / length for a in v]


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def log_softmax(v: list[float]) -> list[float]:
    top = max(v)
    total = math.log(sum(math.exp(a - top) for a in v)) + top
    return [a - total for a in v]


def ctr(q: Tensor, k: Tensor, tau: float) -> float:
    """MoCo v3, Algorithm 1: cross-entropy of q·kᵀ/τ against the diagonal, times 2τ."""
    queries, keys = [unit(v) for v in rows(q)], [unit(v) for v in rows(k)]
    n = len(queries)
    return 2 * tau * -sum(log_softmax([dot(queries[i], key) / tau for key in keys])[i] for i in range(n)) / n


def nt_xent(z1: Tensor, z2: Tensor, tau: float) -> float:
    """SimCLR, Eq. 1 and Algorithm 1, over all 2N anchors."""
    z = [unit(v) for v in rows(z1) + rows(z2)]
    n = len(z) // 2
    total = 0.0
    for i in range(2 * n):
        j = (i + n) % (2 * n)
        denominator = sum(math.exp(dot(z[i], z[k]) / tau) for k in range(2 * n) if k != i)
        total -= math.log(math.exp(dot(z[i], z[j]) / tau) / denominator)
    return total / (2 * n)


def byol(q: Tensor, z: Tensor) -> float:
    """Eq. 2: the squared distance of the normalized prediction and projection."""
    pairs = [(unit(a), unit(b)) for a, b in zip(rows(q), rows(z), strict=True)]
    return sum(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) for a, b in pairs) / len(pairs)


def sinkhorn(scores: Matrix, epsilon: float, iterations: int) -> Matrix:
    """SwAV, appendix A: alternate scaling of exp(scores / ε) to the marginals 1/K and 1/B; rows then sum to 1."""
    b, k = len(scores), len(scores[0])
    q = [[math.exp(v / epsilon) for v in row] for row in scores]
    for _ in range(iterations):
        columns = [sum(q[i][j] for i in range(b)) for j in range(k)]
        q = [[q[i][j] / columns[j] / k for j in range(k)] for i in range(b)]
        q = [[v / sum(row) / b for v in row] for row in q]
    return [[v * b for v in row] for row in q]


def swav(z: list[Tensor], prototypes: Tensor, tau: float, epsilon: float, iterations: int) -> float:
    """Eq. 1 over all views: the codes of the first two, predicted by every other view."""
    c = [unit(v) for v in rows(prototypes)]
    scores = [[[dot(unit(v), proto) for proto in c] for v in rows(view)] for view in z]
    total, terms = 0.0, 0
    for s in (0, 1):
        q = sinkhorn(scores[s], epsilon, iterations)
        for t in range(len(z)):
            if t == s:
                continue
            terms += 1
            for code, score in zip(q, scores[t], strict=True):
                total -= dot(code, log_softmax([v / tau for v in score])) / len(q)
    return total / terms


def sharpened(t: list[float], center: list[float], tau: float) -> list[float]:
    return [math.exp(v) for v in log_softmax([(a - c) / tau for a, c in zip(t, center, strict=True)])]


def dino(s: list[Tensor], t: list[Tensor], center: Tensor, tau_s: float, tau_t: float) -> float:
    """Algorithm 1: H(t, s) of every pair of views but the same, averaged."""
    c = [float(v) for v in center]
    total, terms = 0.0, 0
    for i, teacher in enumerate(t):
        for j, student in enumerate(s):
            if i == j:
                continue
            terms += 1
            for a, b in zip(rows(teacher), rows(student), strict=True):
                total -= dot(sharpened(a, c, tau_t), log_softmax([v / tau_s for v in b])) / len(student)
    return total / terms


def masked_patches(s: Tensor, t: Tensor, mask: Tensor, center: Tensor, tau_s: float, tau_t: float) -> float:
    """iBOT, Eq. 3 for one view: the mean over its masked patches, averaged over images. s, t: (N, T, K)."""
    c = [float(v) for v in center]
    total = 0.0
    for i in range(len(s)):
        places = [j for j in range(s.shape[1]) if mask[i, j]]
        for j in places:
            student, teacher = rows(s[i, j : j + 1])[0], rows(t[i, j : j + 1])[0]
            total -= dot(sharpened(teacher, c, tau_t), log_softmax([v / tau_s for v in student])) / len(places)
    return total / len(s)


def sdmp(q_mix: Tensor, k: Tensor, own: list[float], partner: list[float], tau: float) -> float:
    """A mixed query with weights on the key at its place and on that of its partner, N − 1 − i."""
    queries, keys = [unit(v) for v in rows(q_mix)], [unit(v) for v in rows(k)]
    n, total = len(queries), 0.0
    for i in range(n):
        log_p = log_softmax([dot(queries[i], key) / tau for key in keys])
        total -= own[i] * log_p[i] + partner[i] * log_p[n - 1 - i]
    return total / n


def region(q: Tensor, k: Tensor, beside: Tensor, positive: list[int], tau: float) -> float:
    """RegionCL: InfoNCE with the other region of the same picture among the negatives."""
    queries, keys, others = ([unit(v) for v in rows(x)] for x in (q, k, beside))
    total = 0.0
    for i, query in enumerate(queries):
        logits = [dot(query, key) / tau for key in keys] + [dot(query, others[i]) / tau]
        total -= log_softmax(logits)[positive[i]]
    return total / len(queries)
