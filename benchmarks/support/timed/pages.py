"""Tables and figures of the papers' page, which a benchmark replaces with its results."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.command import ROOT

PAGE, IMAGES = ROOT / "docs/explanation/papers.md", ROOT / "docs/images"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is text, the others are numbers.

    Example:
        markdown(["a", "b"], [["x", "1"]])  # -> "|a|b|\n|---|--:|\n|x|1|"
    """
    lines = [list(heads), *rows]
    body = [f"|{'|'.join(cells)}|" for cells in lines]
    return "\n".join([body[0], "|---" + "|--:" * (len(heads) - 1) + "|", *body[1:]])


def replace_table(name: str, text: str, *, page: Path = PAGE) -> None:
    """Replace the text between the page's comments `NAME` and `/NAME`. Raises `SystemExit` if they are missing."""
    old = page.read_text(encoding="utf-8")
    new, count = re.subn(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", lambda found: found[1] + text + found[2], old, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{page}: expected one pair of comments {name} and /{name}, found {count}")
    page.write_text(new, encoding="utf-8")


def figure(*, width: float = 8.0, height: float = 3.6, columns: int = 1) -> tuple[Any, Any]:
    """A figure and its axes, one or a list."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(width, height), layout="constrained")
    return canvas, canvas.subplots(1, columns)


def save(canvas: Any, name: str) -> None:
    """Write the page's image NAME.svg without a date, so that equal results give equal bytes."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    IMAGES.mkdir(exist_ok=True)
    FigureCanvasSVG(canvas).print_figure(IMAGES / f"{name}.svg", metadata={"Date": None})
