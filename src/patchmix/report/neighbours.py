"""What an encoder finds alike: nearest neighbours, and a map of the embeddings in two dimensions.

Shapes: N images, D = the encoder's width.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from torch import Tensor

from patchmix.report.figures import outline, picture, short
from patchmix.report.similarity import nearest
from patchmix.report.style import COLORS, style

MapMethod = Literal["pca", "tsne", "umap"]
SAME, OTHER = COLORS[0], COLORS[5]
Line = Literal["-", "--", ":"]
LINES: tuple[Line, ...] = get_args(Line)  # for the first eight classes, the next and those after


def neighbours_figure(
    queries: Sequence[int],
    pictures: dict[int, np.ndarray],
    runs: Sequence[tuple[str, Tensor]],
    *,
    k: int = 8,
    labels: Tensor | None = None,
    names: Sequence[str] | None = None,
) -> Figure:
    """A row for each query and run: the query and its k nearest images with their cosines.

    pictures: by position, those of the queries and of all their neighbours. Where there are labels, neighbours of the
    query's class have ✓ and a blue frame, others ✗ and a vermilion one. names: of the classes.
    """
    found = [(name, *nearest(vectors, queries, k)) for name, vectors in runs]
    rows = len(queries) * len(runs)
    with style():
        figure = Figure(figsize=(1.15 * (k + 1) + 0.3, 1.4 * rows + 0.3))
        axes = figure.subplots(rows, k + 1, squeeze=False)
        for q, query in enumerate(queries):
            for r, (name, places, values) in enumerate(found):
                row = axes[q * len(runs) + r]
                label = "" if labels is None else _class_name(int(labels[query]), names)
                picture(row[0], pictures[query], f"{short(name, 20)}\n{label}" if len(runs) > 1 else f"query\n{label}")
                for i in range(k):
                    place = int(places[q, i])
                    text, color = f"{values[q, i]:.3f}", "none"
                    if labels is not None:
                        same = bool(labels[place] == labels[query])
                        text = f"{'✓' if same else '✗'} {text}\n{_class_name(int(labels[place]), names)}"
                        color = SAME if same else OTHER
                    picture(row[i + 1], pictures[place], text)
                    outline(row[i + 1], color)
        figure.suptitle(f"the {k} nearest of {len(runs[0][1]):,} images, by cosine", y=1.0)
        figure.tight_layout()
    return figure


def flatten_to_map(vectors: Tensor, method: MapMethod = "pca", *, seed: int = 0) -> Tensor:
    """(N, D) → (N, 2): the first two principal components of the directions, or t-SNE or UMAP where installed."""
    if method not in get_args(MapMethod):
        raise ValueError(f"the map's method is {method!r}; it must be one of {', '.join(get_args(MapMethod))}")
    if len(vectors) < 3:
        raise ValueError(f"a map needs at least 3 images, not {len(vectors)}; give more")
    unit = F.normalize(vectors.float(), dim=1).double()
    if method == "pca":
        centred = unit - unit.mean(dim=0)
        left, singular, _ = torch.linalg.svd(centred, full_matrices=False)
        plane = left[:, :2] * singular[:2]
        peaks = plane.gather(0, plane.abs().argmax(dim=0, keepdim=True))
        turned: Tensor = plane * peaks.sign()
        return turned  # an SVD leaves the signs open: the farthest image is on the positive side
    if method == "tsne":
        sklearn = _optional("sklearn.manifold", "t-SNE", "scikit-learn")
        perplexity = min(30.0, (len(vectors) - 1) / 3)
        made = sklearn.TSNE(metric="cosine", init="random", perplexity=perplexity, random_state=seed)
    else:
        umap = _optional("umap", "UMAP", "umap-learn")
        neighbours = min(15, len(vectors) - 1)
        start = "spectral" if len(vectors) > 4 else "random"  # for so few there is no spectral one
        made = umap.UMAP(metric="cosine", n_neighbors=neighbours, init=start, n_jobs=1, random_state=seed)
    return torch.from_numpy(np.asarray(made.fit_transform(unit.numpy()), dtype=np.float64))


def map_figure(
    pictures: Sequence[np.ndarray],
    runs: Sequence[tuple[str, Tensor]],
    *,
    labels: Tensor | None = None,
    names: Sequence[str] | None = None,
    title: str = "",
) -> Figure:
    """A map for each run, thumbnails at their places, framed in their class's colour. runs: name and (N, 2)."""
    classes = [] if labels is None else torch.unique(labels).tolist()
    frames = {c: class_frame(i) for i, c in enumerate(classes)}
    side = 5.6
    with style():
        figure = Figure(figsize=(side * len(runs), side + 0.6))
        for axis, (name, plane) in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs, strict=True):
            zoom = 72 * side / 24 / max(pictures[0].shape[:2]) * (300 / max(len(pictures), 60)) ** 0.25
            axis.scatter(plane[:, 0].numpy(), plane[:, 1].numpy(), s=1, alpha=0)  # sets the limits
            for i, image in enumerate(pictures):
                color, line = ("none", "-") if labels is None else frames[int(labels[i])]
                frame = {"edgecolor": color, "linestyle": line, "linewidth": 1.2}
                box = OffsetImage(image, zoom=zoom)
                axis.add_artist(
                    AnnotationBbox(box, (float(plane[i, 0]), float(plane[i, 1])), pad=0.08, bboxprops=frame)
                )
            axis.set(title=name, xticks=[], yticks=[])
            axis.margins(0.06)
            axis.grid(False)
        handles = [
            Line2D([], [], color=frames[c][0], linestyle=frames[c][1], label=_class_name(c, names))
            for c in classes[: len(COLORS) * len(LINES)]
        ]
        if handles:
            figure.legend(handles=handles, loc="lower center", ncols=min(6, len(handles)), fontsize=7)
        figure.suptitle(title)
        rows = -(-len(handles) // 6)
        figure.tight_layout(rect=(0, 0.035 * rows, 1, 1))
    return figure


def class_frame(index: int) -> tuple[str, Line]:
    """Colour and line: eight colours that all eyes tell apart, then the same with other lines."""
    return COLORS[index % len(COLORS)], LINES[index // len(COLORS) % len(LINES)]


def _class_name(label: int, names: Sequence[str] | None) -> str:
    return names[label] if names is not None and 0 <= label < len(names) else f"class {label}"


def _optional(module: str, what: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{what} needs {package}, which is not installed; pip install {package}, or use pca"
        ) from error
