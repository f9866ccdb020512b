"""How similar a query is to some keys (the paper's "Inter-Instance Similarity Visualization").

Shapes: N images, D = the encoder's width. Similarity s is the cosine of two features.
"""

from collections.abc import Sequence
from pathlib import Path

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
Keys = dict[int, str]  # rows of a gallery → what they are to a query
KIND_COLORS = {"same class": COLORS[0], "related class": COLORS[1], "another class": COLORS[3], "key": COLORS[0]}


def show_similarity(settings: ShowSimilarity) -> list[Path]:
    """Draws queries, keys and bars of normalized similarity, a panel for each run."""
    check_suffix(settings.out)
    gallery = load_gallery(load_all(settings.runs), settings.data, settings.images, device=settings.device)
    queries = gallery.queries(settings.query, settings.queries)
    if keys := gallery.rows(settings.key, "key"):
        comparisons = {query: describe_keys(query, keys, gallery.labels) for query in queries}
    else:
        comparisons = {query: choose_keys(query, gallery, related=settings.related) for query in queries}
    return write({settings.out: similarity_figure(gallery, comparisons)})


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


def choose_keys(query: int, gallery: Gallery, *, related: int | None = None) -> Keys:
    """Keys as in the paper's figure: in the middle one of the query's class, next to it two of a related class.

    The related class is `related`, or the one whose mean feature is nearest, averaged over the encoders. OTHERS are
    one each of the remaining classes. Of a class the first image is taken, so that no encoder is favored. Without
    labels the keys are spread evenly over the set.
    """
    labels = gallery.labels
    if labels is None:
        spaced = [row for row in spread(len(gallery), OTHERS + 4) if row != query]
        return describe_keys(query, spaced[: OTHERS + 3], None)
    own = int(labels[query])
    order = _classes_by_nearness(own, labels, [vectors for _, vectors in gallery.runs])
    if related is not None:
        if related not in order:
            raise ValueError(f"related class {related} has no images or is the query's own; there are {sorted(order)}")
        order.remove(related)
        order.insert(0, related)

    def first(label: int, count: int) -> list[int]:
        return [row for row in (labels == label).nonzero().flatten().tolist() if row != query][:count]

    near = first(order[0], 2) if order else []
    far = [row for label in order[:0:-1][:OTHERS] for row in first(label, 1)]
    half = -(-len(far) // 2)
    keys = (*far[:half], *near[:1], *first(own, 1), *near[1:], *far[half:])
    return describe_keys(query, keys, labels, related=order[0] if order else None)


def describe_keys(query: int, keys: Sequence[int], labels: Tensor | None, *, related: int | None = None) -> Keys:
    """What some keys are to the query: of the same, a related or another class; just "key" without labels."""
    if labels is None:
        return dict.fromkeys(keys, "key")
    names = {related: "related class", int(labels[query]): "same class"}
    return {key: names.get(int(labels[key]), "another class") for key in keys}


@style()
def similarity_figure(gallery: Gallery, comparisons: dict[int, Keys]) -> Figure:
    """A row for each query: the query, its keys, and for each run a panel of bars of the normalized similarity."""
    most, runs = max(map(len, comparisons.values())), gallery.runs
    pictures = gallery.pictures(sorted({row for query, keys in comparisons.items() for row in (query, *keys)}))
    figure = Figure(figsize=(1.3 + 0.8 * most + 2.9 * len(runs), 1.5 * len(comparisons) + 0.9))
    widths = [1.2, *([0.8] * most), *([0.5, 2.3] * len(runs))]  # a gap for numbers before each panel
    grid = figure.add_gridspec(len(comparisons), len(widths), width_ratios=widths, wspace=0.12, hspace=0.35)
    for row, (query, keys) in enumerate(comparisons.items()):
        colors = [KIND_COLORS[kind] for kind in keys.values()]
        numbers = range(1, len(keys) + 1)
        picture(figure.add_subplot(grid[row, 0]), pictures[query], f"query\n{gallery.class_name(query)}")
        for i, key, color in zip(numbers, keys, colors, strict=True):
            axis = figure.add_subplot(grid[row, i])
            picture(axis, pictures[key], f"{i}\n{gallery.class_name(key)}")
            outline(axis, color)
        for r, (name, vectors) in enumerate(runs):
            axis = figure.add_subplot(grid[row, 2 + most + 2 * r])
            heights = normalized(cosine(vectors[[query]], vectors[list(keys)])[0])
            bars = axis.bar(numbers, heights.numpy(), color=colors)
            axis.bar_label(bars, fmt="%.2f", fontsize=5, padding=1)
            axis.set(ylim=(0, 1.05), title=short(name, 26) if row == 0 else "", xticks=numbers)
            axis.tick_params(labelsize=7)
            axis.set_xlabel("key" if row == len(comparisons) - 1 else "", fontsize=7)
    present = {kind for keys in comparisons.values() for kind in keys.values()}
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
