"""patchmix show …, patchmix report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from patchmix.cli.arguments import Count, Data, File, Text

Runs = Positional[Annotated[tuple[str, ...], arg(metavar="RUN")]]


def show_mix(
    data: Data,
    /,
    out: Path = Path("mix.png"),
    mix: str = "patchmix",
    num_mix: int = 3,
    patch_size: int = 8,
    size: int = 64,
    images: int = 6,
    seed: int = 0,
) -> None:
    """Draw originals and their mixes, every patch framed in the colour of its original.

    Args:
        data: As for pretrain.
        out: A .png, .svg or .pdf; the target matrices go beside it, as NAME-targets.
        mix: patchmix, mixup, cutmix, cutmix+mixup, resizemix or regionswap.
        num_mix: Images in a mix of patches, M.
        patch_size: Side of a patch in pixels of the picture.
        size: Side of the centre crop that is shown.
        images: How many images of DATA to take.
        seed: Of the mix's random numbers.
    """
    from patchmix.mixing import create_mix
    from patchmix.report.pictures import show_mix

    other = None if mix == "patchmix" else create_mix(mix, patch_size=patch_size)
    show_mix(data, out, num_mix=num_mix, patch_size=patch_size, size=size, images=images, seed=seed, mix=other)


def show_curves(
    runs: Runs,
    /,
    out: Path = Path("curves.png"),
    axis: Literal["epochs", "images", "hours", "flops"] = "epochs",
    smoothing: float = 0.0,
) -> None:
    """Draw losses between floor and chance, kNN, rank, rates and speed of one or several runs.

    Args:
        runs: Run folders.
        out: A .png, .svg or .pdf.
        axis: What the horizontal axis counts.
        smoothing: From 0 to 1.
    """
    from patchmix.report.pictures import show_curves
    from patchmix.study.reporting import facts_of

    costs = [facts_of(run).flops_per_image or 0.0 for run in runs] if axis == "flops" else None
    show_curves(runs, out, axis=axis, smoothing=smoothing, flops_per_image=costs)


def show_similarity(
    runs: Runs,
    /,
    data: str,
    out: Path = Path("similarity.png"),
    query: tuple[str, ...] = (),
    key: tuple[int, ...] = (),
    related: Count = None,
    queries: int = 3,
    images: int = 1000,
    device: str = "auto",
) -> None:
    """Draw how similar some images are in the eyes of one or several encoders (the paper's similarity figure).

    Args:
        runs: Run folders, encoder files or timm:NAME.
        data: Whose images are compared.
        out: A .png, .svg or .pdf.
        query: Paths or positions of images to ask about; by default some of different classes.
        key: Positions of images to compare with; by default one of the same class, two of a related one, and others.
        related: The number of the class that counts as related; by default the nearest.
        queries: How many, where none are named.
        images: At most so many of DATA are read.
        device: auto, cpu or cuda.
    """
    from patchmix.report.pictures import show_similarity

    show_similarity(
        runs, data, out, query=_asked(query), keys=key or None, related=related, queries=queries, images=images,
        device=device,
    )  # fmt: skip


def show_attention(
    runs: Runs,
    /,
    data: Text = None,
    image: tuple[Path, ...] = (),
    out: Path = Path("attention.png"),
    block: int = -1,
    images: int = 3,
    position: tuple[int, ...] = (),
    size: Count = None,
    device: str = "cpu",
) -> None:
    """Draw where the class token attends, one map per head.

    Args:
        runs: Run folders, encoder files or timm:NAME.
        data: Whose images are shown.
        image: Image files instead of DATA.
        out: A .png, .svg or .pdf.
        block: 0 is the first, -1 the last.
        images: How many images of DATA.
        position: Which images instead.
        size: Side of the input in pixels; a larger one gives finer maps.
        device: cpu or cuda.
    """
    from patchmix.report.pictures import show_attention

    if (data is None) == (not image):
        raise ValueError("give either --data DATA or --image FILE …")
    images = len(image) or images
    show_attention(
        runs, data or image, out, block=block, images=images, positions=position or None, size=size, device=device
    )  # fmt: skip


def show_neighbours(
    runs: Runs,
    /,
    data: str,
    out: Path = Path("neighbours.png"),
    query: tuple[str, ...] = (),
    queries: int = 5,
    k: int = 8,
    images: int = 2000,
    device: str = "auto",
) -> None:
    """Draw the nearest images of some queries.

    Args:
        runs: Run folders, encoder files or timm:NAME.
        data: Whose images are searched.
        out: A .png, .svg or .pdf.
        query: Paths or positions of images to ask about; by default some of different classes.
        queries: How many, where none are named.
        k: Neighbours of each.
        images: At most so many of DATA are read.
        device: auto, cpu or cuda.
    """
    from patchmix.report.pictures import show_neighbours

    show_neighbours(runs, data, out, query=_asked(query), queries=queries, k=k, images=images, device=device)


def show_map(
    runs: Runs,
    /,
    data: str,
    out: Path = Path("map.png"),
    method: Literal["pca", "tsne", "umap"] = "pca",
    images: int = 300,
    seed: int = 0,
    device: str = "auto",
) -> None:
    """Draw the embeddings in two dimensions, with thumbnails.

    Args:
        runs: Run folders, encoder files or timm:NAME.
        data: Whose images are shown.
        out: A .png, .svg or .pdf.
        method: pca; tsne with scikit-learn installed; umap with umap-learn.
        images: At most so many.
        seed: Of tsne and umap.
        device: auto, cpu or cuda.
    """
    from patchmix.report.pictures import show_map

    show_map(runs, data, out, method=method, images=images, seed=seed, device=device)


def report(
    runs: Runs,
    /,
    out: File = None,
    data: Text = None,
    images: int = 2000,
    device: str = "auto",
    workers: int = 0,
) -> None:
    """Write one HTML file about runs: verdict, curves, evaluations, pictures, and an explorer of neighbours.

    Args:
        runs: Run folders; encoder files and timm:NAME too, for comparison.
        out: The file; by default report.html in the first run's folder.
        data: Whose images are shown; by default the first run's.
        images: At most so many in the explorer; 0 leaves pictures out.
        device: auto, cpu or cuda.
        workers: Processes that prepare images.
    """
    from patchmix.study.reporting import report_runs

    report_runs(runs, out, data=data, images=images, device=device, workers=workers)


def _asked(query: tuple[str, ...]) -> list[int | str] | None:
    """Numbers are positions, anything else is a path."""
    return [int(one) if one.isdecimal() else one for one in query] or None
