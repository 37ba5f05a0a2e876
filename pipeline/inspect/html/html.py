"""Bytes of the page: template, style, code and packed data in one file.

No text of a run becomes markup: texts are base64 and reach the document as text nodes. The content security policy allows only the
page's own code and style, by digest, and no network.
"""

import base64
import hashlib
import html
from collections.abc import Mapping
from importlib.resources import files

from penstock.pipeline.inspect.html.chunks import Chunks

CODE = ("data.js", "dom.js", "timeline.js", "pointer.js", "curves.js", "samples.js", "group.js", "picked.js", "main.js")


def assemble(*, title: str, index: str, vocabulary: str, chunks: Chunks) -> bytes:
    """The complete page; index and code come first, so that a browser renders before it has read the rest."""
    style, code = _asset("page.css"), "\n".join(['"use strict";', *map(_asset, CODE)])
    parts = {
        **{f"x{number}": text for number, text in chunks.texts.items()},
        **{f"k{number}": text for number, text in chunks.tokens.items()},
    }
    blocks = [_block(name, text) for name, text in {"vocabulary": vocabulary, **parts}.items()]
    values = {
        "TITLE": html.escape(title),
        "POLICY": f"default-src 'none'; script-src '{_digest(code)}'; style-src '{_digest(style)}'; base-uri 'none'; form-action 'none'",
        "STYLE": f"<style>{style}</style>",
        "INDEX": _block("index", index),
        "CODE": f"<script>{code}</script>",
        "CHUNKS": "\n".join(blocks),
    }
    return _fill(_asset("page.html"), values).encode("utf-8", "replace")


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Replace `{{NAME}}`, each once, in the order of the template; inserted values are not expanded."""
    pieces, rest = [], template
    for name, value in values.items():
        before, mark, rest = rest.partition(f"{{{{{name}}}}}")
        assert mark, f"the template has no {name}"
        pieces += [before, value]
    return "".join([*pieces, rest])


def _block(name: str, data: str) -> str:
    """A script element; base64 has no character that ends it."""
    return f'<script type="application/octet-stream" id="{name}">{data}</script>'


def _asset(name: str) -> str:
    return (files("penstock.pipeline.inspect.html") / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
