"""RollArt's environments of uneven latency (arXiv 2512.22560): trajectory-level rollout and redundancy.

Both arrangements have the same latencies, sampled for each trajectory and turn from the seed.
"""

import statistics
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import simpy

from benchmarks.support.comparison import Comparison, Figure

GROUPS, GROUP_SIZE = 32, 8
REDUNDANT_GROUPS, REDUNDANT_SIZE = 36, 12
TURNS = 40
"""The middle of the 30 to 50 turns of SWE-bench, the paper's task with the slowest environments."""
LATENCY_MEAN_S = 10.0
SPREADS_S = (1.0, 2.0, 5.0, 10.0)
GENERATE_S = 2.0
"""Generation of one turn: a hundred tokens at 50 a second."""
SEEDS = tuple(range(8))
TOLERANCE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """Latencies of the trajectories of one step."""

    latencies: npt.NDArray[np.float64]
    """[groups, samples, turns] seconds of an environment's response."""
    generate_s: float

    @classmethod
    def sampled(
        cls, *, spread_s: float, groups: int, samples: int, seed: int, generate_s: float = GENERATE_S, turns: int = TURNS
    ) -> "Environments":
        """Latencies from N(`LATENCY_MEAN_S`, `spread_s`), cut at zero."""
        random = np.random.default_rng((seed, int(spread_s * 1000)))
        latencies = np.maximum(0.0, random.normal(LATENCY_MEAN_S, spread_s, (groups, samples, turns)))
        return cls(latencies=latencies, generate_s=generate_s)


def in_lockstep_s(environments: Environments) -> float:
    """Seconds until all trajectories have ended in lock-step: a turn takes as long as its slowest environment."""
    return float((environments.latencies.max(axis=(0, 1)) + environments.generate_s).sum())


def by_trajectory_s(environments: Environments, *, groups: int, samples: int) -> float:
    """Seconds until `groups` groups have `samples` ended trajectories that run independently; the others are aborted."""
    world = simpy.Environment()
    done, ended, whole = world.event(), [0] * len(environments.latencies), 0

    def trajectory(group: int, latencies: npt.NDArray[np.float64]) -> Generator[Any, Any, None]:
        nonlocal whole
        yield world.timeout(float((latencies + environments.generate_s).sum()))
        ended[group] += 1
        whole += ended[group] == samples
        if whole == groups and not done.triggered:
            done.succeed()

    for group, members in enumerate(environments.latencies):
        for latencies in members:
            world.process(trajectory(group, latencies))
    world.run(until=done)
    return float(world.now)


def speedup(spread_s: float, *, generate_s: float = GENERATE_S, turns: int = TURNS) -> float:
    """Lock-step time over trajectory-level time, mean over the seeds."""
    ratios, needed = [], {"groups": GROUPS, "samples": GROUP_SIZE}
    for seed in SEEDS:
        sampled = Environments.sampled(spread_s=spread_s, seed=seed, generate_s=generate_s, turns=turns, **needed)
        ratios.append(in_lockstep_s(sampled) / by_trajectory_s(sampled, **needed))
    return statistics.fmean(ratios)


def redundancy(spread_s: float, *, groups: int, samples: int) -> float:
    """Time of exactly the needed groups over that of `groups` groups of `samples`, of which the first ones count; mean over the seeds."""
    ratios = []
    for seed in SEEDS:
        more = Environments.sampled(spread_s=spread_s, groups=groups, samples=samples, seed=seed)
        exact = Environments(latencies=more.latencies[:GROUPS, :GROUP_SIZE], generate_s=more.generate_s)
        needed = {"groups": GROUPS, "samples": GROUP_SIZE}
        ratios.append(by_trajectory_s(exact, **needed) / by_trajectory_s(more, **needed))
    return statistics.fmean(ratios)


def reproduce() -> Comparison:
    """The experiment with uneven latencies, and the gain of redundant trajectories."""
    speedups = {spread: speedup(spread) for spread in SPREADS_S}
    least, most = min(SPREADS_S), max(SPREADS_S)
    figures = (
        Figure(
            name=f"by trajectory, latency N(10 s, {least:g} s)", simulated=speedups[least], published=1.23, tolerance=TOLERANCE, unit="x"
        ),
        Figure(name=f"by trajectory, latency N(10 s, {most:g} s)", simulated=speedups[most], published=2.27, tolerance=TOLERANCE, unit="x"),
    )
    varied = {
        f"{seconds:g} s, {turns} turns": [speedup(spread, generate_s=seconds, turns=turns) for spread in (least, most)]
        for seconds in (0.0, 4.0)
        for turns in (10, TURNS, 100)
    }
    return Comparison(
        paper="RollArt, arXiv 2512.22560, environments of uneven latency",
        inputs={"groups, samples": f"{GROUPS}, {GROUP_SIZE}", "latency": "N(10 s, σ), cut at zero", "turns": TURNS},
        assumed={"generation of a turn": f"{GENERATE_S:g} s", "turns": "the same number for all trajectories"},
        figures=figures,
        notes=(
            "The paper gives its speed-up for the ends of the range of σ.",
            "It gives neither turns nor generation time: those assumed decide the result.",
            "Redundant trajectories gain less here than the paper's 1.62x at most: no environment fails or hangs in this simulation.",
        ),
        more={
            "by_spread": {f"{spread:g}": value for spread, value in speedups.items()},
            "by_generation_time_and_turns": varied,
            "redundant": {
                f"{groups} groups of {size}": {f"{spread:g}": redundancy(spread, groups=groups, samples=size) for spread in SPREADS_S}
                for groups, size in ((GROUPS, REDUNDANT_SIZE), (REDUNDANT_GROUPS, GROUP_SIZE), (REDUNDANT_GROUPS, REDUNDANT_SIZE))
            },
        },
    )
