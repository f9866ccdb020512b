"""`report`: reads runs, embeds the images shown, draws, and writes one HTML file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchmix.files import replacing
from patchmix.interop.backbone import Backbone
from patchmix.mixing import Mixed, PatchMix
from patchmix.report.attention import attention_figure
from patchmix.report.curves import History
from patchmix.report.figures import mixed_figure, share_targets_figure, targets_figure
from patchmix.report.neighbours import flatten_to_map, map_figure
from patchmix.report.page import sections
from patchmix.report.page.document import Markup, document, element, join
from patchmix.report.page.embedding import check_vectors, pack_explorer
from patchmix.report.page.record import Facts, Record, read_record, verdict
from patchmix.report.page.series import curves_data
from patchmix.report.pictures import attention_of, choose_queries, similarity_of
from patchmix.report.shown import Viewed, crops, open_shown, spread, unique_names, view

__all__ = ["Facts", "report"]
THUMBNAIL = 64  # pixels
MAPPED = 250  # thumbnails on the map


def report(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    data: str | None = None,
    images: int = 2000,
    facts: Sequence[Facts] | None = None,
    mix: Callable[[Tensor], Mixed] | None = None,
    title: str | None = None,
    device: str = "auto",
    workers: int = 0,
    cache: bool = True,
) -> Path:
    """Writes one self-contained HTML file about one or several runs, and returns its path.

    It holds a verdict, the command and configuration, interactive curves, evaluations beside the paper's numbers, cost,
    pictures of mixes and attention, a map, and an explorer of nearest neighbours. It needs no server and no network.

    runs: folders of runs; encoder files and `timm:NAME` are welcome too, for comparison in the explorer.
    out: the file, *.html; an existing one is replaced.
    data: whose test images (or training images, where there are no others) are shown; None takes the first run's data.
    images: at most so many in the explorer; 2,000 make a file of 5 to 12 MB. 0 leaves pictures and explorer out.
    facts: for each run, what its folder does not tell: see `Facts`.
    mix: what to draw as the mix; None draws PatchMix where a run's configuration has `num_mix`.
    """
    out = Path(out)
    if out.suffix != ".html":
        raise ValueError(f"the report {out} must end in .html")
    if not runs:
        raise ValueError("there is no run to report on; give at least one run's folder")
    given = [Facts()] * len(runs) if facts is None else list(facts)
    if len(given) != len(runs):
        raise ValueError(f"facts are given for {len(given)} of {len(runs)} runs; give them for each, or for none")
    records = _named_apart([read_record(run, known) for run, known in zip(runs, given, strict=True)])
    curves = curves_data([record.history for record in records])
    parts: dict[str, tuple[str, Markup]] = {"summary": ("Summary", sections.summary(records))}
    if curves is not None:
        parts["curves"] = ("Curves", element("div", id="curves-here"))
    parts["evaluations"] = ("Evaluations", sections.evaluations(records))
    parts["cost"] = ("Cost", sections.cost(records))
    explorer = None
    encoders = [record.backbone for record in records if record.backbone is not None]
    if images and encoders:
        viewed = _view(data, records, encoders, images, device, workers, cache)
        explorer = _explorer(viewed, encoders)
        parts["explorer"] = ("Explorer", join(_about(viewed), element("div", id="explorer-here")))
        parts |= _pictures(viewed, records, encoders, mix)
    if any(record.config_text for record in records):
        parts["reproduce"] = ("Reproduce", sections.reproduce(records))
    heading = title or f"patchmix report: {', '.join(record.name for record in records)}"
    text = document(
        title=heading,
        sections=parts,
        data={"curves": curves, "explorer": explorer},
        footer="Made by patchmix. Everything is inside this file; it loads nothing.",
    )
    with replacing(out) as temporary:
        temporary.write_text(text, encoding="utf-8")
    for record in records:
        print(f"{record.name}: {verdict(record)[0]}")
    print(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")
    return out


def _named_apart(records: list[Record]) -> list[Record]:
    names = unique_names([record.name for record in records])
    renamed = []
    for record, name in zip(records, names, strict=True):
        old = record.history
        history = History(name, old.rows, old.batch_size, old.flops_per_image, old.config)
        backbone = None if record.backbone is None else dataclasses.replace(record.backbone, name=name)
        renamed.append(Record(history, record.results, backbone, record.complete, record.config_text, record.facts))
    return renamed


def _view(
    data: str | None,
    records: Sequence[Record],
    encoders: Sequence[Backbone],
    images: int,
    device: str,
    workers: int,
    cache: bool,
) -> Viewed:
    chosen = data or next((str(path) for record in records if (path := record.setting("data", "path"))), None)
    if chosen is None:
        raise ValueError("no run says what it was trained on; give data to show, or images=0 to leave pictures out")
    viewed = view(open_shown(chosen, images), encoders, device=device, workers=workers, cache=cache)
    for encoder, vectors in zip(encoders, viewed.vectors, strict=True):
        check_vectors(encoder.name, vectors)
    return viewed


def _explorer(viewed: Viewed, encoders: Sequence[Backbone]) -> dict[str, Any]:
    return pack_explorer(
        list(crops(viewed.source, viewed.positions, THUMBNAIL).values()),
        [viewed.source.key(position) for position in viewed.positions],
        list(zip([encoder.name for encoder in encoders], viewed.vectors, strict=True)),
        labels=viewed.labels,
        classes=viewed.class_names,
    )


def _about(viewed: Viewed) -> Markup:
    text = (
        f"{len(viewed.positions):,} images of {viewed.source.name}. Choose one: its nearest among them by cosine s, "
        "ranked as kNN ranks; normalised similarity exp(s/0.07)/exp(1/0.07); their classes; their places on a map."
    )
    return element("p", text, class_="note")


def _pictures(
    viewed: Viewed, records: Sequence[Record], encoders: Sequence[Backbone], mix: Callable[[Tensor], Mixed] | None
) -> Mapping[str, tuple[str, Markup]]:
    """The sections of the mix, of attention and of the map."""
    parts: dict[str, tuple[str, Markup]] = {}
    rows = spread(len(viewed.positions), 6)
    positions = [viewed.positions[row] for row in rows]
    if mixing := _mixing(viewed, records, positions, mix):
        parts["mixing"] = ("Mixing", mixing)
    with_class_token = [encoder for encoder in encoders if "cls_token" in encoder.weights]
    if with_class_token:
        size = max(encoder.architecture.image_size for encoder in with_class_token)
        shown = torch.stack([torch.from_numpy(image) for image in crops(viewed.source, positions[::2], size).values()])
        maps = [(encoder.name, attention_of(encoder, viewed.source, positions[::2])) for encoder in with_class_token]
        caption = "The class token's attention in the last block, head by head; raw above, on the image below."
        parts["attention"] = ("Attention", sections.drawn(attention_figure(shown, maps), caption, caption))
    caption = "A query's similarity to keys of its own class, of a related class and of others: the paper's figure."
    figure = similarity_of(viewed, [encoder.name for encoder in encoders], choose_queries(None, 3, viewed))
    parts["similarity"] = ("Similarity", sections.drawn(figure, caption, caption))
    some = spread(len(viewed.positions), MAPPED)
    thumbs = list(crops(viewed.source, [viewed.positions[row] for row in some], 32).values())
    planes = [
        (encoder.name, flatten_to_map(vectors[some])) for encoder, vectors in zip(encoders, viewed.vectors, strict=True)
    ]
    labels = None if viewed.labels is None else viewed.labels[some]
    caption = (
        f"{len(some):,} images at their first two principal components; what an encoder finds alike stands together."
    )
    figure = map_figure(thumbs, planes[:3], labels=labels, names=viewed.class_names)
    parts["map"] = ("Map of the embeddings", sections.drawn(figure, caption, caption))
    return parts


def _mixing(
    viewed: Viewed, records: Sequence[Record], positions: Sequence[int], mix: Callable[[Tensor], Mixed] | None
) -> Markup | None:
    for record in records:
        if record.backbone is None:
            continue
        shape = record.backbone.architecture
        drawn_mix = mix
        wanted = record.setting("method", "options", "num_mix")
        num_mix = wanted[0] if isinstance(wanted, list) else wanted
        if mix is None:
            if not isinstance(num_mix, int):
                continue
            drawn_mix = PatchMix(shape.patch_size, num_mix, torch.Generator().manual_seed(0))
        assert drawn_mix is not None
        found = crops(viewed.source, positions, shape.image_size)
        figure, mixed = mixed_figure(torch.stack([torch.from_numpy(image) for image in found.values()]), drawn_mix)
        targets = (
            targets_figure(max(9, 2 * num_mix - 1), num_mix)
            if mix is None and isinstance(num_mix, int)
            else share_targets_figure(mixed.share.cpu().float())
        )
        return join(
            sections.drawn(figure, "Originals above, mixed images below.", "originals and mixed images with shares"),
            sections.drawn(targets, "What the three losses ask for.", "three target matrices"),
        )
    return None
