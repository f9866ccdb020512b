"""The report: one HTML file with a summary, curves, tables, figures and an explorer of neighbors."""

import base64
import hashlib
import io
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.resources import files
from pathlib import Path

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from patchmix.config import Config
from patchmix.evaluate.monitor import collapse_warning, guard_verdict
from patchmix.evaluate.results import Result, read_results
from patchmix.files import write_text
from patchmix.interop.backbone import Backbone
from patchmix.interop.loading import load_backbone
from patchmix.mixing import create_mix
from patchmix.report.attention import attention_figure, attention_maps, encoder_and_images
from patchmix.report.curves import History, curves_data, read_history
from patchmix.report.figures import mix_figure, targets_figure
from patchmix.report.gallery import Gallery, crop_batch, load_gallery, spread, uniquely_named
from patchmix.report.neighbors import choose_keys, map_figure, pack_explorer, similarity_figure
from patchmix.settings import Report
from patchmix.study.compare import HEAD, rows_of, stored_config
from patchmix.study.doctor import loss_terms, way

MAPPED = 250  # thumbnails on the map


def report(settings: Report) -> Path:
    """Writes one self-contained HTML file about one or several runs; it needs no server and no network."""
    if not settings.runs:
        raise ValueError("there is no run to report on; give at least one run's folder")
    first = Path(settings.runs[0])
    out = settings.out or (first if first.is_dir() else Path()) / "report.html"
    if out.suffix != ".html":
        raise ValueError(f"the report {out} must end in .html")
    records = uniquely_named([read_record(run) for run in settings.runs])
    encoders = [replace(record.backbone, name=record.name) for record in records if record.backbone is not None]
    gallery, pictures, explorer = None, {}, None
    if settings.images and encoders:
        data = settings.data or next((record.config.data.path for record in records if record.config), None)
        if data is None:
            raise ValueError("no run has a configuration with its data; give --data, or --images 0 for no pictures")
        gallery = load_gallery(encoders, data, settings.images, device=settings.device, workers=settings.workers)
        pictures, explorer = figures(gallery, records, encoders), pack_explorer(gallery)
    curves = curves_data([replace(record.history, name=record.name) for record in records])
    page = environment().get_template("page.html")
    text = page.render(
        records=records,
        head=HEAD,
        evaluations=[row.cells() for each in records for row in rows_of(each.name, each.config, each.results)],
        costs=[cost(record) for record in records],
        gallery=gallery,
        figures=pictures,
        mapped=MAPPED,
        data={"curves": curves if curves["panels"] else None, "explorer": explorer},
    )
    write_text(out, text)
    for record in records:
        print(f"{record.name}: {verdict(record)[0]}")
    print(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")
    return out


def environment() -> Environment:
    """Renders templates/: text is escaped, and `tojson` gives JSON that can't end its script element."""
    loader = PackageLoader("patchmix.report")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    made.filters |= {"digest": _digest, "data_url": _data_url}
    made.globals |= {"asset": _asset, "verdict": verdict, "facts": facts}
    return made


def _asset(*names: str) -> str:
    """Files of assets/, one after the other: a page opened from disk can't import others."""
    folder = files("patchmix.report") / "assets"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _data_url(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@dataclass(frozen=True)
class Record:
    """One run. An encoder file has no `config`; a run before its first checkpoint has no `backbone`."""

    name: str
    folder: Path
    history: History
    results: Sequence[Result]
    backbone: Backbone | None
    config: Config | None

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        assert self.config is not None
        config = str(self.folder / "config.yaml")
        return shlex.join(["patchmix", "pretrain", self.config.data.path, "--out", "runs/again", "--config", config])

    @property
    def yaml(self) -> str:
        return (self.folder / "config.yaml").read_text(encoding="utf-8")


def read_record(run: str | Path) -> Record:
    """A run's folder, or anything else that `load_backbone` opens."""
    folder = Path(run)
    config, history, backbone = stored_config(folder), read_history(folder), None
    name = history.name
    try:
        backbone = load_backbone(run)
        if config is None and not history.rows:
            name = backbone.name
    except ValueError:
        if config is None and not history.rows:
            raise  # a run without a checkpoint has at least curves
    return Record(name, folder, history, read_results(folder), backbone, config)


def verdict(record: Record) -> tuple[str, bool]:
    """Such as "trained 40 epochs, kNN 61.2 % [60.2, 62.1], no collapse", and whether nothing is wrong."""
    trained_rows = [row for row in record.history.rows if row["step"]]  # an untrained network may look collapsed
    measured = replace(record.history, rows=trained_rows)
    epoch, knn = record.history.last("epoch"), measured.last("knn")
    complete = (record.folder / "encoder.safetensors").is_file()
    if epoch is None:
        trained = "no training log"
    elif complete:
        epochs = f"{epoch:.1f}".removesuffix(".0")
        trained = f"trained {epochs} epoch{'' if epochs == '1' else 's'}"
    else:
        trained = f"unfinished, at epoch {epoch:.3g}"
        if record.config and record.config.train.budget is None:
            trained += f" of {record.config.train.epochs:g}"
    accuracy = "kNN not measured" if knn is None else f"kNN {100 * knn:.1f} % in the training monitor"
    digest = "" if record.backbone is None else record.backbone.digest()  # others are of earlier steps, or of pixels
    if own := [each for each in record.results if each.protocol == "knn" and digest.startswith(each.weights)]:
        shown = ([result for result in own if not result.changed] or own)[-1]  # rather one with the default options
        low, high = shown.interval()
        accuracy = f"{shown.title} {100 * shown.top1:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
    health = {key: value for key in ("rank", "mean_cosine") if (value := measured.last(key)) is not None}
    start = {} if record.backbone is None else record.backbone.origin.get("start", {})
    warning = guard_verdict(start) or collapse_warning(health)
    collapse = warning or ("no collapse" if health else "collapse not checked")
    return f"{trained}, {accuracy}, {collapse}", (complete or epoch is None) and warning is None


def facts(record: Record) -> dict[str, str | None]:
    """What a run is, and how far it has come; None: not known."""
    config, rank = record.config, record.history.last("rank")
    last = {term: row for row in record.history.rows for term in loss_terms([row]) if row.get(term) is not None}
    ways = ", ".join(f"{term} {100 * way(row, term):.0f} %" for term, row in last.items())
    model = config.model.name if config else None
    if record.backbone is not None:
        shape = record.backbone.architecture
        sizes = f"{shape.image_size} px, patch {shape.patch_size}, width {shape.dim}, {shape.depth} blocks"
        model = f"{shape.name}: {sizes}"
    return {
        "model": model,
        "trained on": config.data.path if config else None,
        "recipe": f"{config.recipe} ({config.method.name}), batch {config.train.batch_size}" if config else None,
        "loss": f"{ways} of the way from chance to floor" if ways else None,
        "effective rank": None if rank is None else f"{rank:.4g}",
    }


def cost(record: Record) -> list[str | None]:
    """A row with the time, images, speed and FLOPs of a training."""
    history = record.history
    seconds, speed, waited = (history.last(key) for key in ("seconds", "images_per_second", "data_wait"))
    steps = int(history.last("step") or 0)
    images = steps * (history.batch_size or 0)
    weights = record.backbone.weights.values() if record.backbone else ()
    return [
        record.name,
        f"{sum(tensor.numel() for tensor in weights) / 1e6:.1f} M" if weights else None,
        f"{steps:,}" if steps else None,
        f"{images:,}" if images else None,
        None if seconds is None else str(timedelta(seconds=round(seconds))),
        None if speed is None else f"{speed:.4g}",
        None if waited is None else f"{100 * waited:.0f} %",
        f"{images * history.flops_per_image:.3g}" if history.flops_per_image else None,
    ]


def figures(gallery: Gallery, records: Sequence[Record], encoders: Sequence[Backbone]) -> dict[str, Figure]:
    """Similarity and the map; mixing and its targets if a run has mixed; attention if an encoder has a class token."""
    drawn = {
        "map": map_figure(gallery, spread(len(gallery), MAPPED), most=3),  # first: it refuses too few images
        "similarity": similarity_figure(gallery, {row: choose_keys(row, gallery) for row in gallery.queries((), 3)}),
    }
    positions = [gallery.positions[row] for row in spread(len(gallery), 6)]
    for record in records:
        if record.backbone is not None and record.config is not None and record.config.method.name == "patchmix":
            shape, options = record.backbone.architecture, record.config.method.options
            how = {"num_mix": options.num_mix, "generator": torch.Generator().manual_seed(0)}
            mix = create_mix(options.mix, patch_size=shape.patch_size, **how).for_one_step()
            drawn["mixing"], mixed = mix_figure(crop_batch(gallery.source, positions, shape.image_size), mix)
            drawn["targets"] = targets_figure(mixed.share)
            break
    if with_token := [backbone for backbone in encoders if "cls_token" in backbone.weights]:
        size = max(backbone.architecture.image_size for backbone in with_token)
        few = (gallery.source, positions[::2])
        maps = [(backbone.name, attention_maps(*encoder_and_images(backbone, *few))) for backbone in with_token]
        drawn["attention"] = attention_figure(crop_batch(*few, size), maps)
    return drawn
