"""A published figure beside the simulated one.

The rule: what a simulation was calibrated on is an input and is listed apart; only the other figures are compared.
"""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a paper and what the simulator gives for it."""

    name: str
    simulated: float
    published: float
    upper: float | None = None
    """The end of an interval that begins at `published`, where the paper gives one for several settings together."""
    tolerance: float
    """As a share of the published figure, or in percentage points where `unit` is "%"."""
    unit: Literal["", "s", "x", "%"] = ""

    @property
    def deviation(self) -> float:
        """How far off the published figure, or the nearer end of its interval: a share, or percentage points where `unit` is "%"."""
        highest = self.published if self.upper is None else self.upper
        nearest = min(max(self.simulated, self.published), highest)
        return self.simulated - nearest if self.unit == "%" else self.simulated / nearest - 1.0

    @property
    def holds(self) -> bool:
        """Whether the deviation is within the tolerance."""
        return abs(self.deviation) <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A paper's experiment: what was put in, what was assumed, and what came out."""

    paper: str
    inputs: dict[str, Any]
    """Taken from the paper: settings, and the figures that the simulation was calibrated on."""
    assumed: dict[str, Any]
    """What the paper does not say."""
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()
    more: dict[str, Any]
    """What else the simulation gives, for `--json`."""

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        figures = [
            {
                "name": figure.name,
                "unit": figure.unit,
                "simulated": figure.simulated,
                "published": figure.published if figure.upper is None else [figure.published, figure.upper],
                "deviation": figure.deviation,
                "tolerance": figure.tolerance,
                "holds": figure.holds,
            }
            for figure in self.figures
        ]
        return {
            "paper": self.paper,
            **self.more,
            "inputs": self.inputs,
            "assumed": self.assumed,
            "figures": figures,
            "notes": list(self.notes),
        }
