"""LaTeX → MathML when the site is built: every browser draws MathML itself, so no script and no fonts are needed."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(text: str, **_: Any) -> str:
    """Called by MkDocs with the HTML of each page."""
    return MATH.sub(lambda m: convert(html.unescape(m[2]), display="block" if m[1] == "div" else "inline"), text)
