"""Nearest neighbors, a map of the features in two dimensions, and both for the report's explorer.

Shapes: N images, D = the encoder's width.
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

from patchmix.evaluate.knn import HEADLINE_K, TEMPERATURE
from patchmix.progress import progress_bar
from patchmix.report.gallery import Gallery, load_all, load_gallery
from patchmix.report.similarity import nearest
from patchmix.report.style import COLORS, check_suffix, look, outline, picture, picture_grid, short, style, write
from patchmix.settings import ShowMap, ShowNeighbors

SAME, OTHER = COLORS[0], COLORS[5]
LINES = ("-", "--", ":")  # of frames, for the first eight classes, the next and those after


def show_neighbors(settings: ShowNeighbors) -> list[Path]:
    """Draws the nearest images of some queries, a row for each query and run."""
    check_suffix(settings.out)
    gallery = load_gallery(load_all(settings.runs), settings.data, settings.images, device=settings.device)
    queries = gallery.queries(settings.query, settings.queries)
    return write({settings.out: neighbors_figure(gallery, queries, settings.k)})


def show_map(settings: ShowMap) -> list[Path]:
    """Draws thumbnails at their first two principal components, a map for each run."""
    check_suffix(settings.out)
    gallery = load_gallery(load_all(settings.runs), settings.data, settings.images, device=settings.device)
    title = f"{len(gallery):,} images of {gallery.source.name}: first two principal components"
    return write({settings.out: map_figure(gallery, range(len(gallery)), title=title)})


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
    told_apart = classes[: len(COLORS) * len(LINES)]
    handles = [Patch(facecolor="none", label=gallery.name_of(label), **frames[label]) for label in told_apart]
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
