"""Formats numbers, durations and tables for the text of a report."""

import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.topics.ledger import Entry

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 32


def figures(values: Mapping[str, Any], *shown: tuple[str, str] | tuple[str, str, float]) -> list[str]:
    """Format the values that are not None; `shown` has (key, format) or (key, format, factor) of each."""
    return [form.format(values[key] * (factor[0] if factor else 1)) for key, form, *factor in shown if values.get(key) is not None]


def joined(parts: Sequence[str], separator: str = " · ") -> list[str]:
    """Return the parts joined to one line, in a list; [] if there are none."""
    return [separator.join(parts)] if parts else []


def change(first: float | None, last: float | None, form: Callable[[float], str] = "{:.2f}".format) -> str:
    """Format a change: `change(0.37, 0.9)` is "0.37 -> 0.90"."""
    return f"{'-' if first is None else form(first)} -> {'-' if last is None else form(last)}"


def use_text(use: str) -> str:
    """Return the name of a use of time for the user: `use_text("no_group")` is "no groups"."""
    return "no groups" if use == "no_group" else use.replace("_", " ")


def percent(share: float) -> str:
    """Format a share (0 to 1) in percent: `percent(0.031)` is "3 %"."""
    return f"{100 * share:.0f} %"


def sparkline(values: Sequence[float | None], *, width: int = CURVE_WIDTH) -> str:
    """Format a curve in at most `width` characters: `sparkline([0.0, 0.5, 1.0])` is "▁▅█".

    Several values share a character, and the bars are scaled by single values, so that noise is low compared with a trend.
    """
    points = [value for value in values if value is not None]
    if not points:
        return ""
    count = min(width, len(points))
    bounds = [index * len(points) // count for index in range(count + 1)]
    means = [statistics.fmean(points[low:high]) for low, high in itertools.pairwise(bounds)]
    low, high = min(points), max(points)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] if high > low else BARS[0] for value in means)


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: `duration(3725)` is "1:02:05"."""
    rounded = round(seconds)
    hours, minutes = rounded // 3600, rounded // 60 % 60
    return f"{hours}:{minutes:02d}:{rounded % 60:02d}" if hours else f"{minutes}:{rounded % 60:02d}"


def rebased_fields(entry: Entry) -> dict[str, Any]:
    """Return what a ledger entry records about a rebase (a resumption from recomputed weights), as plain data for JSON."""
    details = json.loads(entry.details or "{}")
    return {
        "entry": entry.seq,
        "time_s": entry.time_ns / 1e9,
        "steps": entry.step,
        "digest": entry.digest,
        "changed": details.get("changed", {}),
        "differences": details.get("differences", []),
    }


def rebased_line(rebased: Mapping[str, Any]) -> str:
    """Describe a rebase in one line, with the first number that differs."""
    changed = ", ".join(f"{name} {recorded} -> {here}" for name, (recorded, here) in rebased["changed"].items())
    differences, parts = rebased["differences"], [f"arithmetic {changed}"] if changed else []
    if differences:
        steps, first = sorted({difference["step"] for difference in differences}), differences[0]
        which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        parts.append(f"{which} repeated with other bits, first {first['name']} {first['found']}, recorded {first['recorded']}")
    return f"rebased after {rebased['steps']} steps (ledger entry {rebased['entry']}): {'; '.join(parts)}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line per row, with cells padded to the width of their column."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
