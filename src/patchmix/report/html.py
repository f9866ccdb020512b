"""HTML for the report: escaped elements, tables and figures, and one self-contained page with a strict policy."""

import base64
import hashlib
import html
import io
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from matplotlib.figure import Figure

SCRIPTS = ("dom.js", "curves.js", "explorer.js", "main.js")  # each after those that it imports


class Markup(str):
    """HTML that is already escaped."""

    __slots__ = ()


def element(name: str, *content: str, **attributes: str | None) -> Markup:
    """An HTML element; content that is not Markup is escaped. `class_` stands for class, data_x for data-x."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name == "img":
        return Markup(f"<img{written}>")
    return Markup(f"<{name}{written}>{join(*content)}</{name}>")


def join(*content: str) -> Markup:
    """Concatenates pieces; those that are not Markup are escaped."""
    return Markup("".join(piece if isinstance(piece, Markup) else html.escape(piece) for piece in content))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()) -> Markup:
    """A table that scrolls by itself where the page is narrow; columns in `numbers` are aligned to the right."""

    def line(cell: str, texts: Sequence[str]) -> Markup:
        scope = "col" if cell == "th" else None
        kinds = ["number" if column in numbers else None for column in range(len(texts))]
        cells = zip(texts, kinds, strict=True)
        return element("tr", *(element(cell, text, class_=kind, scope=scope) for text, kind in cells))

    whole = element("table", element("thead", line("th", head)), element("tbody", *(line("td", row) for row in rows)))
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label="table")


def embedded(figure: Figure, caption: str) -> Markup:
    """A figure inside the page; its caption also describes it to screen readers."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    source = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return element("figure", element("img", src=source, alt=caption), element("figcaption", caption), class_="picture")


def document(*, title: str, sections: Mapping[str, tuple[str, Markup]], data: Any, footer: str) -> str:
    """The page. sections: heading and content by id. data: what the scripts read, as JSON.

    The policy allows this style, this script and images inside the file, and nothing else.
    """
    style, script = _read("page.css"), scripts()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    entries, bodies = [], []
    for key, (heading, body) in sections.items():
        title_id = f"{key}-title"
        entries.append(element("li", element("a", heading, href=f"#{key}")))
        bodies.append(element("section", element("h2", heading, id=title_id), body, id=key, aria_labelledby=title_id))
    parts = {
        "policy": Markup(policy),
        "title": title,
        "style": Markup(style),
        "navigation": element("ul", *entries),
        "sections": join(*bodies),
        "footer": footer,
        "data": Markup(inert_json(data)),
        "script": Markup(script),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: str(join(parts[match[1]])), _read("page.html"))  # one pass only


def inert_json(data: Any) -> str:
    """JSON that can neither end its script element nor start a comment, whatever strings it has."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def scripts() -> str:
    """All modules as one: a file opened from disk can't import others. Names are unique over all of them."""
    source = "\n".join(_read(name) for name in SCRIPTS)
    source = re.sub(r"^import .* from \"\./\w+\.js\";\n", "", source, flags=re.M)
    return re.sub(r"^export ", "", source, flags=re.M)


def _read(name: str) -> str:
    return files("patchmix.report").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
