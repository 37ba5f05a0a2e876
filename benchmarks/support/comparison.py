"""Published figures next to simulated ones. Figures that calibrate a simulation are inputs, which are listed and not compared."""

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table

from benchmarks.support.command import parser_of
from penstock.pipeline.inspect.report.text import printed

WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a paper and what the simulator gives for it."""

    name: str
    simulated: float
    published: float
    upper: float | None = None
    """End of the interval that starts at `published`, if the paper gives one for several settings."""
    tolerance: float
    """As a share of the published figure, or in percentage points if `unit` is "%"."""
    unit: Literal["", "s", "x", "%"] = ""

    @property
    def deviation(self) -> float:
        """Deviation from the published figure, or the nearer end of its interval: a share, or percentage points if `unit` is "%"."""
        highest = self.published if self.upper is None else self.upper
        nearest = min(max(self.simulated, self.published), highest)
        return self.simulated - nearest if self.unit == "%" else self.simulated / nearest - 1.0

    @property
    def holds(self) -> bool:
        """True if the deviation is within the tolerance."""
        return abs(self.deviation) <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A paper's experiment: inputs, assumptions and figures."""

    paper: str
    inputs: dict[str, Any]
    """From the paper: settings, and the figures that calibrate the simulation."""
    assumed: dict[str, Any]
    """Values that the paper leaves open."""
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()
    more: dict[str, Any]
    """Further results of the simulation, for `--json`."""

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        names = ("name", "unit", "simulated", "published", "deviation", "tolerance", "holds")
        figures = [{name: getattr(figure, name) for name in names} for figure in self.figures]
        for figure, row in zip(self.figures, figures, strict=True):
            if figure.upper is not None:
                row["published"] = [figure.published, figure.upper]
        inputs = {"inputs": self.inputs, "assumed": self.assumed}
        return {"paper": self.paper, **self.more, **inputs, "figures": figures, "notes": list(self.notes)}


def comparison_as_text(comparison: Comparison) -> str:
    """A paper's figures next to the simulated ones, with inputs and notes."""
    table = Table(box=None, pad_edge=False)
    for name in ("figure", "simulated", "published", "deviation", "allowed", ""):
        table.add_column(name, justify="left" if name in ("figure", "") else "right", no_wrap=True)
    for figure in comparison.figures:
        published = _shown(figure, figure.published) + (f" to {_shown(figure, figure.upper)}" if figure.upper is not None else "")
        off = f"{100 * figure.deviation:+.1f} {'points' if figure.unit == '%' else '%'}"
        table.add_row(
            figure.name, _shown(figure, figure.simulated), published, off, f"{100 * figure.tolerance:g}", "" if figure.holds else "misses"
        )
    lists = [*_listed("put in", comparison.inputs), *_listed("assumed", comparison.assumed)]
    return "\n".join([comparison.paper, "", *lists, "", printed(table, width=WIDTH).rstrip("\n"), "", *comparison.notes]) + "\n"


def _shown(figure: Figure, value: float) -> str:
    return {"%": f"{value:.1%}", "s": f"{value:.1f} s", "x": f"{value:.3f}x", "": f"{value:.4g}"}[figure.unit]


def _listed(name: str, table: dict[str, Any]) -> list[str]:
    pairs: list[tuple[str, Any]] = []
    for key, value in table.items():
        if isinstance(value, dict):
            pairs.append((key, ""))
            pairs += [(f"  {inner}", _flat(values)) for inner, values in value.items()]
        else:
            pairs.append((key, value))
    texts = [f"{key}: {value}".rstrip().removesuffix(":") for key, value in pairs]
    return [f"{label:<9}{text}" for label, text in zip(itertools.chain([name], itertools.repeat("")), texts, strict=False)]


def _flat(values: Any) -> str:
    if not isinstance(values, dict):
        return str(values)
    return ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items())


def comparison_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Parser of the options of every paper."""
    parser = parser_of(module, doc)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", action="store_true", help="measure on the running system instead of simulating")
    parser.add_argument("--write", action="store_true", help="write what was measured into the page of the papers")
    return parser


def show(reproduce: Callable[[], Comparison], *, as_json: bool) -> None:
    """Print a paper's comparison, as text or JSON."""
    comparison = reproduce()
    print(json.dumps(comparison.as_json(), indent=1) if as_json else comparison_as_text(comparison).rstrip("\n"))
