"""The report: one HTML file with a summary, curves, tables, figures and an explorer of neighbors."""

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from patchmix.config import Config
from patchmix.evaluate.monitor import collapse_warning
from patchmix.evaluate.results import PROTOCOL_NAMES, Result, read_results
from patchmix.files import write_text
from patchmix.interop.backbone import Backbone
from patchmix.interop.loading import load_backbone
from patchmix.mixing import PatchMix
from patchmix.report.attention import attention_figure, image_maps
from patchmix.report.curves import History, curves_data, folder_history
from patchmix.report.figures import mix_figure, patchmix_targets_figure
from patchmix.report.gallery import Gallery, crop_batch, load_gallery, spread, unique_names
from patchmix.report.html import Markup, document, element, embedded, join, table
from patchmix.report.neighbors import map_figure, pack_explorer
from patchmix.report.similarity import gallery_similarity
from patchmix.settings import Report
from patchmix.study.compare import paper_row, stored_config

MAPPED = 250  # thumbnails on the map
Sections = dict[str, tuple[str, Markup]]  # by id: heading and content


def report(settings: Report) -> Path:
    """Writes one self-contained HTML file about one or several runs; it needs no server and no network."""
    if not settings.runs:
        raise ValueError("there is no run to report on; give at least one run's folder")
    first = Path(settings.runs[0])
    out = settings.out or (first if first.is_dir() else Path()) / "report.html"
    if out.suffix != ".html":
        raise ValueError(f"the report {out} must end in .html")
    records = _renamed([read_record(run) for run in settings.runs])
    curves, explorer = curves_data([record.history for record in records]), None
    sections: Sections = {"summary": ("Summary", element("div", *map(_card, records), class_="cards"))}
    if curves["panels"]:
        sections["curves"] = ("Curves", element("div", id="curves-here"))
    sections["evaluations"] = ("Evaluations", evaluations(records))
    sections["cost"] = ("Cost", cost(records))
    backbones = [record.backbone for record in records if record.backbone is not None]
    if settings.images and backbones:
        data = settings.data or next((record.config.data.path for record in records if record.config), None)
        if data is None:
            raise ValueError("no run has a configuration with its data; give --data, or --images 0 for no pictures")
        options = {"device": settings.device, "workers": settings.workers}
        gallery = load_gallery(backbones, data, settings.images, **options)  # type: ignore[arg-type]
        explorer = pack_explorer(gallery)
        sections |= _pictures(gallery, records, backbones)
    if any(record.config for record in records):
        sections["reproduce"] = ("Reproduce", reproduce(records))
    text = document(
        title=f"patchmix report: {', '.join(record.name for record in records)}",
        sections=sections,
        data={"curves": curves["panels"] and curves, "explorer": explorer},
        footer="Made by patchmix. Everything is inside this file; it loads nothing.",
    )
    write_text(out, text)
    for record in records:
        print(f"{record.name}: {verdict(record)[0]}")
    print(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")
    return out


# ------------------------------------------------------------------------------------------------------------ the runs


@dataclass(frozen=True)
class Record:
    """One run. An encoder file has no `config`; a run before its first checkpoint has no `backbone`."""

    folder: Path
    history: History
    results: Sequence[Result]
    backbone: Backbone | None
    config: Config | None = None

    @property
    def name(self) -> str:
        return self.history.name

    @property
    def paper(self) -> dict[str, float]:
        """What the paper reports for this training, in %, by protocol."""
        row = self.config and paper_row(self.config, self.config.data.path)
        return row.accuracies if row else {}

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        assert self.config is not None
        words = ["patchmix", "pretrain", self.config.data.path, "--out", "runs/again"]
        return shlex.join([*words, "--config", str(self.folder / "config.yaml")])


def read_record(run: str | Path) -> Record:
    """A run's folder, or anything else that `load_backbone` opens."""
    folder = Path(run)
    results = read_results(folder) if folder.is_dir() else []
    config = stored_config(folder)
    if config is None and not (folder / "metrics.jsonl").is_file():
        backbone = load_backbone(run)
        return Record(folder, History(backbone.name, []), results, backbone)
    try:
        loaded: Backbone | None = load_backbone(run)
    except ValueError:  # no checkpoint yet: there are curves all the same
        loaded = None
    return Record(folder, folder_history(folder, config), results, loaded, config)


def _renamed(records: Sequence[Record]) -> list[Record]:
    """The same with unique names."""
    renamed = []
    for record, name in zip(records, unique_names([record.name for record in records]), strict=True):
        history = dataclasses.replace(record.history, name=name)
        backbone = record.backbone and dataclasses.replace(record.backbone, name=name)
        renamed.append(dataclasses.replace(record, history=history, backbone=backbone))
    return renamed


def verdict(record: Record) -> tuple[str, bool]:
    """Such as "trained 40 epochs, kNN 61.2 % [60.2, 62.1], no collapse", and whether nothing is wrong."""
    epoch, knn = record.history.last("epoch"), record.history.last("knn")
    complete = (record.folder / "encoder.safetensors").is_file()
    if epoch is None:
        trained = "no training log"
    elif complete:
        epochs = f"{epoch:.1f}".removesuffix(".0")
        trained = f"trained {epochs} epoch{'' if epochs == '1' else 's'}"
    else:
        trained = f"unfinished, at epoch {epoch:.3g}"
        trained += f" of {record.config.train.epochs:g}" if record.config else ""
    accuracy = "kNN not measured" if knn is None else f"kNN {100 * knn:.1f} % in the training monitor"
    measured = next((result for result in reversed(record.results) if result.protocol == "knn"), None)
    if measured is not None:
        low, high = measured.interval()
        accuracy = f"kNN {100 * measured.top1:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
    health = {key: value for key in ("rank", "mean_cosine") if (value := record.history.last(key)) is not None}
    warning = collapse_warning(health)
    collapse = warning or ("no collapse" if health else "collapse not checked")
    return f"{trained}, {accuracy}, {collapse}", (complete or epoch is None) and warning is None


# ------------------------------------------------------------------------------------------------------ cards, tables


def _card(record: Record) -> Markup:
    """The verdict on a run, and what it is."""
    text, fine = verdict(record)
    config, rank = record.config, record.history.last("rank")
    facts = {"model": config.model.name if config else None}
    if record.backbone is not None:
        shape = record.backbone.architecture
        sizes = f"{shape.image_size} px, patch {shape.patch_size}, width {shape.dim}, {shape.depth} blocks"
        facts["model"] = f"{shape.name}: {sizes}"
    if config is not None:
        facts["trained on"] = config.data.path
        facts["recipe"] = f"{config.recipe} ({config.method.name}), batch {config.train.batch_size}"
    facts["loss"] = _loss_progress(record.history)
    facts["effective rank"] = None if rank is None else f"{rank:.4g}"
    pairs = (join(element("dt", key), element("dd", value)) for key, value in facts.items() if value)
    headline = element("p", text, class_="verdict" if fine else "verdict bad")
    return element("article", element("h3", record.name), headline, element("dl", *pairs), class_="card")


def _loss_progress(history: History) -> str | None:
    """How far each term of the loss has come on its way from chance to its floor."""
    shares = []
    for term in history.terms:
        value, chance, floor = (history.last(f"{term}{end}") for end in ("", "/chance", "/floor"))
        if value is not None and chance is not None and floor is not None and chance > floor:
            shares.append(f"{term} {100 * (chance - value) / (chance - floor):.0f} %")
    return f"{', '.join(shares)} of the way from chance to floor" if shares else None


def evaluations(records: Sequence[Record]) -> Markup:
    """The latest result of each protocol and set of data, with the paper's number."""
    rows = []
    for record in records:
        paper = {protocol: f"{value:.1f}" for protocol, value in record.paper.items()}
        latest = {(result.data, result.weights, result.protocol): result for result in record.results}
        for result in latest.values():
            name = PROTOCOL_NAMES.get(result.protocol, result.protocol)
            scores = [result.headline, result.headline_interval or "–", paper.get(result.protocol, "–")]
            origin = [f"{result.images:,}", result.weights[:8], result.date[:10]]
            rows.append([record.name, name, result.data, *scores, *origin])
        evaluated = {result.protocol for result in record.results}
        for protocol, value in paper.items():
            if protocol not in evaluated:
                rows.append([record.name, PROTOCOL_NAMES[protocol], "–", "not evaluated", "–", value, "–", "–", "–"])
    if not rows:
        return element("p", "Not evaluated yet; `patchmix knn RUN --data DATA` adds a result here.", class_="note")
    head = ["run", "protocol", "data", "top-1 or AP %", "95 % interval", "paper %", "test images", "weights", "date"]
    return table(head, rows, numbers=(3, 4, 5, 6))


def cost(records: Sequence[Record]) -> Markup:
    """Time, images, speed and FLOPs of each training."""
    rows = []
    for record in records:
        history = record.history
        seconds, speed, waited = (history.last(key) for key in ("seconds", "images_per_second", "data_wait"))
        steps = max((row["step"] for row in history.rows), default=0)
        images = steps * (history.batch_size or 0)
        weights = record.backbone.weights.values() if record.backbone else ()
        cells = {
            "parameters": f"{sum(tensor.numel() for tensor in weights) / 1e6:.1f} M" if weights else "–",
            "steps": f"{steps:,}" if steps else "–",
            "images seen": f"{images:,}" if images else "–",
            "training time": "–" if seconds is None else _duration(seconds),
            "images/s": "–" if speed is None else f"{speed:.4g}",
            "waiting for data": "–" if waited is None else f"{100 * waited:.0f} %",
            "FLOPs": f"{images * history.flops_per_image:.3g}" if history.flops_per_image else "–",
        }
        rows.append([record.name, *cells.values()])
    return table(["run", *cells], rows, numbers=range(1, 8))


def _duration(seconds: float) -> str:
    hours, minutes = int(seconds // 3600), int(seconds % 3600 // 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {int(seconds % 60)} s"


def reproduce(records: Sequence[Record]) -> Markup:
    """The command and the whole configuration of each run."""
    parts = []
    for i, record in enumerate(records):
        if record.config is not None:
            text = (record.folder / "config.yaml").read_text(encoding="utf-8")
            parts += [
                element("h3", record.name),
                element("p", "The command that repeats this run.", class_="note"),
                element("pre", record.command, id=f"command-{i}"),
                element("button", "copy the command", type="button", class_="screen-only", data_copies=f"command-{i}"),
                element("details", element("summary", "config.yaml, every setting"), element("pre", text)),
            ]
    return join(*parts)


# ----------------------------------------------------------------------------------------------------------- pictures


def _pictures(gallery: Gallery, records: Sequence[Record], backbones: Sequence[Backbone]) -> Sections:
    """The explorer, and the figures of mixing, attention, similarity and the map."""
    text = (
        f"{len(gallery):,} images of {gallery.source.name}. Choose one to see its nearest neighbors by cosine s, as "
        "kNN ranks them; their normalized similarity exp(s/0.07)/exp(1/0.07); their classes; their places on a map."
    )
    explorer = join(element("p", text, class_="note"), element("div", id="explorer-here"))
    sections: Sections = {"explorer": ("Explorer", explorer)}
    positions = [gallery.positions[row] for row in spread(len(gallery), 6)]
    for record in records:
        num_mix = record.config and getattr(record.config.method.options, "num_mix", None)
        if record.backbone is not None and num_mix:
            sections["mixing"] = ("Mixing", _mixing(gallery, positions, record.backbone, num_mix))
            break
    with_token = [backbone for backbone in backbones if "cls_token" in backbone.weights]
    if with_token:
        size = max(backbone.architecture.image_size for backbone in with_token)
        maps = [(backbone.name, image_maps(backbone, gallery.source, positions[::2])) for backbone in with_token]
        figure = attention_figure(crop_batch(gallery.source, positions[::2], size), maps)
        caption = "The class token's attention in the last block, head by head; raw above, on the image below."
        sections["attention"] = ("Attention", embedded(figure, caption))
    figure = gallery_similarity(gallery, gallery.queries((), 3))
    caption = "A query's similarity to keys of its own class, of a related class and of others: the paper's figure."
    sections["similarity"] = ("Similarity", embedded(figure, caption))
    rows = spread(len(gallery), MAPPED)
    caption = f"{len(rows):,} images at their first two principal components: similar images are close to each other."
    sections["map"] = ("Map of the features", embedded(map_figure(gallery, rows, most=3), caption))
    return sections


def _mixing(gallery: Gallery, positions: Sequence[int], backbone: Backbone, num_mix: int | Sequence[int]) -> Markup:
    shape = backbone.architecture
    parts = num_mix if isinstance(num_mix, int) else num_mix[0]
    mix = PatchMix(shape.patch_size, parts, torch.Generator().manual_seed(0))
    figure, _ = mix_figure(crop_batch(gallery.source, positions, shape.image_size), mix)
    return join(
        embedded(figure, "Originals above, mixed images with their shares below."),
        embedded(patchmix_targets_figure(parts), "The target matrices of the three losses."),
    )
