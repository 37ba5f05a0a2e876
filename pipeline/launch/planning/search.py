"""Searches the best split of accelerators between rollout and training, and its schedule, by simulation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from penstock.pipeline.launch.planning.engine import Outcome
from penstock.pipeline.launch.planning.simulator import simulate
from penstock.pipeline.launch.planning.workload import Workload
from penstock.pipeline.scheduling.rules import MODES, Schedule

GRID = 7
"""Largest number of splits that are simulated first; then the neighbours of the best."""
STEP_SIZES = (8, 16, 32, 64, 128)
FIRST_STEP_SIZE = 32
NEAR_BEST = 0.95
"""The smallest step size that reaches this share of the best speed is chosen: larger steps learn less from each sample."""
MOST_SAMPLES = 24_000
"""Largest number of samples in one simulated run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The accelerators to divide between rollout and training, and their speeds."""

    accelerators: int
    base: Workload
    """Its schedule gives K, S and U; its engines and steps are replaced."""
    max_lag: int
    """Largest lag, in versions."""
    engine_size: int = 1
    """Accelerators of one engine."""
    trainer_size: int = 1
    """Number of accelerators of the base's training times."""
    in_flight: bool = True
    """True if engines can load weights while they generate."""
    step_sizes: tuple[int, ...] = STEP_SIZES
    """Values of `prompts_per_step` to choose from."""
    settings: Mapping[int, Mapping[str, Any]] | None = None
    """Accelerators for training -> the settings with which the model fits into their memory; None for any number of them."""

    def __post_init__(self) -> None:
        if self.accelerators < self.engine_size + 1:
            raise ValueError(f"{self.accelerators} accelerators are too few: an engine needs {self.engine_size}, training at least 1")
        if self.max_lag < 0:
            raise ValueError(f"the lag bound must be 0 or more, not {self.max_lag}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One simulated combination of split and schedule."""

    mode: str
    generating: int
    """Accelerators for rollouts; the others train."""
    training: int
    prompts_per_step: int
    max_lag: int
    tokens_per_s: float
    """Trained completion tokens per second, in the steady state."""
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The best candidate, and the candidates with which it is compared."""

    cluster: Cluster
    best: Candidate
    by_mode: tuple[Candidate, ...]
    """The best of each mode at the same `prompts_per_step`."""
    by_step_size: tuple[Candidate, ...]
    """The best mode and split at each `prompts_per_step`."""
    simulated: tuple[Candidate, ...]
    """All simulated candidates with the best `prompts_per_step`."""
    alternating: Candidate
    """All accelerators generate a round, then all train it."""

    @property
    def synchronous(self) -> Candidate:
        """The candidate with schedule `synchronous` at its best split."""
        return next(candidate for candidate in self.by_mode if candidate.mode == "synchronous")

    @property
    def speedup(self) -> float:
        """Speed-up of the best candidate over `synchronous`, each at its best split."""
        return self.best.tokens_per_s / self.synchronous.tokens_per_s


_speed = attrgetter("tokens_per_s")


def search(cluster: Cluster) -> Plan:
    """Find the fastest split, mode and step size by simulation; return it with the candidates that it is compared with.

    Raises `ValueError` if a simulation deadlocks.
    """
    first = min(cluster.step_sizes, key=lambda size: abs(size - FIRST_STEP_SIZE))
    rough = max(_modes(cluster, prompts_per_step=first), key=_speed)
    by_size = [simulated(cluster, mode=rough.mode, generating=rough.generating, prompts_per_step=size) for size in cluster.step_sizes]
    enough = NEAR_BEST * max(map(_speed, by_size))
    size = next(candidate.prompts_per_step for candidate in by_size if candidate.tokens_per_s >= enough)
    candidates = _modes(cluster, prompts_per_step=size)
    by_mode = [max((candidate for candidate in candidates if candidate.mode == mode), key=_speed) for mode in _allowed(cluster)]
    return Plan(
        cluster=cluster, best=max(by_mode, key=_speed), by_mode=tuple(by_mode), by_step_size=tuple(by_size), simulated=tuple(candidates),
        alternating=alternating(cluster, prompts_per_step=size),
    )  # fmt: skip


def simulated(cluster: Cluster, *, mode: str, generating: int, prompts_per_step: int) -> Candidate:
    """Simulate a mode with `generating` accelerators for rollouts; all others train."""
    schedule, training = schedule_of(cluster, mode=mode, prompts_per_step=prompts_per_step), cluster.accelerators - generating
    return _candidate(cluster, schedule, engines=generating // cluster.engine_size, generating=generating, training=training)


def alternating(cluster: Cluster, *, prompts_per_step: int) -> Candidate:
    """Simulate all accelerators generating a round and then training it, with no time for the switch."""
    schedule, every = schedule_of(cluster, mode="synchronous", prompts_per_step=prompts_per_step), cluster.accelerators
    return _candidate(cluster, schedule, engines=max(1, every // cluster.engine_size), generating=every, training=every)


def schedule_of(cluster: Cluster, *, mode: str, prompts_per_step: int) -> Schedule:
    """A mode's schedule with the cluster's sizes, and the largest lag that both allow."""
    preset = MODES[mode]
    lag = cluster.max_lag if preset.loads_at == "step" else min(preset.max_lag, cluster.max_lag)
    return replace(with_sizes(preset, cluster.base.schedule), prompts_per_step=prompts_per_step, max_lag=lag)


def with_sizes(preset: Schedule, own: Schedule) -> Schedule:
    """A mode's schedule with U, K, S and the oversampling of another one."""
    names = ("prompts_per_step", "samples_per_prompt", "steps_per_version", "oversample", "oversample_groups")
    return replace(preset, **{name: getattr(own, name) for name in names})


def _candidate(cluster: Cluster, schedule: Schedule, *, engines: int, generating: int, training: int) -> Candidate:
    """Simulate a schedule with these engines and training accelerators, over enough steps for a steady state."""
    base, share = cluster.base, cluster.trainer_size / training
    per_step = schedule.prompts_per_step * schedule.samples_per_prompt
    full = max(3 * schedule.steps_per_version, 6 + 3 * (schedule.max_lag + 1) * schedule.steps_per_version)
    steps = max(3 * schedule.steps_per_version, min(full, MOST_SAMPLES // per_step))
    times: dict[str, Any] = {"train_token_s": base.train_token_s * share, "train_group_s": base.train_group_s * share}
    outcome = simulate(replace(base, schedule=schedule, steps=steps, engines=engines, **times))
    return Candidate(
        mode=schedule.mode, generating=generating, training=training, prompts_per_step=schedule.prompts_per_step, max_lag=schedule.max_lag,
        tokens_per_s=_steady(outcome, schedule), outcome=outcome,
    )  # fmt: skip


def _steady(outcome: Outcome, schedule: Schedule) -> float:
    """Tokens per second from the end of the first third of the run's rounds, when the pipeline is full, to its end."""
    rounds = len(outcome.steps) // schedule.steps_per_version
    first = max(1, rounds // 3) * schedule.steps_per_version
    later = outcome.steps[first:]
    return sum(step.tokens for step in later) / (later[-1].ended_s - outcome.steps[first - 1].ended_s)


def _allowed(cluster: Cluster) -> list[str]:
    """The modes that the lag limit and the engines allow. With a lag of 0 the others equal `pipelined`, so they are skipped."""
    return [
        mode
        for mode, schedule in MODES.items()
        if (schedule.max_lag == 0 or cluster.max_lag > 0) and (schedule.loads_at != "step" or cluster.in_flight)
    ]


def _modes(cluster: Cluster, *, prompts_per_step: int) -> list[Candidate]:
    """The simulated splits of every allowed mode."""
    return [candidate for mode in _allowed(cluster) for candidate in _splits(cluster, mode, prompts_per_step)]


def _splits(cluster: Cluster, mode: str, prompts_per_step: int) -> Iterator[Candidate]:
    """Simulate a mode on a grid of splits, then halfway to the neighbours of its best split until that has none."""
    size, fitting = cluster.engine_size, cluster.settings
    engines = range(1, (cluster.accelerators - 1) // size + 1)
    splits = [count for count in engines if fitting is None or cluster.accelerators - count * size in fitting]
    points = min(GRID, len(splits))
    candidates = {
        index: simulated(cluster, mode=mode, generating=splits[index] * size, prompts_per_step=prompts_per_step)
        for index in sorted({round(point * (len(splits) - 1) / max(1, points - 1)) for point in range(points)})
    }
    while True:
        best = max(candidates, key=lambda index: candidates[index].tokens_per_s)
        neighbours = [index for index in _between(sorted(candidates), best) if index not in candidates]
        if not neighbours:
            break
        for index in neighbours:
            candidates[index] = simulated(cluster, mode=mode, generating=splits[index] * size, prompts_per_step=prompts_per_step)
    yield from (candidates[index] for index in sorted(candidates))


def _between(simulated: Sequence[int], best: int) -> list[int]:
    """Splits halfway between the best one and its simulated neighbours."""
    index = simulated.index(best)
    return [(best + simulated[other]) // 2 for other in (index - 1, index + 1) if 0 <= other < len(simulated)]
