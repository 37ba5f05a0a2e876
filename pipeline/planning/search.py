"""The best split of accelerators between rollout and training, with its schedule: every candidate is simulated.

The rule: what a candidate is judged by comes from the simulator alone; rollout accelerators are alike, and training is as many times
faster as it has accelerators.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.pipeline.planning.outcome import Outcome
from penstock.pipeline.planning.simulator import simulate
from penstock.pipeline.planning.workload import Workload
from penstock.pipeline.scheduling.schedule import MODES, Schedule

GRID = 7
"""Splits at most that are simulated at first; then those beside the best."""
STEP_SIZES = (8, 16, 32, 64, 128)
FIRST_STEP_SIZE = 32
NEAR_BEST = 0.95
"""Of the step sizes that reach this share of the best speed, the smallest is taken: larger steps learn less from each sample."""
MOST_SAMPLES = 24_000
"""In one simulated run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The accelerators to be divided, and what each does in which time."""

    accelerators: int
    base: Workload
    """Its schedule gives K, S and U; its engines and steps are replaced."""
    max_lag: int
    """Bound of the lag, in versions."""
    engine_size: int = 1
    """Accelerators of one engine."""
    trainer_size: int = 1
    """Accelerators to which the base's training times belong."""
    in_flight: bool = True
    """Whether engines take new weights while they draw."""
    step_sizes: tuple[int, ...] = STEP_SIZES
    """Values of `prompts_per_step` to choose from."""

    def __post_init__(self) -> None:
        if self.accelerators < self.engine_size + 1:
            raise ValueError(f"{self.accelerators} accelerators: a split needs {self.engine_size} for an engine and one for training")
        if self.max_lag < 0:
            raise ValueError(f"the lag bound must be 0 or more, not {self.max_lag}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A split with a schedule, simulated."""

    mode: str
    generating: int
    """Accelerators for rollouts; the others train."""
    training: int
    prompts_per_step: int
    max_lag: int
    tokens_per_s: float
    """Of trained completions, after the begin of the run."""
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The best candidate, and what it is compared with."""

    cluster: Cluster
    best: Candidate
    by_mode: tuple[Candidate, ...]
    """The best of each mode at the same `prompts_per_step`."""
    by_step_size: tuple[Candidate, ...]
    """The best mode and split at each `prompts_per_step`."""
    simulated: tuple[Candidate, ...]
    """All that were simulated at the `prompts_per_step` of the best."""
    in_turns: Candidate
    """All accelerators draw a round, then all train it."""

    @property
    def synchronous(self) -> Candidate:
        """The best split under `synchronous`."""
        return next(candidate for candidate in self.by_mode if candidate.mode == "synchronous")

    @property
    def speedup(self) -> float:
        """Against `synchronous` at its own best split."""
        return self.best.tokens_per_s / self.synchronous.tokens_per_s


def search(cluster: Cluster) -> Plan:
    """Simulate splits, modes and step sizes. Raises `ValueError` where no candidate runs."""
    first = min(cluster.step_sizes, key=lambda size: abs(size - FIRST_STEP_SIZE))
    rough = max(_modes(cluster, prompts_per_step=first), key=_speed)
    by_size = [simulated(cluster, mode=rough.mode, generating=rough.generating, prompts_per_step=size) for size in cluster.step_sizes]
    enough = NEAR_BEST * max(map(_speed, by_size))
    size = next(candidate.prompts_per_step for candidate in by_size if candidate.tokens_per_s >= enough)
    candidates = _modes(cluster, prompts_per_step=size)
    by_mode = [max((one for one in candidates if one.mode == mode), key=_speed) for mode in _allowed(cluster)]
    return Plan(
        cluster=cluster,
        best=max(by_mode, key=_speed),
        by_mode=tuple(by_mode),
        by_step_size=tuple(by_size),
        simulated=tuple(candidates),
        in_turns=in_turns(cluster, prompts_per_step=size),
    )


def simulated(cluster: Cluster, *, mode: str, generating: int, prompts_per_step: int) -> Candidate:
    """Simulate one candidate."""
    schedule, training = schedule_of(cluster, mode=mode, prompts_per_step=prompts_per_step), cluster.accelerators - generating
    return _candidate(cluster, schedule, engines=generating // cluster.engine_size, generating=generating, training=training)


def in_turns(cluster: Cluster, *, prompts_per_step: int) -> Candidate:
    """All accelerators draw a round and then train it; the change from one to the other costs nothing."""
    schedule, every = schedule_of(cluster, mode="synchronous", prompts_per_step=prompts_per_step), cluster.accelerators
    return _candidate(cluster, schedule, engines=max(1, every // cluster.engine_size), generating=every, training=every)


def schedule_of(cluster: Cluster, *, mode: str, prompts_per_step: int) -> Schedule:
    """A mode with the cluster's sizes, and with as much lag as both allow."""
    base, preset = cluster.base.schedule, MODES[mode]
    lag = cluster.max_lag if preset.loads_at == "step" else min(preset.max_lag, cluster.max_lag)
    return replace(
        preset,
        prompts_per_step=prompts_per_step,
        samples_per_prompt=base.samples_per_prompt,
        steps_per_version=base.steps_per_version,
        oversample=base.oversample,
        max_lag=lag,
    )


def _candidate(cluster: Cluster, schedule: Schedule, *, engines: int, generating: int, training: int) -> Candidate:
    base, share = cluster.base, cluster.trainer_size / training
    per_step = schedule.prompts_per_step * schedule.samples_per_prompt
    wanted = max(3 * schedule.steps_per_version, 6 + 3 * (schedule.max_lag + 1) * schedule.steps_per_version)
    steps = max(3 * schedule.steps_per_version, min(wanted, MOST_SAMPLES // per_step))
    outcome = simulate(
        replace(
            base,
            schedule=schedule,
            steps=steps,
            engines=engines,
            train_token_s=base.train_token_s * share,
            train_group_s=base.train_group_s * share,
        )
    )
    return Candidate(
        mode=schedule.mode,
        generating=generating,
        training=training,
        prompts_per_step=schedule.prompts_per_step,
        max_lag=schedule.max_lag,
        tokens_per_s=_steady(outcome, schedule),
        outcome=outcome,
    )


def _steady(outcome: Outcome, schedule: Schedule) -> float:
    """Tokens per second from the end of the first third of the run's rounds, when the pipeline is full, to its end."""
    rounds = len(outcome.steps) // schedule.steps_per_version
    begin = max(1, rounds // 3) * schedule.steps_per_version
    later = outcome.steps[begin:]
    return sum(step.tokens for step in later) / (later[-1].ended_s - outcome.steps[begin - 1].ended_s)


def _allowed(cluster: Cluster) -> list[str]:
    """The modes that keep the bound and that the engines can do; one with a lag of 0 is `pipelined`, whatever its name."""
    return [
        mode
        for mode, schedule in MODES.items()
        if (schedule.max_lag == 0 or cluster.max_lag > 0) and (schedule.loads_at != "step" or cluster.in_flight)
    ]


def _modes(cluster: Cluster, *, prompts_per_step: int) -> list[Candidate]:
    """Every allowed mode on a grid of splits, then beside its best until nothing gets better."""
    return list(itertools.chain.from_iterable(_splits(cluster, mode, prompts_per_step) for mode in _allowed(cluster)))


def _splits(cluster: Cluster, mode: str, prompts_per_step: int) -> Iterator[Candidate]:
    size = cluster.engine_size
    most = (cluster.accelerators - 1) // size
    count = min(GRID, most)
    places = sorted({1 + round(place * (most - 1) / max(1, count - 1)) for place in range(count)})
    found = {engines: simulated(cluster, mode=mode, generating=engines * size, prompts_per_step=prompts_per_step) for engines in places}
    while True:
        best = max(found, key=lambda engines: found[engines].tokens_per_s)
        beside = [engines for engines in _between(sorted(found), best) if engines not in found]
        if not beside:
            break
        for engines in beside:
            found[engines] = simulated(cluster, mode=mode, generating=engines * size, prompts_per_step=prompts_per_step)
    yield from (found[engines] for engines in sorted(found))


def _between(known: Sequence[int], best: int) -> list[int]:
    """The middles of the gaps on both sides of the best."""
    place = known.index(best)
    return [(best + known[other]) // 2 for other in (place - 1, place + 1) if 0 <= other < len(known)]


def _speed(candidate: Candidate) -> float:
    return candidate.tokens_per_s
