"""The report's tables and cards, from plain values to escaped HTML."""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Sequence

from matplotlib.figure import Figure

from patchmix.evaluate.results import SHOWN
from patchmix.report.page.document import Markup, element, join
from patchmix.report.page.record import Record, learnt, percent, verdict


def summary(records: Sequence[Record]) -> Markup:
    """A card for each run: the verdict, and what it is."""
    cards = []
    for record in records:
        text, fine = verdict(record)
        facts = [
            ("model", _model(record)),
            ("trained on", record.setting("data", "path")),
            ("recipe", _recipe(record)),
            ("loss", _progress(record)),
            ("effective rank", None if (rank := record.last("rank")) is None else _number(rank)),
        ]
        cards.append(
            element(
                "article",
                element("h3", record.name),
                element("p", text, class_="verdict" if fine else "verdict bad"),
                _list(facts),
                class_="card",
            )
        )
    return element("div", *cards, class_="cards")


def reproduce(records: Sequence[Record]) -> Markup:
    """The command and the whole configuration of each run."""
    parts = []
    for i, record in enumerate(records):
        if not record.config_text:
            continue
        command = record.facts.command or plain_command(record)
        known = (
            "" if record.facts.command else " From the main settings; others that differ from the recipe stand below."
        )
        parts += [
            element("h3", record.name),
            element("p", f"The command that repeats this run.{known}", class_="note"),
            element("pre", command, id=f"command-{i}"),
            element("button", "copy the command", type="button", class_="screen-only", data_copies=f"command-{i}"),
            element("details", element("summary", "config.yaml, every setting"), element("pre", record.config_text)),
        ]
    return join(*parts)


def plain_command(record: Record) -> str:
    """`patchmix pretrain` with the arguments that config.yaml names."""
    words = ["patchmix", "pretrain", str(record.setting("data", "path")), "--out", f"runs/{record.name}"]
    options = {
        "--recipe": record.setting("recipe"),
        "--model": record.setting("model", "name"),
        "--batch-size": record.setting("train", "batch_size"),
        "--seed": record.setting("train", "seed"),
    }
    budget, epochs = record.setting("train", "budget"), record.setting("train", "epochs")
    options |= {"--budget": budget} if budget else {"--epochs": None if epochs is None else f"{epochs:g}"}
    for option, value in options.items():
        words += [] if value is None else [option, str(value)]
    return shlex.join(words)


def evaluations(records: Sequence[Record]) -> Markup:
    """The latest result of each protocol and set of data, the paper's number beside it."""
    rows = []
    for record in records:
        latest = {(result.data, result.weights, result.protocol): result for result in record.results}
        for result in latest.values():
            paper = record.facts.paper.get(result.protocol)
            rows.append(
                [
                    record.name,
                    SHOWN.get(result.protocol, result.protocol),
                    result.data,
                    result.headline,
                    result.headline_interval or "–",
                    "–" if paper is None else percent(paper),
                    f"{result.images:,}",
                    result.weights[:8],
                    result.date[:10],
                ]
            )
        judged = {result.protocol for result in record.results}
        for protocol, value in record.facts.paper.items():
            if protocol not in judged:
                empty = ["–", "not evaluated", "–"]
                rows.append([record.name, SHOWN.get(protocol, protocol), *empty, percent(value), "–", "–", "–"])
    if not rows:
        return element("p", "Not evaluated yet; `patchmix knn RUN --data DATA` adds a result here.", class_="note")
    head = ["run", "protocol", "data", "top-1 or AP %", "95 % interval", "paper %", "test images", "weights", "date"]
    return table(head, rows, numbers=(3, 4, 5, 6))


def cost(records: Sequence[Record]) -> Markup:
    """Time, images, speed and FLOPs of each training."""
    rows = []
    for record in records:
        seconds, speed, waited = (record.last(key) for key in ("seconds", "images_per_second", "data_wait"))
        steps = max((row["step"] for row in record.history.rows), default=0)
        images = steps * (record.history.batch_size or 0)
        flops = images * record.facts.flops_per_image if record.facts.flops_per_image else None
        parameters = sum(tensor.numel() for tensor in record.backbone.weights.values()) if record.backbone else None
        rows.append(
            [
                record.name,
                "–" if parameters is None else f"{parameters / 1e6:.1f} M",
                f"{steps:,}" if steps else "–",
                f"{images:,}" if images else "–",
                _duration(seconds),
                _number(speed),
                "–" if waited is None else f"{100 * waited:.0f} %",
                "–" if flops is None else f"{flops:.3g}",
            ]
        )
    head = ["run", "parameters", "steps", "images seen", "training time", "images/s", "waiting for data", "FLOPs"]
    return table(head, rows, numbers=range(1, 8))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()) -> Markup:
    """A table that scrolls by itself where the page is narrow; columns in `numbers` stand to the right."""

    def cell(name: str, column: int, text: str) -> Markup:
        scope = "col" if name == "th" else None
        return element(name, text, class_="number" if column in numbers else None, scope=scope)

    top = element("tr", *(cell("th", i, text) for i, text in enumerate(head)))
    body = [element("tr", *(cell("td", i, text) for i, text in enumerate(row))) for row in rows]
    whole = element("table", element("thead", top), element("tbody", *body))
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label="table")


def drawn(figure: Figure, caption: str, description: str) -> Markup:
    """A figure inside the page. description: for those who can't see it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    source = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return element(
        "figure", element("img", src=source, alt=description), element("figcaption", caption), class_="picture"
    )


def _model(record: Record) -> str | None:
    if record.backbone is None:
        name: str | None = record.setting("model", "name")
        return name
    shape = record.backbone.architecture
    return f"{shape.name}: {shape.image_size} px, patch {shape.patch_size}, width {shape.dim}, {shape.depth} blocks"


def _progress(record: Record) -> str:
    shares = ", ".join(f"{term} {100 * share:.0f} %" for term, share in learnt(record))
    return f"{shares} of the way from chance to floor" if shares else ""


def _recipe(record: Record) -> str | None:
    recipe, method = record.setting("recipe"), record.setting("method", "name")
    return None if recipe is None else f"{recipe} ({method}), batch {record.setting('train', 'batch_size')}"


def _list(pairs: Sequence[tuple[str, str | None]]) -> Markup:
    return element("dl", *(join(element("dt", key), element("dd", str(value))) for key, value in pairs if value))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    hours, minutes = int(seconds // 3600), int(seconds % 3600 // 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {int(seconds % 60)} s"
