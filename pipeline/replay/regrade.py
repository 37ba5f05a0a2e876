"""`penstock regrade`: scores a run's groups from a step on with another reward, and plans the steps that they make. Read-only.

Groups are taken in the order of the run, and are as stale as in the run: numbers of groups, steps and versions stay. A group that was
dropped before the last group of an earlier step belongs to the earlier steps.
"""

import itertools
import sys
import tempfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from penstock.infra.errors import ConfigError, PenstockError
from penstock.pipeline.algorithms.advantages import zero_variance
from penstock.pipeline.config.load import Config
from penstock.pipeline.inspect.recorded_run import RecordedRun, read_run
from penstock.pipeline.learner.ledger_history import read_planned
from penstock.pipeline.learner.micro_batches import pack
from penstock.pipeline.learner.policy_trainer import Notify
from penstock.pipeline.replay.overrides import rescored
from penstock.pipeline.replay.recording import Recording, require_retained
from penstock.pipeline.replay.rescore import RescoreRequest, as_page, score_run
from penstock.pipeline.replay.rescored_groups import ScoredGroup, SkippedGroup
from penstock.pipeline.replay.restore_policy import open_policy, weights_of
from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.rules import DROPPED, Schedule, group_status
from penstock.topics import groups
from penstock.topics.groups import Group

FLOOR, UNWEIGHTED_FLOOR = 0.5, 0.9
"""Least effective sample size of a regraded step; of a run whose loss does not weigh off-policy tokens."""
POINTS, GROUPS = 8, 2
"""Recorded steps, and groups of each, whose drift is measured."""
Key = tuple[int, int, int]


class Spool:
    """Groups in a temporary file, as there may be more of them than memory."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="penstock-")  # noqa: SIM115
        self._slices: dict[int, tuple[int, int]] = {}

    def add(self, group: Group) -> None:
        start = self._file.seek(0, 2)
        self._slices[group.group] = start, self._file.write(groups.encode(group))

    def read(self, number: int) -> Group:
        start, size = self._slices[number]
        self._file.seek(start)
        return groups.decode(self._file.read(size))


class Candidate(NamedTuple):
    """A scored or dropped group that no earlier step has trained."""

    number: int
    partition: int
    outcome: str
    """Under the new reward."""
    oldest: int
    """Oldest policy version of its trained tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The groups of a run at one of its steps."""

    first: int
    """The step."""
    settled: frozenset[int]
    """Groups of the steps before it: trained, stale or dropped."""
    planned: Sequence[int]
    """Groups trained from it on, in order."""
    stale: Mapping[int, int]
    """Stale group -> step that was being filled."""
    outcomes: Mapping[int, str]
    keys: Mapping[int, Key]
    """Group -> its position in the order of the schedule."""


def read_past(source: RecordedRun, first: int) -> Past:
    """The groups of a run at step `first`."""
    steps, by_number = source.past.steps, source.config.rules.order == "submission"
    earlier = {planned.group for entry in steps[:first] for planned in entry.plan}
    stale = {group: entry.step or 0 for entry in source.past.entries if entry.kind == "stale" for group in entry.groups}
    outcomes, keys = dict[int, str](), dict[int, Key]()
    for read in source.reader.groups(decode=False):
        if read.headers is not None and (number := read.headers.group) is not None:
            outcomes[number] = read.headers.outcome or ""
            arrival = (read.record.timestamp_ms, read.record.partition, read.record.offset)
            keys[number] = (number, 0, 0) if by_number else arrival
    last = max((keys[group] for group in earlier), default=(-1, 0, 0))
    dropped = {group for group, outcome in outcomes.items() if outcome in DROPPED and keys[group] < last}
    return Past(
        first=first,
        settled=frozenset(earlier | dropped | {group for group, step in stale.items() if step < first}),
        planned=[planned.group for entry in steps[first:] for planned in entry.plan],
        stale=stale,
        outcomes=outcomes,
        keys=keys,
    )


def in_order(candidates: Sequence[Candidate], past: Past, schedule: Schedule) -> list[Candidate]:
    """The candidates as a trainer takes them: trained groups as recorded, others where they arrived or became stale."""
    if schedule.order == "submission":
        return sorted(candidates)
    newest = list(itertools.accumulate((past.keys[group] for group in past.planned), max))
    position = {group: index for index, group in enumerate(past.planned)}

    def rank(candidate: Candidate) -> tuple[int, int, Key]:
        number, key = candidate.number, past.keys.get(candidate.number, (sys.maxsize, 0, 0))
        if number in position:
            return position[number], 1, key
        if number in past.stale:
            return (past.stale[number] - past.first) * schedule.prompts_per_step, 0, key
        return bisect_left(newest, key), 0, key

    return sorted(candidates, key=rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step of regraded groups."""

    number: int
    version: int
    members: tuple[Candidate, ...]
    stale: tuple[int, ...]
    ended: int
    """Number of candidates that have ended with it: trained, stale or dropped."""


def plan_steps(order: Sequence[Candidate], schedule: Schedule, *, first: int, steps: int) -> Iterator[PlannedStep]:
    """The steps from `first` to before `steps` that the candidates make; an incomplete last one is left to live groups."""
    number, members, stale = first, list[Candidate](), list[int]()
    for index, candidate in enumerate(order):
        if number == steps:
            return
        version = rules.version_after(number, steps_per_version=schedule.steps_per_version)
        if candidate.outcome != "scored":
            continue
        if rules.is_fresh(learner_version=version, policy_version_min=candidate.oldest, max_lag=schedule.max_lag):
            members.append(candidate)
        else:
            stale.append(candidate.number)
        if len(members) == schedule.prompts_per_step:
            yield PlannedStep(number=number, version=version, members=tuple(members), stale=tuple(stale), ended=index + 1)
            number, members, stale = number + 1, [], []


@dataclass(slots=True, kw_only=True)
class Regraded:
    """The groups of a run from a step on under another reward."""

    source: RecordedRun
    config: Config
    """The run's, with the new reward."""
    past: Past
    floor: float
    report: dict[str, Any] = field(default_factory=dict)
    spool: Spool = field(default_factory=Spool)
    order: list[Candidate] = field(default_factory=list)
    steps: list[PlannedStep] = field(default_factory=list)
    _products: Any = field(default_factory=lambda: np.zeros(3))
    """Sums over all samples of recorded x new, recorded x recorded and new x new advantages."""

    def take(self, result: ScoredGroup | SkippedGroup) -> None:
        """Add a group."""
        if (group := result.group) is None:
            return  # it has no outcome
        oldest = groups.version_min([sample.rollout for sample in group.samples]) or 0
        self.order.append(Candidate(result.number, result.partition, group.outcome, oldest))
        self.spool.add(group)
        if isinstance(result, ScoredGroup):
            recorded, now = result.case.group.rewards, group.rewards
            if len(recorded) == len(now) and now:
                before, after = _standard(recorded), _standard(now)
                self._products += [before @ after, before @ before, after @ after]

    @property
    def agreement(self) -> float:
        """Cosine between the recorded and the new advantages; 0 if one of them is 0 everywhere."""
        both, before, after = self._products.tolist()
        return min(1.0, both / (before * after) ** 0.5) if before and after else 0.0


def _standard(rewards: Sequence[float]) -> Any:
    values = np.array(rewards)
    return np.zeros(len(values)) if zero_variance(values) else (values - values.mean()) / values.std()


def score_from(recording: Recording, request: RescoreRequest, *, first: int, floor: float | None, notify: Notify) -> Regraded:
    """Score the groups from step `first` on, and plan their steps. Raises `ConfigError` and what `score_run` raises."""
    if first > len(recording.steps):
        raise ConfigError(f"--from-step {first}: {recording.run} has {len(recording.steps)} committed steps")
    require_retained(recording, recording.steps)
    source = read_run(recording.log, recording.run)
    config = rescored(source.config, functions=request.functions, weights=request.weights, overrides=request.overrides)
    unweighted = config.proximal == "current" and config.correction == "none"
    floors = (floor, config.algorithm.ess_floor, UNWEIGHTED_FLOOR if unweighted else FLOOR)
    regraded = Regraded(
        source=source, config=config, past=(past := read_past(source, first)), floor=next(least for least in floors if least is not None)
    )
    report = score_run(
        recording.log, recording.run, request, notify=notify, only=lambda number: number not in past.settled, take=regraded.take
    )
    regraded.order = in_order(regraded.order, past, config.rules)
    regraded.steps = list(plan_steps(regraded.order, config.rules, first=first, steps=source.planned_steps))
    regraded.report = report | {
        "from_step": first,
        "statuses": _statuses(regraded),
        "steps": {"recorded": len(recording.steps) - first, "regraded": len(regraded.steps)},
        "ess": _estimate(recording, regraded, notify=notify),
    }
    return regraded


def _statuses(regraded: Regraded) -> dict[str, int]:
    """ "BEFORE -> AFTER" -> number of groups, if every planned step is trained."""
    past, ended = regraded.past, regraded.source.ended
    trained = {member.number for step in regraded.steps for member in step.members}
    stale = {number for step in regraded.steps for number in step.stale}
    planned, counts = set(past.planned), Counter[str]()
    for candidate in regraded.order:
        number = candidate.number
        before = group_status(past.outcomes.get(number), trained=number in planned, stale=number in past.stale, ended=ended)
        after = group_status(candidate.outcome, trained=number in trained, stale=number in stale, ended=True)
        counts[f"{before} -> {after}"] += 1
    return dict(sorted(counts.items()))


def _estimate(recording: Recording, regraded: Regraded, *, notify: Notify) -> dict[str, Any]:
    """Step at which the effective sample size will probably fall below the floor.

    The log weights of recorded samples between the weights before the first step and those that generated them have a variance v. A policy
    that moves as far, at a cosine c of the advantages to the recorded ones, is about 2 (1 - c) v away from the samples, and ESS = exp(-v).
    """
    points, problem = list[dict[str, float]](), None
    try:
        drift = _drift(recording, regraded.past.first, notify=notify) if regraded.steps else {}
    except PenstockError as error:
        drift, problem = {}, str(error)
    share = 2 * (1 - regraded.agreement)
    for step, ess in drift.items():
        recorded = recording.steps[step].metrics.get("ess", 1.0)
        points.append({"step": step, "expected": recorded * min(1.0, ess / next(iter(drift.values()))) ** share})
    ends = next((point["step"] for point in points if point["expected"] < regraded.floor), None)
    return {"floor": regraded.floor, "agreement": regraded.agreement, "points": points, "ends_at": ends, "problem": problem}


def _drift(recording: Recording, first: int, *, notify: Notify) -> dict[int, float]:
    """Recorded step -> effective sample size of its samples under the weights before step `first`."""
    count = len(recording.steps) - first
    chosen = sorted({first + round(index * (count - 1) / (POINTS - 1)) for index in range(POINTS)}) if count else []
    notify(f"measuring how far the policy moved in {len(chosen)} recorded steps")
    measured = dict[int, float]()
    with open_policy(recording, recording.config, notify=notify) as policy:
        version = rules.version_after(first, steps_per_version=recording.config.schedule.steps_per_version)
        policy.backend.load_weights(weights_of(recording, version))
        for step in chosen:
            batcher = policy.objective.batcher(shares_prompts=policy.backend.shares_prompts, ends=None)
            members = read_planned(recording.log, recording.run, recording.steps[step].plan[:GROUPS])
            rows = [row for group in members for row in policy.objective.sequences(group)]
            weights = []
            for batch in map(pack, [batch for row in rows for batch in batcher.add(row)] + batcher.close()):
                ratio = policy.backend.logprobs(batch).astype(np.float64) - batch.behaviour_logprobs
                weights.append(np.exp(ratio[batch.completion_mask]))
            joined = np.concatenate([*weights, np.zeros(0)])
            measured[step] = float(joined.sum() ** 2 / (len(joined) * (joined**2).sum())) if len(joined) else 1.0
    return measured


def as_text(report: Mapping[str, Any]) -> str:
    """The report for a terminal."""
    ess, steps, first = report["ess"], report["steps"], report["from_step"]
    changes = ", ".join(f"{count} {change}" for change, count in report["statuses"].items()) or "none"
    curve = ", ".join(f"{point['expected']:.2f} at step {point['step']}" for point in ess["points"])
    lines = [
        as_page(report),
        f"from step {first}: {changes}",
        f"steps     {steps['recorded']} recorded, {steps['regraded']} can be trained from the regraded groups",
    ]
    if ess["problem"]:
        lines.append(f"ess       cannot be estimated: {ess['problem']}")
    else:
        end = f"never below {ess['floor']:g}" if ess["ends_at"] is None else f"below {ess['floor']:g} from step {ess['ends_at']} on"
        lines.append(f"ess       probably {curve}: {end}" if curve else "ess       no step to train")
    return "\n".join(lines)
