"""Pieces of a page: escaped text, tables, curves. No text of a run becomes markup, and a page has no script."""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple
from urllib.parse import urlencode

STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--dim:#59636e;--line:#d1d9e0;--back:#fff;--soft:#f6f8fa;--link:#0969da}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#9198a1;--line:#3d444d;--back:#0d1117;--soft:#151b23;--link:#58a6ff}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1200px;padding:12px 16px;font:15px/1.45 system-ui,sans-serif;color:var(--ink);
background:var(--back)}a{color:var(--link);text-decoration:none}a:hover{text-decoration:underline}h1{font-size:20px;margin:8px 0}
h2{font-size:16px;margin:20px 0 6px}.dim{color:var(--dim)}.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%}
th{text-align:left;color:var(--dim);font-weight:500}td,th{padding:4px 12px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}pre,textarea{font:13px/1.4 ui-monospace,monospace;background:var(--soft);
color:var(--ink);border:1px solid var(--line);border-radius:6px;padding:8px;width:100%;overflow-x:auto;white-space:pre-wrap;
overflow-wrap:anywhere}textarea{min-height:90px}button{font:inherit;padding:4px 14px}nav a{margin-right:14px}
pre.wide{white-space:pre;overflow-wrap:normal}
.card{border:1px solid var(--line);border-radius:6px;padding:8px 12px;margin:8px 0;background:var(--soft)}
.card p{margin:2px 0;overflow-wrap:anywhere;white-space:pre-wrap}.bad{color:#cf222e}svg{max-width:100%;height:auto;display:block}
td svg{max-width:none}
.key{display:inline-block;width:18px;height:3px;margin:0 6px 3px 0;vertical-align:middle}
"""
DIGEST = f"sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}"
POLICY = f"default-src 'none'; style-src '{DIGEST}'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df")


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


class Curve(NamedTuple):
    """A name, and values by their place; None where there is none."""

    name: str
    values: Sequence[float | None]


def text(value: object) -> Html:
    """Any value as text."""
    return value if isinstance(value, Html) else Html(escape("" if value is None else str(value)))


def link(name: object, path: str, **query: object) -> Html:
    """A link to another page of this server, relative to the present one."""
    return Html(f'<a href="{escape(address(path, **query))}">{text(name)}</a>')


def address(path: str, **query: object) -> str:
    """The relative address of a page."""
    return f"{path}?{urlencode({name: str(value) for name, value in query.items()})}" if query else path


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """Rows under a head; a name that begins with # is a column of numbers."""
    kinds = [' class="n"' if name.startswith("#") else "" for name in head]
    top = "".join(f"<th{kind}>{text(name.lstrip('#'))}</th>" for name, kind in zip(head, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{text(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>" for row in rows
    )
    return Html(f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>')


def pairs(values: Mapping[str, object]) -> Html:
    """Names and values."""
    return table(("", ""), values.items())


def chart(curves: Sequence[Curve], *, width: int = 640, height: int = 180, axes: bool = True) -> Html:
    """Curves over the same ranges of places and values, as a picture with a key: a shorter one ends where its places do."""
    known = [value for curve in curves for value in curve.values if value is not None]
    if not known:
        return Html('<span class="dim">no values yet</span>' if axes else "")
    low, high = min(known), max(known)
    last = max(1, *(len(curve.values) - 1 for curve in curves))
    lines = [_line(curve, low, high, last, width, height, COLOURS[number % len(COLOURS)]) for number, curve in enumerate(curves)]
    said = f"from {low:.3g} to {high:.3g}"
    frame = f'role="img" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    picture = f"<svg {frame}><title>{said}</title>{''.join(lines)}</svg>"
    if not axes:
        return Html(picture)
    keys = [
        f'<svg class="key" width="18" height="3"><rect width="18" height="3" fill="{COLOURS[number % len(COLOURS)]}"/></svg>'
        for number in range(len(curves))
    ]
    named = " · ".join(f"{key}{text(curve.name)}" for key, curve in zip(keys, curves, strict=True))
    return Html(f'{picture}<p class="dim">{named}; {said}</p>')


def _line(curve: Curve, low: float, high: float, last: int, width: int, height: int, colour: str) -> str:
    """One curve of places up to `last`; a single value is a dot."""
    span = (high - low) or 1.0
    points = [
        f"{4 + place * (width - 8) / last:.1f},{height - 4 - (value - low) / span * (height - 8):.1f}"
        for place, value in enumerate(curve.values)
        if value is not None
    ]
    if len(points) == 1:
        across, down = points[0].split(",")
        return f'<circle r="3" fill="{colour}" cx="{across}" cy="{down}"/>'
    polyline = " ".join(points)
    return f'<polyline fill="none" stroke-width="2" stroke-linecap="round" stroke="{colour}" points="{polyline}"/>'


def page(title: str, body: Sequence[Html], *, refresh_s: int | None = None) -> bytes:
    """A whole document; with `refresh_s` the browser loads it again after so long."""
    again = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"{again}<title>{escape(title)} · Penstock</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>"
    ).encode("utf-8", "replace")
