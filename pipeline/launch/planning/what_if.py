"""Predicts a recorded run's time with another number of rollout workers or another schedule.

The run itself is simulated too: its deviation from the measured time shows the accuracy of the simulation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.pipeline.launch.planning import recorded
from penstock.pipeline.launch.planning.engine import Outcome
from penstock.pipeline.launch.planning.recorded import RunTimes
from penstock.pipeline.launch.planning.rendering import table
from penstock.pipeline.launch.planning.search import with_sizes
from penstock.pipeline.launch.planning.simulator import simulate
from penstock.pipeline.launch.planning.workload import Workload
from penstock.pipeline.scheduling.rules import MODES


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The run's prompts under another schedule or with another number of rollout workers."""

    mode: str
    workers: int
    max_lag: int
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A recorded run, its simulation, and simulated variants."""

    run: str
    measured_s: float
    work: Workload
    outcome: Outcome
    variants: tuple[Variant, ...]

    @property
    def deviation(self) -> float:
        """Relative deviation of the simulated from the measured wall time."""
        return self.outcome.wall_s / self.measured_s - 1.0

    @property
    def best(self) -> Variant:
        """The fastest variant with as many rollout workers as the run had."""
        return min(
            (variant for variant in self.variants if variant.workers == self.work.engines), key=lambda variant: variant.outcome.wall_s
        )


def compare(record: RunTimes, *, run: str) -> WhatIf:
    """Simulate a recorded run and its variants. Raises `ValueError` if the run's log lacks the times."""
    work = recorded.workload(record)
    engines, swaps, own = work.engines, record.config.engine.swaps_in_flight, work.schedule
    variants = []
    for mode, preset in MODES.items():
        if preset.loads_at == "step" and not swaps:
            continue
        schedule = own if mode == own.mode else with_sizes(preset, own)
        for workers in sorted({max(1, engines // 2), engines, engines + 1, 2 * engines}):
            outcome = simulate(replace(work, schedule=schedule, engines=workers))
            variants.append(Variant(mode=mode, workers=workers, max_lag=schedule.max_lag, outcome=outcome))
    return WhatIf(run=run, measured_s=recorded.wall_s(record), work=work, outcome=simulate(work), variants=tuple(variants))


def as_json(comparison: WhatIf) -> dict[str, Any]:
    return {
        "run": comparison.run,
        "mode": comparison.work.schedule.mode,
        "workers": comparison.work.engines,
        "measured_wall_s": comparison.measured_s,
        "simulated_wall_s": comparison.outcome.wall_s,
        "deviation": comparison.deviation,
        "times": dict(recorded.as_json(comparison.work)),
        "simulated": comparison.outcome.as_json(),
        "variants": [
            {
                "mode": variant.mode,
                "workers": variant.workers,
                "max_lag": variant.max_lag,
                "speedup": _speedup(comparison, variant),
                **variant.outcome.as_json(),
            }
            for variant in comparison.variants
        ],
    }


def as_text(comparison: WhatIf) -> str:
    """The run's measured times, the deviation of its simulation, and the variants."""
    work, best = comparison.work, comparison.best
    times: Mapping[str, float] = recorded.as_json(work)
    lines = [
        f"run {comparison.run}: {work.schedule.mode}, {work.engines} rollout workers, {work.steps} steps; first sample to last step took "
        f"{comparison.measured_s:.1f} s, simulated {comparison.outcome.wall_s:.1f} s ({comparison.deviation:+.1%})",
        "measured: " + ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} {_time(name, value)}" for name, value in times.items()),
        f"with the same workers {best.mode} would be the fastest: {best.outcome.wall_s:.1f} s, {_speedup(comparison, best):.2f}x; "
        "more workers count as more machines, each as fast as one of this run",
        "",
    ]
    columns = ("mode", "rollout workers", "wall s", "speed-up", "trainer waits", "engines busy", "lag", "at most")
    rows = [
        (
            variant.mode,
            str(variant.workers),
            f"{outcome.wall_s:,.1f}",
            f"{_speedup(comparison, variant):.2f}",
            f"{outcome.trainer_waiting_ratio:.0%}",
            f"{outcome.rollout_busy_share:.0%}",
            f"{outcome.lag_mean:.1f}",
            str(outcome.lag_max),
        )
        for variant in comparison.variants
        for outcome in [variant.outcome]
    ]
    return "\n".join(lines) + "\n" + table(columns, rows)


def _speedup(comparison: WhatIf, variant: Variant) -> float:
    return comparison.outcome.wall_s / variant.outcome.wall_s


def _time(name: str, value: float) -> str:
    if not name.endswith("_s"):
        return f"{value:.0%}" if name.endswith("share") else f"{value:.1f}"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"
