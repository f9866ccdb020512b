"""Figures from the command line: read, draw, write, say where.

A run is a run's folder, an encoder file, a checkpoint or `timm:NAME` (see `interop.load_backbone`); for curves it is a
run's folder. Data is what `pretrain` takes; its test images are shown where it has some. `out` ends in .png, .svg or
.pdf. Every function returns the files that it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from patchmix.data.contract import Source
from patchmix.data.sources import open_source
from patchmix.data.views import as_channels, to_float
from patchmix.interop.backbone import Backbone
from patchmix.mixing import Mixed, PatchMix
from patchmix.report.attention import attention_figure, attention_maps
from patchmix.report.curves import AxisKind, histories_figure, read_history
from patchmix.report.figures import mixed_figure, share_targets_figure, targets_figure
from patchmix.report.neighbours import MapMethod, flatten_to_map, map_figure, neighbours_figure
from patchmix.report.shown import Viewed, check_positions, crops, load_all, open_shown, spread, view
from patchmix.report.similarity import choose_keys, describe_keys, nearest, similarity_figure
from patchmix.report.style import check_suffix, save

Run = str | Path
DRAWN = 96  # pixels of an image in a figure


def show_mix(
    data: str,
    out: Path,
    *,
    num_mix: int = 3,
    patch_size: int = 8,
    size: int = 32,
    images: int = 6,
    seed: int = 0,
    mix: Callable[[Tensor], Mixed] | None = None,
) -> list[Path]:
    """Originals and mixed images of `data`, with the shares; beside it, NAME-targets with the three target matrices.

    mix: any object that turns float images (N, 3, H, W) in [0, 1] into `Mixed`; None takes PatchMix of `num_mix` images
    with patches of `patch_size`. size: side of the central crop that is mixed. seed: of the mix's random numbers.
    """
    check_suffix(out)
    if images < 2:
        raise ValueError(f"{images} image can't be mixed; take at least 2")
    source = open_source(data, "train", cache_bytes=0, progress=False)  # a few images only: none are kept
    found = crops(source, spread(len(source), images), size)
    batch = torch.stack([torch.from_numpy(image) for image in found.values()])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        figure, mixed = mixed_figure(batch, PatchMix(patch_size, num_mix) if mix is None else mix)
    targets = (
        targets_figure(max(9, 2 * num_mix - 1), num_mix)
        if mix is None
        else share_targets_figure(mixed.share.cpu().float())
    )
    return _say([save(figure, out), save(targets, out.with_name(f"{out.stem}-targets{out.suffix}"))])


def show_curves(
    runs: Sequence[Run],
    out: Path,
    *,
    axis: AxisKind = "epochs",
    smoothing: float = 0.0,
    flops_per_image: float | Sequence[float] | None = None,
) -> list[Path]:
    """Losses between floor and chance, kNN, rank, learning rate, weight decay, momentum and speed, runs overlaid.

    axis: epochs, images, hours, or flops, which needs `flops_per_image` of training, one number or one for each run.
    smoothing: 0 … 1, of losses and speed; raw values stay behind the smoothed ones.
    """
    check_suffix(out)
    if not runs:
        raise ValueError("there is no run to draw; give at least one run's folder")
    costs = flops_per_image if isinstance(flops_per_image, Sequence) else [flops_per_image] * len(runs)
    if len(costs) != len(runs):
        raise ValueError(f"{len(costs)} costs are given for {len(runs)} runs; give one, or one for each run")
    histories = [read_history(run, flops_per_image=cost) for run, cost in zip(runs, costs, strict=True)]
    return _say([save(histories_figure(histories, axis=axis, smoothing=smoothing), out)])


def show_similarity(
    runs: Sequence[Run],
    data: str,
    out: Path,
    *,
    query: int | Sequence[int | str] | None = None,
    keys: Sequence[int] | None = None,
    related: int | None = None,
    queries: int = 3,
    images: int = 1000,
    device: str = "auto",
) -> list[Path]:
    """The paper's similarity figure: a query, keys, and bars of exp(s/0.07)/exp(1/0.07), a panel for each run.

    query: positions among the images shown, or paths of some of them; None takes `queries` of different classes.
    keys: positions; None takes one of the query's class (in the middle), two of a related class (beside it) and
    others. related: the related class's number; None takes the one whose mean feature is nearest. images: at most so
    many of the set are read.
    """
    check_suffix(out)
    backbones = load_all(runs)
    viewed = view(open_shown(data, images), backbones, device=device)
    asked = choose_queries(query, queries, viewed)
    given = None if keys is None else _rows(keys, viewed, "key")
    names = [backbone.name for backbone in backbones]
    return _say([save(similarity_of(viewed, names, asked, keys=given, related=related), out)])


def similarity_of(
    viewed: Viewed,
    names: Sequence[str],
    queries: Sequence[int],
    *,
    keys: Sequence[int] | None = None,
    related: int | None = None,
) -> Figure:
    """The similarity figure of some rows of `viewed`; names: of the encoders. See `show_similarity`."""
    comparisons = [
        choose_keys(query, viewed.labels, viewed.vectors, related=related)
        if keys is None
        else describe_keys(query, keys, viewed.labels)
        for query in queries
    ]
    needed = [i for comparison in comparisons for i in (comparison.query, *comparison.keys)]
    return similarity_figure(
        comparisons,
        _pictures(viewed, needed),
        list(zip(names, viewed.vectors, strict=True)),
        class_names={i: _class_of(viewed, i) for i in needed},
    )


def show_attention(
    runs: Sequence[Run],
    data: str | Sequence[Path],
    out: Path,
    *,
    block: int = -1,
    images: int = 3,
    positions: Sequence[int] | None = None,
    size: int | None = None,
    device: str = "cpu",
) -> list[Path]:
    """The class token's attention in a block, one map per head, raw and overlaid, runs below each other.

    block: 0 is the first, -1 the last. data: a set, or a list of image files. images: how many, or `positions`:
    which. size: side of the input in pixels, a multiple of the patch size; None takes each encoder's own. A larger
    one gives finer maps.
    """
    check_suffix(out)
    backbones = load_all(runs)
    source = open_shown(data)
    chosen = spread(len(source), images) if positions is None else list(positions)
    check_positions(chosen, source, "image")
    maps = [attention_of(backbone, source, chosen, block=block, size=size, device=device) for backbone in backbones]
    drawn = size or max(backbone.architecture.image_size for backbone in backbones)
    shown = torch.stack([torch.from_numpy(image) for image in crops(source, chosen, drawn).values()])
    where = "the last block" if block == -1 else f"block {block}"
    named = list(zip([backbone.name for backbone in backbones], maps, strict=True))
    return _say([save(attention_figure(shown, named, title=f"attention of the class token in {where}"), out)])


def attention_of(
    backbone: Backbone,
    source: Source,
    positions: Sequence[int],
    *,
    block: int = -1,
    size: int | None = None,
    device: str = "cpu",
) -> Tensor:
    """Maps (N, H, R, C) of some images of a source, at `size` px or the encoder's own size."""
    shape = backbone.architecture
    side = shape.image_size if size is None else size
    if side % shape.patch_size or side < shape.patch_size:
        raise ValueError(
            f"size is {side}; for {backbone.name} it must be a multiple of its patch size {shape.patch_size}"
        )
    encoder = backbone.encoder(any_image_size=side != shape.image_size).to(device)
    batch = torch.stack([torch.from_numpy(image) for image in crops(source, positions, side).values()])
    normal = as_channels(to_float(batch, backbone.mean, backbone.std), shape.in_chans)
    return attention_maps(encoder, normal.to(device), block=block).cpu()


def show_neighbours(
    runs: Sequence[Run],
    data: str,
    out: Path,
    *,
    query: int | Sequence[int | str] | None = None,
    queries: int = 5,
    k: int = 8,
    images: int = 2000,
    device: str = "auto",
) -> list[Path]:
    """The k nearest images of some queries, by cosine as in kNN, a row for each query and run.

    query: positions among the images shown, or paths of some of them; None takes `queries` of different classes.
    images: at most so many.
    """
    check_suffix(out)
    backbones = load_all(runs)
    viewed = view(open_shown(data, images), backbones, device=device)
    asked = choose_queries(query, queries, viewed)
    found = [nearest(vectors, asked, k)[0] for vectors in viewed.vectors]
    needed = sorted({*asked, *(i for places in found for i in places.flatten().tolist())})
    figure = neighbours_figure(
        asked,
        _pictures(viewed, needed),
        list(zip([backbone.name for backbone in backbones], viewed.vectors, strict=True)),
        k=k,
        labels=viewed.labels,
        names=viewed.class_names,
    )
    return _say([save(figure, out)])


def show_map(
    runs: Sequence[Run],
    data: str,
    out: Path,
    *,
    method: MapMethod = "pca",
    images: int = 300,
    seed: int = 0,
    device: str = "auto",
) -> list[Path]:
    """The embeddings in two dimensions with thumbnails, a map for each run.

    method: pca; tsne (with scikit-learn installed) or umap (with umap-learn). seed: of the latter two.
    """
    check_suffix(out)
    backbones = load_all(runs)
    viewed = view(open_shown(data, images), backbones, device=device)
    planes = [flatten_to_map(vectors, method, seed=seed) for vectors in viewed.vectors]
    found = _pictures(viewed, range(len(viewed.positions)), size=32)
    title = {"pca": "first two principal components", "tsne": "t-SNE", "umap": "UMAP"}[method]
    figure = map_figure(
        list(found.values()),
        list(zip([backbone.name for backbone in backbones], planes, strict=True)),
        labels=viewed.labels,
        names=viewed.class_names,
        title=f"{len(found):,} images of {viewed.source.name}: {title}",
    )
    return _say([save(figure, out)])


def choose_queries(query: int | Sequence[int | str] | None, count: int, viewed: Viewed) -> list[int]:
    """Rows of `viewed`: those asked for, or the first of each of `count` classes, or evenly spread ones."""
    if query is not None:
        return _rows([query] if isinstance(query, int) else query, viewed, "query")
    if viewed.labels is None:
        return spread(len(viewed.positions), count)
    classes = torch.unique(viewed.labels).tolist()
    return [int((viewed.labels == classes[i]).nonzero()[0]) for i in spread(len(classes), count)]


def _rows(asked: Sequence[int | str], viewed: Viewed, what: str) -> list[int]:
    """Where images of the source, given by position or path, stand among those that could be decoded."""
    positions = [_position(one, viewed.source) if isinstance(one, str) else one for one in asked]
    check_positions(positions, viewed.source, what)
    for position in positions:
        if position not in viewed.positions:
            raise ValueError(f"{what} {position} can't be decoded; choose another")
    return [viewed.positions.index(position) for position in positions]


def _position(path: str, source: Source) -> int:
    """Which image of the source a path means: the one whose name below the root the path ends with."""
    wanted = Path(path).as_posix()
    for i in range(len(source)):
        key = source.key(i)
        if wanted == key or wanted.endswith(f"/{key}"):
            return i
    raise ValueError(f"{path} is not among the {len(source)} images read of {source.name}; take more, or another path")


def _pictures(viewed: Viewed, rows: Sequence[int], size: int = DRAWN) -> dict[int, Any]:
    found = crops(viewed.source, [viewed.positions[row] for row in rows], size)
    return {row: found[viewed.positions[row]] for row in rows}


def _class_of(viewed: Viewed, row: int) -> str:
    if viewed.labels is None:
        return ""
    label = int(viewed.labels[row])
    return viewed.class_names[label] if viewed.class_names else f"class {label}"


def _say(paths: list[Path]) -> list[Path]:
    for path in paths:
        print(f"wrote {path}")
    return paths
