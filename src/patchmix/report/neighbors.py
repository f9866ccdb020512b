"""Nearest neighbors, a map of the features in two dimensions, and both packed for the report's explorer.

Shapes: N images, D = the encoder's width.
"""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from PIL import Image, features
from torch import Tensor

from patchmix.evaluate.knn import HEADLINE_K, TEMPERATURE
from patchmix.report.gallery import Gallery, class_name, load_all, load_gallery
from patchmix.report.similarity import nearest
from patchmix.report.style import COLORS, check_suffix, outline, picture, short, style, write
from patchmix.settings import ShowMap, ShowNeighbors

SAME, OTHER = COLORS[0], COLORS[5]
Line = Literal["-", "--", ":"]
LINES: tuple[Line, ...] = get_args(Line)  # for the first eight classes, the next and those after


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


def neighbors_figure(gallery: Gallery, queries: Sequence[int], k: int) -> Figure:
    """A row for each query and run: the query and its k nearest images with their cosines.

    Where there are labels, neighbors of the query's class have ✓ and a blue frame, others ✗ and a vermilion one.
    """
    ranked = [(name, *nearest(vectors, queries, k)) for name, vectors in gallery.runs]
    several = len(ranked) > 1
    pictures = gallery.pictures(sorted({*queries, *(row for _, rows, _ in ranked for row in rows.flatten().tolist())}))
    with style():
        height = len(queries) * len(ranked)
        figure = Figure(figsize=(1.15 * (k + 1) + 0.3, 1.4 * height + 0.3))
        axes = figure.subplots(height, k + 1, squeeze=False)
        for q, query in enumerate(queries):
            for r, (name, rows, cosines) in enumerate(ranked):
                line = axes[q * len(ranked) + r]
                first = short(name, 20) if several else "query"
                picture(line[0], pictures[query], f"{first}\n{gallery.class_name(query)}")
                for axis, row, cosine in zip(line[1:], rows[q].tolist(), cosines[q].tolist(), strict=True):
                    text, color = f"{cosine:.3f}", "none"
                    if gallery.labels is not None:
                        same = bool(gallery.labels[row] == gallery.labels[query])
                        text = f"{'✓' if same else '✗'} {text}\n{gallery.class_name(row)}"
                        color = SAME if same else OTHER
                    picture(axis, pictures[row], text)
                    outline(axis, color)
        figure.suptitle(f"the {k} nearest of {len(gallery):,} images, by cosine", y=1.0)
        figure.tight_layout()
    return figure


def principal_plane(vectors: Tensor) -> Tensor:
    """(N, D) → (N, 2): the first two principal components of the directions."""
    if len(vectors) < 3:
        raise ValueError(f"a map needs at least 3 images, not {len(vectors)}; give more")
    unit = F.normalize(vectors.float(), dim=1).double()
    left, singular, _ = torch.linalg.svd(unit - unit.mean(dim=0), full_matrices=False)
    plane = left[:, :2] * singular[:2]
    peaks = plane.gather(0, plane.abs().argmax(dim=0, keepdim=True))
    signed: Tensor = plane * peaks.sign()  # an SVD leaves the signs open: the farthest image is on the positive side
    return signed


def map_figure(gallery: Gallery, rows: Sequence[int], *, most: int | None = None, title: str = "") -> Figure:
    """A map of some rows for each of at most `most` runs, thumbnails framed in their class's color."""
    rows = list(rows)
    runs = gallery.runs[:most]
    labels = None if gallery.labels is None else gallery.labels[rows].tolist()
    classes = [] if labels is None else sorted(set(labels))
    frames = {c: class_frame(i) for i, c in enumerate(classes)}
    pictures = gallery.pictures(rows, size=32)
    side = 5.6
    with style():
        figure = Figure(figsize=(side * len(runs), side + 0.6))
        for axis, (name, vectors) in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs, strict=True):
            plane = principal_plane(vectors[rows])
            zoom = 72 * side / 24 / 32 * (300 / max(len(rows), 60)) ** 0.25
            axis.scatter(plane[:, 0].numpy(), plane[:, 1].numpy(), s=1, alpha=0)  # sets the limits
            for i, row in enumerate(rows):
                color, line = ("none", "-") if labels is None else frames[labels[i]]
                frame = {"edgecolor": color, "linestyle": line, "linewidth": 1.2}
                image = OffsetImage(pictures[row], zoom=zoom)
                axis.add_artist(AnnotationBbox(image, tuple(plane[i].tolist()), pad=0.08, bboxprops=frame))
            axis.set(title=name, xticks=[], yticks=[])
            axis.margins(0.06)
            axis.grid(False)
        handles = [
            Line2D([], [], color=frames[c][0], linestyle=frames[c][1], label=class_name(c, gallery.source.classes))
            for c in classes[: len(COLORS) * len(LINES)]
        ]
        if handles:
            figure.legend(handles=handles, loc="lower center", ncols=min(6, len(handles)), fontsize=7)
        figure.suptitle(title)
        figure.tight_layout(rect=(0, 0.035 * -(-len(handles) // 6), 1, 1))
    return figure


def class_frame(index: int) -> tuple[str, Line]:
    """Color and line: eight colors that color-blind readers can tell apart, then the same with other lines."""
    return COLORS[index % len(COLORS)], LINES[index // len(COLORS) % len(LINES)]


# ------------------------------------------------------------------------------------------------------- the explorer

WIDE_BYTES = 6_500_000  # up to this many bytes of codes in a page they have 16 bits, beyond 8
Codes = npt.NDArray[np.int8] | npt.NDArray[np.int16]


def pack_explorer(gallery: Gallery, *, size: int = 64) -> dict[str, Any]:
    """What explorer.js reads: thumbnails of `size` px, names, labels, and each run's quantized features and map."""
    if len(gallery) < 3:
        raise ValueError(f"the explorer needs at least 3 images, not {len(gallery)}; give more data")
    for name, vectors in gallery.runs:
        if not bool(torch.isfinite(vectors).all()):
            raise ValueError(f"{name} has features that are NaN or infinite; use an earlier checkpoint")
    most = min(HEADLINE_K, len(gallery) - 1)
    bits = 16 if sum(2 * vectors.numel() for _, vectors in gallery.runs) <= WIDE_BYTES else 8
    kind = "webp" if features.check("webp") else "jpeg"
    labels = None if gallery.labels is None else gallery.labels.tolist()
    return {
        "format": kind,
        "thumbs": [_encoded(image, kind) for image in gallery.pictures(range(len(gallery)), size).values()],
        "keys": [gallery.source.key(position) for position in gallery.positions],
        "labels": labels,
        "classes": labels and [class_name(i, gallery.source.classes) for i in range(max(labels) + 1)],
        "temperature": TEMPERATURE,
        "most": most,
        "runs": [
            {"name": name, "map": _unit_square(vectors), **pack_vectors(vectors, bits=bits, most=most)}
            for name, vectors in gallery.runs
        ],
    }


def pack_vectors(vectors: Tensor, *, bits: int = 16, most: int = HEADLINE_K) -> dict[str, Any]:
    """Quantized features, and the neighbors of those queries for which quantizing changed the order.

    So the page's first `most` neighbors are exactly those of `nearest`, for every image. With 16 bits few queries need
    a repair; with 8 most do, and a cosine may be off in its third digit.
    """
    codes = quantize(vectors, bits)
    exact = nearest(vectors, range(len(vectors)), most)[0].numpy()
    changed = np.flatnonzero((exact != nearest_by_codes(codes, most)).any(axis=1))
    return {
        "bits": bits,
        "dim": codes.shape[1],
        "codes": base64.b64encode(np.ascontiguousarray(codes, codes.dtype.newbyteorder("<")).tobytes()).decode(),
        "repairs": {str(i): exact[i].tolist() for i in changed.tolist()},
    }


def quantize(vectors: Tensor, bits: int) -> Codes:
    """(N, D) → integers: each direction scaled so that its largest component is the largest integer."""
    unit = F.normalize(vectors.float(), dim=1).double()
    largest = float(2 ** (bits - 1) - 1)
    scaled = (unit / unit.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) * largest).round()
    return scaled.numpy().astype(np.int8) if bits == 8 else scaled.numpy().astype(np.int16)


def nearest_by_codes(codes: Codes, most: int) -> npt.NDArray[np.int64]:
    """What explorer.js computes: (N, most). Sums are whole numbers below 2⁵³, so both are equal to the last bit."""
    whole = codes.astype(np.float64)
    lengths = np.sqrt((whole * whole).sum(axis=1))
    parts = []
    for start in range(0, len(whole), 1024):
        part = slice(start, start + 1024)
        scale = lengths[part, None] * lengths[None]
        cosine = (whole[part] @ whole.T) / np.where(scale == 0, 1, scale)
        rows = np.arange(len(cosine))
        cosine[rows, rows + start] = -np.inf
        parts.append(np.argsort(-cosine, axis=1, kind="stable")[:, :most])
    return np.concatenate(parts)


def _unit_square(vectors: Tensor) -> list[float]:
    """x and y of each image in turn, in 0…1 with three digits."""
    plane = principal_plane(vectors)
    low, high = plane.amin(dim=0), plane.amax(dim=0)
    return [round(value, 3) for value in ((plane - low) / (high - low).clamp_min(1e-12)).flatten().tolist()]


def _encoded(image: npt.NDArray[np.uint8], kind: str) -> str:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format=kind, quality=72)
    return base64.b64encode(buffer.getvalue()).decode()
