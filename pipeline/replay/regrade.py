"""`penstock regrade`: scores a run's groups from a step on with another reward, and plans the steps that these groups fill. Read-only.

Groups keep their order, numbers and policy versions, so that they are as stale as in the run. A group that was dropped before the last
group of an earlier step counts as part of the earlier steps.
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
"""Default smallest effective sample size of a regraded step; the second for a loss without importance weights."""
POINTS, GROUPS = 8, 2
"""Number of recorded steps, and of groups per step, from which the drift of the policy is measured."""
Key = tuple[int, int, int]
"""Position of a group in the order of the schedule; compared as a tuple."""


class Spool:
    """Scored groups in a temporary file, because they may not fit in memory."""

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
    """A group that was not trained on before the first regraded step."""

    number: int
    partition: int
    outcome: str
    oldest: int
    """Oldest policy version of its trained tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """Recorded status of a run's groups at the start of step `first`."""

    first: int
    settled: frozenset[int]
    """Groups that were trained, stale or dropped before step `first`."""
    planned: Sequence[int]
    """Groups trained from step `first` on, in order."""
    stale: Mapping[int, int]
    """Stale group -> step that was being filled when the group was dropped."""
    outcomes: Mapping[int, str]
    keys: Mapping[int, Key]
    """Group -> its position in the order of the schedule."""


def read_past(source: RecordedRun, first: int) -> Past:
    """Read the status of a run's groups at the start of step `first`."""
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
    """Return the candidates as a trainer receives them: trained groups as recorded, the others where they arrived or became stale."""
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
    """A step that regraded groups fill."""

    number: int
    version: int
    members: tuple[Candidate, ...]
    stale: tuple[int, ...]
    """Groups that were dropped as stale while the step was filled."""
    ended: int
    """Number of candidates, in order, that were trained, stale or dropped when the step was full."""


def plan_steps(order: Sequence[Candidate], schedule: Schedule, *, first: int, steps: int) -> Iterator[PlannedStep]:
    """Yield the steps from `first` to before `steps` that the candidates fill. A last step that is not full is not yielded."""
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
    """The groups of a run from a step on, scored with another reward, and the steps that they fill."""

    source: RecordedRun
    config: Config
    """The run's configuration with the new reward."""
    past: Past
    floor: float
    """Smallest effective sample size of a step that is trained."""
    report: dict[str, Any] = field(default_factory=dict)
    spool: Spool = field(default_factory=Spool)
    order: list[Candidate] = field(default_factory=list)
    steps: list[PlannedStep] = field(default_factory=list)
    _products: Any = field(default_factory=lambda: np.zeros(3))
    """Dot products over all samples of recorded x new, recorded x recorded and new x new normalised rewards."""

    def take(self, result: ScoredGroup | SkippedGroup) -> None:
        """Add a scored group; a skipped one that has no recorded outcome is ignored."""
        if (group := result.group) is None:
            return
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
        """Cosine similarity of the recorded and the new normalised rewards; 0 if either is 0 for all samples."""
        both, before, after = self._products.tolist()
        return min(1.0, both / (before * after) ** 0.5) if before and after else 0.0


def _standard(rewards: Sequence[float]) -> Any:
    """Return rewards [S] with mean 0 and standard deviation 1; zeros if all are equal."""
    values = np.array(rewards)
    return np.zeros(len(values)) if zero_variance(values) else (values - values.mean()) / values.std()


def score_from(recording: Recording, request: RescoreRequest, *, first: int, floor: float | None, notify: Notify) -> Regraded:
    """Score the groups from step `first` on with the requested reward, and plan the steps that they fill.

    `floor` is the smallest effective sample size; None for the configured or default one. Raises `ConfigError` and what `score_run` raises.
    """
    if first > len(recording.steps):
        raise ConfigError(
            f"--from-step {first}: {recording.run} has {len(recording.steps)} committed steps; choose a step up to this number"
        )
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
    """Return "RECORDED STATUS -> NEW STATUS" -> number of groups, assuming that every planned step is trained."""
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
    """Estimate at which step the effective sample size (ESS) falls below the floor.

    Let v be the variance of the log ratios between the policy before the first step and the policies that generated later samples; then
    ESS is about exp(-v). If the new advantages have cosine similarity c with the recorded ones, the new policy moves in another direction,
    and the variance is about 2 (1 - c) v.
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
    """Return recorded step -> effective sample size of its samples under the weights before step `first`, for up to `POINTS` steps."""
    count = len(recording.steps) - first
    chosen = sorted({first + round(index * (count - 1) / (POINTS - 1)) for index in range(POINTS)}) if count else []
    notify(f"measuring at {len(chosen)} recorded steps how far the policy has moved")
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
    """Format the report of `penstock regrade` for a terminal."""
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
