"""How similar images are to an encoder: the paper's figure ("Inter-Instance Similarity Visualization"), nearest
neighbors, a map of the features in two dimensions, and the report's explorer.

Shapes: N images, D = the encoder's width. Similarity s is the cosine of two features.
"""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from matplotlib.patches import Patch
from PIL import Image
from torch import Tensor

from patchmix.evaluate.features import check_finite
from patchmix.evaluate.knn import HEADLINE_K, TEMPERATURE
from patchmix.progress import progress_bar
from patchmix.report.gallery import Gallery, load_all, load_gallery, spread
from patchmix.report.style import COLORS, check_suffix, look, outline, picture, picture_grid, short, style, write
from patchmix.settings import ShowMap, ShowNeighbors, ShowSimilarity

SAME, OTHER = COLORS[0], COLORS[5]
LINES = ("-", "--", ":")  # of frames, for the first eight classes, the next and those after
OTHERS = 4  # keys of classes that are neither the query's nor the related one
Keys = dict[int, str]  # rows of a gallery → what they are to a query
KIND_COLORS = {"same class": COLORS[0], "related class": COLORS[1], "another class": COLORS[3], "key": COLORS[0]}


def show_similarity(settings: ShowSimilarity) -> list[Path]:
    """Draws queries, keys and bars of normalized similarity, a panel for each run."""
    gallery = open_gallery(settings)
    comparisons = {row: choose_keys(row, gallery) for row in gallery.queries(settings.query, settings.queries)}
    return write({settings.out: similarity_figure(gallery, comparisons)})


def show_neighbors(settings: ShowNeighbors) -> list[Path]:
    """Draws the nearest images of some queries, a row for each query and run."""
    gallery = open_gallery(settings)
    queries = gallery.queries(settings.query, settings.queries)
    return write({settings.out: neighbors_figure(gallery, queries, settings.k)})


def show_map(settings: ShowMap) -> list[Path]:
    """Draws thumbnails at their first two principal components, a map for each run."""
    gallery = open_gallery(settings)
    title = f"{len(gallery):,} images of {gallery.source.name}: first two principal components"
    return write({settings.out: map_figure(gallery, range(len(gallery)), title=title)})


def open_gallery(settings: ShowMap) -> Gallery:
    check_suffix(settings.out)
    return load_gallery(load_all(settings.runs), settings.data, settings.images, device=settings.device)


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
    parts = []
    for some in torch.tensor(queries).split(1024):  # type: ignore[no-untyped-call]
        similarity = cosine(vectors[some], vectors)
        similarity[torch.arange(len(some)), some] = -torch.inf
        values, places = similarity.sort(dim=1, descending=True, stable=True)
        parts.append((places[:, :k], values[:, :k]))
    places, values = map(torch.cat, zip(*parts, strict=True))
    return places, values


@style()
def neighbors_figure(gallery: Gallery, queries: Sequence[int], k: int) -> Figure:
    """A row for each query and run: the query and its k nearest images with their cosines.

    Where there are labels, neighbors of the query's class have ✓ and a blue frame, others ✗ and a vermilion one.
    """
    ranked = [(name, *nearest(vectors, queries, k)) for name, vectors in gallery.runs]
    pictures = gallery.pictures(sorted({*queries, *(row for _, rows, _ in ranked for row in rows.flatten().tolist())}))
    height = len(queries) * len(ranked)
    figure, axes = picture_grid(height, k + 1, (1.15 * (k + 1) + 0.3, 1.4 * height + 0.3))
    lines = iter(axes)
    for q, query in enumerate(queries):
        for name, rows, cosines in ranked:
            first, *others = next(lines)
            title = short(name, 20) if len(ranked) > 1 else "query"
            picture(first, pictures[query], f"{title}\n{gallery.class_name(query)}")
            for axis, row, cosine in zip(others, rows[q].tolist(), cosines[q].tolist(), strict=True):
                text = f"{cosine:.3f}"
                if gallery.labels is not None:
                    same = bool(gallery.labels[row] == gallery.labels[query])
                    text = f"{'✓' if same else '✗'} {text}\n{gallery.class_name(row)}"
                    outline(axis, SAME if same else OTHER)
                picture(axis, pictures[row], text)
    figure.suptitle(f"the {k} nearest of {len(gallery):,} images, by cosine", y=1.0)
    figure.tight_layout()
    return figure


def choose_keys(query: int, gallery: Gallery) -> Keys:
    """Keys as in the paper's figure: in the middle one of the query's class, next to it two of a related class.

    The related class is the one whose mean feature is nearest, averaged over the encoders. OTHERS are one each of the
    remaining classes. Of a class the first image is taken, so that no encoder is favored. Without labels the keys are
    spread evenly over the set.
    """
    labels = gallery.labels
    if labels is None:
        spaced = [row for row in spread(len(gallery), OTHERS + 4) if row != query]
        return dict.fromkeys(spaced[: OTHERS + 3], "key")
    own = int(labels[query])
    order = _classes_by_nearness(own, labels, [vectors for _, vectors in gallery.runs])

    def first(label: int, count: int) -> list[int]:
        return [row for row in (labels == label).nonzero().flatten().tolist() if row != query][:count]

    near = first(order[0], 2) if order else []
    far = [row for label in order[:0:-1][:OTHERS] for row in first(label, 1)]
    same, half = first(own, 1), -(-len(far) // 2)
    kinds = dict.fromkeys(same, "same class") | dict.fromkeys(near, "related class")
    keys = (*far[:half], *near[:1], *same, *near[1:], *far[half:])
    return {key: kinds.get(key, "another class") for key in keys}


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


def principal_plane(vectors: Tensor) -> Tensor:
    """(N, D) → (N, 2): the first two principal components of the directions."""
    if len(vectors) < 3:
        raise ValueError(f"a map needs at least 3 images, not {len(vectors)}; give more")
    return principal_components(F.normalize(vectors.float(), dim=1).double(), 2)


def principal_components(vectors: Tensor, count: int) -> Tensor:
    """(N, D) → (N, count)."""
    left, singular, _ = torch.linalg.svd(vectors - vectors.mean(dim=0), full_matrices=False)
    components = left[:, :count] * singular[:count]
    peaks = components.gather(0, components.abs().argmax(dim=0, keepdim=True))
    signed: Tensor = components * peaks.sign()  # an SVD leaves the signs open: the farthest row is on the positive side
    return signed


@style()
def map_figure(gallery: Gallery, rows: Sequence[int], *, most: int | None = None, title: str = "") -> Figure:
    """A map of some rows for each of at most `most` runs, thumbnails framed in their class's color."""
    rows, runs, side = list(rows), gallery.runs[:most], 5.6
    labels = [-1] * len(rows) if gallery.labels is None else gallery.labels[rows].tolist()
    frames: dict[int, dict[str, Any]] = {-1: {"edgecolor": "none"}}
    classes = sorted(set(labels) - {-1})
    for i, label in enumerate(classes):
        color, line = look(i, LINES)
        frames[label] = {"edgecolor": color, "linestyle": line, "linewidth": 1.2}
    pictures = gallery.pictures(rows, size=32)
    figure = Figure(figsize=(side * len(runs), side + 0.6))
    for axis, (name, vectors) in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs, strict=True):
        plane = principal_plane(vectors[rows])
        zoom = 72 * side / 24 / 32 * (300 / max(len(rows), 60)) ** 0.25
        axis.scatter(plane[:, 0].numpy(), plane[:, 1].numpy(), s=1, alpha=0)  # sets the limits
        for row, label, place in zip(rows, labels, plane.tolist(), strict=True):
            image = OffsetImage(pictures[row], zoom=zoom)
            axis.add_artist(AnnotationBbox(image, tuple(place), pad=0.08, bboxprops=frames[label]))
        axis.set(title=name, xticks=[], yticks=[])
        axis.margins(0.06)
        axis.grid(False)
    named = classes[: len(COLORS) * len(LINES)]
    handles = [Patch(facecolor="none", label=gallery.name_of(label), **frames[label]) for label in named]
    if handles:
        figure.legend(handles=handles, loc="lower center", ncols=min(6, len(handles)), fontsize=7)
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0.035 * -(-len(handles) // 6), 1, 1))
    return figure


def pack_explorer(gallery: Gallery, *, size: int = 64) -> dict[str, Any]:
    """What explorer.js reads: thumbnails of `size` px, names, labels, and for each run all neighbors and the map."""
    labels = None if gallery.labels is None else gallery.labels.tolist()
    most = min(HEADLINE_K, len(gallery) - 1)
    runs = []
    for name, vectors in gallery.runs:
        places, cosines = nearest(vectors, range(len(vectors)), most)
        runs.append(
            {
                "name": name,
                "neighbors": places.tolist(),
                "cosines": [[round(value, 5) for value in row] for row in cosines.tolist()],
                "map": _unit_square(principal_plane(vectors)),
            }
        )
    thumbs = []
    with progress_bar("thumbnails", len(gallery)) as advance:
        for row in range(len(gallery)):
            thumbs.append(_webp(gallery.pictures([row], size)[row]))
            advance(1)
    return {
        "thumbs": thumbs,
        "keys": [gallery.source.key(position) for position in gallery.positions],
        "labels": labels,
        "classes": labels and [gallery.name_of(label) for label in range(max(labels) + 1)],
        "temperature": TEMPERATURE,
        "most": most,
        "runs": runs,
    }


def _unit_square(plane: Tensor) -> list[float]:
    """x and y of each image in turn, in 0…1 with three digits."""
    low, high = plane.amin(dim=0), plane.amax(dim=0)
    return [round(value, 3) for value in ((plane - low) / (high - low).clamp_min(1e-12)).flatten().tolist()]


def _webp(image: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="webp", quality=72)
    return base64.b64encode(buffer.getvalue()).decode()
