"""What the explorer holds: thumbnails, and embeddings of few bits whose neighbours are those of kNN.

Shapes: N images, D = the encoder's width.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image, features
from torch import Tensor

from patchmix.evaluate.knn import HEADLINE_K, TEMPERATURE
from patchmix.report.neighbours import flatten_to_map
from patchmix.report.similarity import nearest

WIDE_BYTES = 6_500_000  # up to so many bytes of codes in a page they have 16 bits, beyond 8
Codes = npt.NDArray[np.int8] | npt.NDArray[np.int16]


def pack_explorer(
    pictures: Sequence[npt.NDArray[np.uint8]],
    keys: Sequence[str],
    runs: Sequence[tuple[str, Tensor]],
    *,
    labels: Tensor | None,
    classes: Sequence[str] | None,
    quality: int = 72,
) -> dict[str, Any]:
    """What explorer.js reads. pictures: uint8 (h, w, 3); keys: the images' names; runs: name and features (N, D)."""
    count = len(pictures)
    most = min(HEADLINE_K, count - 1)
    bits = 16 if sum(2 * vectors.numel() for _, vectors in runs) <= WIDE_BYTES else 8
    kind = "webp" if features.check("webp") else "jpeg"
    named = None
    if labels is not None:
        names = list(classes or ())
        named = [names[i] if i < len(names) else f"class {i}" for i in range(int(labels.max()) + 1)]
    return {
        "format": kind,
        "thumbs": [_encoded(picture, kind, quality) for picture in pictures],
        "keys": list(keys),
        "labels": None if labels is None else labels.tolist(),
        "classes": named,
        "temperature": TEMPERATURE,
        "most": most,
        "runs": [
            {"name": name, "map": map_of(vectors), **pack_vectors(vectors, bits=bits, most=most)}
            for name, vectors in runs
        ],
    }


def pack_vectors(vectors: Tensor, *, bits: int = 16, most: int = HEADLINE_K) -> dict[str, Any]:
    """Quantised embeddings, and the neighbours of those queries for which quantising changed their order.

    So the page's first `most` neighbours are exactly those of `nearest`, for every image; with 16 bits few queries need
    a repair, with 8 most do, and a cosine may be off in its third digit.
    """
    codes = quantise(vectors, bits)
    exact = nearest(vectors, range(len(vectors)), most)[0].numpy()
    found = nearest_by_codes(codes, most)
    wrong = np.flatnonzero((exact != found).any(axis=1))
    return {
        "bits": bits,
        "dim": codes.shape[1],
        "codes": base64.b64encode(np.ascontiguousarray(codes, codes.dtype.newbyteorder("<")).tobytes()).decode(),
        "repairs": {str(i): exact[i].tolist() for i in wrong.tolist()},
    }


def map_of(vectors: Tensor) -> list[float]:
    """x and y of each image in turn, in 0…1 with three digits: the first two principal components."""
    plane = flatten_to_map(vectors)
    low, high = plane.amin(dim=0), plane.amax(dim=0)
    return [round(value, 3) for value in ((plane - low) / (high - low).clamp_min(1e-12)).flatten().tolist()]


def quantise(vectors: Tensor, bits: int) -> Codes:
    """(N, D) → integers: each direction scaled so that its largest component is the largest integer."""
    unit = F.normalize(vectors.float(), dim=1).double()
    largest = float(2 ** (bits - 1) - 1)
    scaled = (unit / unit.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) * largest).round()
    return scaled.numpy().astype(np.int8) if bits == 8 else scaled.numpy().astype(np.int16)


def nearest_by_codes(codes: Codes, most: int) -> npt.NDArray[np.int64]:
    """What ranking.js computes: (N, most). Sums are whole numbers below 2⁵³, so both get the same to the last bit."""
    whole = codes.astype(np.float64)
    lengths = np.sqrt((whole * whole).sum(axis=1))
    found = []
    for start in range(0, len(whole), 1024):
        part = slice(start, start + 1024)
        scale = lengths[part, None] * lengths[None]
        cosine = (whole[part] @ whole.T) / np.where(scale == 0, 1, scale)
        rows = np.arange(len(cosine))
        cosine[rows, rows + start] = -np.inf
        found.append(np.argsort(-cosine, axis=1, kind="stable")[:, :most])
    return np.concatenate(found)


def _encoded(picture: npt.NDArray[np.uint8], kind: str, quality: int) -> str:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format=kind, quality=quality)
    return base64.b64encode(buffer.getvalue()).decode()


def check_vectors(name: str, vectors: Tensor) -> None:
    """A ValueError where an explorer makes no sense."""
    if len(vectors) < 3:
        raise ValueError(f"the explorer needs at least 3 images, not {len(vectors)}; give more data")
    if not bool(torch.isfinite(vectors).all()):
        raise ValueError(
            f"{name} has features that are NaN or infinite; its weights are broken, use an earlier checkpoint"
        )
