"""How similar a query is to some keys (the paper's "Inter-Instance Similarity Visualization").

Shapes: N images, D = the encoder's width. Similarity s is the cosine of two features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from patchmix.evaluate.features import check_finite
from patchmix.evaluate.knn import TEMPERATURE
from patchmix.report.gallery import Gallery, load_all, load_gallery, spread
from patchmix.report.style import COLORS, check_suffix, outline, picture, short, style, write
from patchmix.settings import ShowSimilarity

OTHERS = 4  # keys of classes that are neither the query's nor the related one
KIND_COLORS = {"same class": COLORS[0], "related class": COLORS[1], "another class": COLORS[3], "key": COLORS[0]}


def show_similarity(settings: ShowSimilarity) -> list[Path]:
    """Draws queries, keys and bars of normalized similarity, a panel for each run."""
    check_suffix(settings.out)
    gallery = load_gallery(load_all(settings.runs), settings.data, settings.images, device=settings.device)
    queries = gallery.queries(settings.query, settings.queries)
    keys = gallery.rows(settings.key, "key")
    return write({settings.out: gallery_similarity(gallery, queries, keys=keys, related=settings.related)})


def gallery_similarity(
    gallery: Gallery, queries: Sequence[int], *, keys: Sequence[int] = (), related: int | None = None
) -> Figure:
    """The similarity figure of some rows of a gallery; without `keys` they are chosen by `choose_keys`."""
    vectors = [vectors for _, vectors in gallery.runs]
    comparisons = [
        describe_keys(query, keys, gallery.labels)
        if keys
        else choose_keys(query, gallery.labels, vectors, related=related)
        for query in queries
    ]
    rows = [row for comparison in comparisons for row in (comparison.query, *comparison.keys)]
    names = {row: gallery.class_name(row) for row in rows}
    return similarity_figure(comparisons, gallery.pictures(rows), gallery.runs, class_names=names)


# ------------------------------------------------------------------------------------------------------------ numbers


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """(A, D), (B, D) → (A, B), in float64 from float32 directions, so that the order does not depend on block sizes."""
    return F.normalize(a.float(), dim=1).double() @ F.normalize(b.float(), dim=1).double().T


def normalized(similarity: Tensor) -> Tensor:
    """exp(s/τ′) / exp(1/τ′) with kNN's τ′, in (0, 1]: 1 for the image itself."""
    return torch.exp((similarity - 1) / TEMPERATURE)


def nearest(vectors: Tensor, queries: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """The k images most similar to each query, itself left out: positions and cosines, (len(queries), k) both.

    The order is kNN's (`evaluate.knn`); of equally similar images the first in the set comes first.
    """
    n = len(vectors)
    if not 1 <= k < n:
        raise ValueError(f"k is {k}; with {n} images it must lie between 1 and {n - 1}")
    check_finite(vectors, "the images")
    places, values = [], []
    for part in torch.split(torch.as_tensor(list(queries)), 1024):
        similarity = cosine(vectors[part], vectors)
        similarity[torch.arange(len(part)), part] = -torch.inf
        ordered = similarity.sort(dim=1, descending=True, stable=True)
        places.append(ordered.indices[:, :k])
        values.append(ordered.values[:, :k])
    return torch.cat(places), torch.cat(values)


@dataclass(frozen=True)
class Comparison:
    """A query and the keys it is compared with: positions in the set, and what each key is to the query."""

    query: int
    keys: tuple[int, ...]
    kinds: tuple[str, ...]  # same class, related class, another class; or key


def choose_keys(
    query: int, labels: Tensor | None, vectors: Sequence[Tensor], *, related: int | None = None
) -> Comparison:
    """Keys as in the paper's figure: in the middle one of the query's class, next to it two of a related class.

    The related class is `related`, or the one whose mean feature is nearest, averaged over the encoders in `vectors`,
    (N, D) each. OTHERS are one each of the remaining classes. Of a class the first image is taken, so that no
    encoder is favored. Without labels the keys are spread evenly over the set.
    """
    if labels is None:
        spaced = [i for i in spread(len(vectors[0]), OTHERS + 4) if i != query]
        return describe_keys(query, spaced[: OTHERS + 3], None)
    own = int(labels[query])
    order = _classes_by_nearness(own, labels, vectors)
    if related is not None:
        if related not in order:
            raise ValueError(f"related class {related} has no images or is the query's own; there are {sorted(order)}")
        order.remove(related)
        order.insert(0, related)

    def first(label: int, count: int) -> list[int]:
        return [i for i in (labels == label).nonzero().flatten().tolist() if i != query][:count]

    near = first(order[0], 2) if order else []
    far = [i for label in order[:0:-1][:OTHERS] for i in first(label, 1)]
    half = -(-len(far) // 2)
    keys = (*far[:half], *near[:1], *first(own, 1), *near[1:], *far[half:])
    return describe_keys(query, keys, labels, related=order[0] if order else None)


def describe_keys(query: int, keys: Sequence[int], labels: Tensor | None, *, related: int | None = None) -> Comparison:
    """A comparison with some keys; what they are to the query follows from the labels."""
    if labels is None:
        return Comparison(query, tuple(keys), ("key",) * len(keys))
    names = {related: "related class", int(labels[query]): "same class"}
    return Comparison(query, tuple(keys), tuple(names.get(int(labels[key]), "another class") for key in keys))


@style()
def similarity_figure(
    comparisons: Sequence[Comparison],
    pictures: dict[int, np.ndarray],
    runs: Sequence[tuple[str, Tensor]],
    *,
    class_names: dict[int, str] | None = None,
) -> Figure:
    """A row for each query: the query, its keys, and for each run a panel of bars of the normalized similarity.

    pictures: by position, uint8 (height, width, 3). runs: name and features (N, D). class_names: by position.
    """
    named = class_names or {}
    most = max(len(comparison.keys) for comparison in comparisons)
    figure = Figure(figsize=(1.3 + 0.8 * most + 2.9 * len(runs), 1.5 * len(comparisons) + 0.9))
    widths = [1.2, *([0.8] * most), *([0.5, 2.3] * len(runs))]  # a gap for numbers before each panel
    grid = figure.add_gridspec(len(comparisons), len(widths), width_ratios=widths, wspace=0.12, hspace=0.35)
    for row, comparison in enumerate(comparisons):
        colors = [KIND_COLORS[kind] for kind in comparison.kinds]
        numbers = range(1, len(colors) + 1)
        picture(
            figure.add_subplot(grid[row, 0]), pictures[comparison.query], f"query\n{named.get(comparison.query, '')}"
        )
        for i, key, color in zip(numbers, comparison.keys, colors, strict=True):
            axis = figure.add_subplot(grid[row, i])
            picture(axis, pictures[key], f"{i}\n{named.get(key, '')}")
            outline(axis, color)
        for r, (name, vectors) in enumerate(runs):
            axis = figure.add_subplot(grid[row, 2 + most + 2 * r])
            heights = normalized(cosine(vectors[[comparison.query]], vectors[list(comparison.keys)])[0])
            bars = axis.bar(numbers, heights.numpy(), color=colors)
            axis.bar_label(bars, fmt="%.2f", fontsize=5, padding=1)
            axis.set(ylim=(0, 1.05), title=short(name, 26) if row == 0 else "", xticks=numbers)
            axis.tick_params(labelsize=7)
            axis.set_xlabel("key" if row == len(comparisons) - 1 else "", fontsize=7)
    present = {kind for comparison in comparisons for kind in comparison.kinds}
    handles = [Patch(color=color, label=kind) for kind, color in KIND_COLORS.items() if kind in present]
    figure.legend(handles=handles, loc="upper center", ncols=len(handles), fontsize=8, bbox_to_anchor=(0.5, 0.0))
    figure.suptitle(f"normalized similarity exp(s/τ′)/exp(1/τ′), τ′ = {TEMPERATURE:g}", y=1.0)
    figure.subplots_adjust(top=1 - 0.65 / figure.get_figheight(), bottom=0.3 / figure.get_figheight())
    return figure


def _classes_by_nearness(own: int, labels: Tensor, vectors: Sequence[Tensor]) -> list[int]:
    """All other classes that have images, the most similar mean first."""
    classes = [c for c in torch.unique(labels).tolist() if c != own]
    score = torch.zeros(len(classes), dtype=torch.float64)
    for features in vectors:
        unit = F.normalize(features.float(), dim=1)
        means = torch.stack([unit[labels == c].mean(dim=0) for c in [own, *classes]])
        score += cosine(means[:1], means[1:])[0]
    return [classes[i] for i in score.argsort(descending=True, stable=True).tolist()]
