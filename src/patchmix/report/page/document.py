"""From parts to one inert file: this folder's template, style and scripts, all text escaped, a strict policy."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

SCRIPTS = ("dom.js", "ranking.js", "curves.js", "explorer.js", "main.js")  # each after those that it imports


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
    """Pieces in a row; those that are not Markup are escaped."""
    return Markup("".join(piece if isinstance(piece, Markup) else html.escape(piece) for piece in content))


def document(*, title: str, sections: Mapping[str, tuple[str, Markup]], data: Any, footer: str) -> str:
    """The page. sections: by id, their heading and content. data: what the scripts read, as JSON holds it.

    The policy lets exactly this style and this script run and images come from inside the file; nothing is fetched.
    """
    style, script = _read("page.css"), scripts()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    entries = (element("li", element("a", heading, href=f"#{key}")) for key, (heading, _) in sections.items())
    parts = {
        "policy": Markup(policy),
        "title": title,
        "style": Markup(style),
        "navigation": element("ul", *entries),
        "sections": join(
            *(
                element(
                    "section", element("h2", heading, id=f"{key}-title"), body, id=key, aria_labelledby=f"{key}-title"
                )
                for key, (heading, body) in sections.items()
            )
        ),
        "footer": footer,
        "data": Markup(inert_json(data)),
        "script": Markup(script),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: str(join(parts[match[1]])), _read("page.html"))  # one pass only


def inert_json(data: Any) -> str:
    """JSON that can't end its script element or start a comment, whatever strings it holds."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def scripts() -> str:
    """All modules as one: a file opened from disk can't import others. Names are unique over all of them."""
    source = "\n".join(_read(name) for name in SCRIPTS)
    source = re.sub(r"^import .* from \"\./\w+\.js\";\n", "", source, flags=re.M)
    return re.sub(r"^export ", "", source, flags=re.M)


def _read(name: str) -> str:
    return files("patchmix.report.page").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
