"""Renders the templates of the web pages: every value is escaped, and hidden characters of a run's texts are shown as escapes."""

import base64
import functools
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from penstock.pipeline.inspect.records.runs import size
from penstock.topics.wire.visible import visible

SCRIPTS = ("uplot.js", "dom.js", "data.js", "charts.js", "group.js", "samples.js", "timeline.js", "pointer.js", "app.js")
"""Scripts of every page, in the order in which they run; a page of the server also has `htmx.js`."""
STYLES = ("uplot.css", "app.css")
SPARK_POINTS = 48


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with so many significant digits: `number(0.20625)` is "0.206", `number(1621.4)` is "1,621"; "–" for none."""
    if value is None or value != value:  # noqa: PLR0124
        return "–"
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}".replace("-", "−", 1 if value < 0 else 0)
    if value == 0:
        return "0"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    leading = 0 if whole else -int(f"{abs(value):e}".partition("e")[2]) - 1
    text = f"{value:,.{max(0, digits - whole + leading)}f}"
    return text.replace("-", "−")


def share(value: float | None) -> str:
    """Format a share of 1 in percent: `share(0.784)` is "78 %"; "–" for none."""
    return "–" if value is None else f"{100 * value:.0f} %"


def spark(values: Sequence[float | None], low: float | None = None, high: float | None = None) -> Markup:
    """Return a curve of 100 by 20 units as SVG, by default from its least to its greatest value; many values are averaged in ranges."""
    points = [value for value in values if value is not None]
    if len(points) < 2:
        return Markup("")
    count = min(SPARK_POINTS, len(points))
    parts = [points[index * len(points) // count : (index + 1) * len(points) // count] for index in range(count)]
    means = [sum(part) / len(part) for part in parts]
    least, greatest = min(means) if low is None else low, max(means) if high is None else high
    span = (greatest - least) or 1.0
    line = " ".join(f"{100 * index / (count - 1):.1f},{19 - 18 * (mean - least) / span:.1f}" for index, mean in enumerate(means))
    shape = 'viewBox="0 0 100 20" preserveAspectRatio="none" fill="none" stroke="currentColor" stroke-width="0.5"'
    return Markup(f'<svg class="spark" {shape} aria-hidden="true"><polyline points="{{}}"/></svg>').format(line)


def bar(value: float | None, kind: str = "") -> Markup:
    """Return a bar that is filled to a share of 1, as SVG; `kind` is its class."""
    filled = 100 * min(1.0, max(0.0, value or 0.0))
    return Markup(
        '<svg class="bar {}" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="rest" width="100" height="8"/><rect width="{:.1f}" height="8"/></svg>'
    ).format(kind, filled)


def _shown(value: Any) -> Any:
    if isinstance(value, Markup):
        return value
    return "" if value is None else visible(value) if isinstance(value, str) else value


@functools.cache
def environment() -> Environment:
    """Return the template engine; it escapes every value, and refuses unknown names."""
    made = Environment(
        loader=PackageLoader("penstock.pipeline.inspect.web"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"number": number, "share": share, "size": size, "version": version}
    made.globals |= {"spark": spark, "bar": bar, "styles": STYLES, "scripts": ("htmx.js", *SCRIPTS)}
    return made


def render(template: str, **values: Any) -> bytes:
    """Render a page as UTF-8; characters that UTF-8 does not have are replaced."""
    return environment().get_template(template).render(**values).encode("utf-8", "replace")


@functools.cache
def asset(name: str) -> str:
    """Return the text of a script or style sheet."""
    return (files("penstock.pipeline.inspect.web") / "static" / name).read_text(encoding="utf-8")


@functools.cache
def version(name: str) -> str:
    """Return a name for the content of a script or style sheet, part of its address, so that browsers may keep it."""
    return hashlib.sha256(asset(name).encode()).hexdigest()[:12]


def digest(text: str) -> str:
    """Return the source expression by which a Content-Security-Policy allows exactly this script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
