"""Yields the steps of a replay: those of recorded plans, or of new plans under another filter, order or number of prompts per step.

New plans never drop a group as stale: training on recorded samples is off-policy by intent, and is labelled as such.
"""

import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from typing import Any

from penstock.infra.errors import ConfigError, PenstockError
from penstock.pipeline.algorithms.advantages import zero_variance
from penstock.pipeline.config.load import Config
from penstock.pipeline.learner.policy_trainer import Notify
from penstock.pipeline.replay.recording import POLL_S, PlanMember, PlannedGroups, Recording
from penstock.pipeline.replay.restore_policy import StartPoint
from penstock.pipeline.runtime.reporting.log_lines import PROGRESS_EVERY_S
from penstock.pipeline.runtime.topic_reader import RunReader, deleted
from penstock.pipeline.scheduling.step_selector import Candidate, Selector
from penstock.topics import groups
from penstock.topics.ledger import Entry, Planned
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record

NO_LIMIT = 1 << 40


@dataclass(slots=True)
class Selection:
    """Plans steps again from the scored groups of a run, with `config`'s filter, order and number of prompts per step."""

    recording: Recording
    config: Config
    follow: bool = False
    """True to wait for more groups until the run is closed."""
    without: frozenset[int] = frozenset()
    waited_s: float = 0.0
    _selector: Selector = field(init=False)

    def __post_init__(self) -> None:
        self._selector = Selector(replace(self.config.rules, max_lag=NO_LIMIT))

    def plans(self) -> Iterator[tuple[Planned, ...]]:
        """Yield the plan of each step. The last groups may not fill a step and are left. Raises `PenstockError` if groups were deleted."""
        if lost := deleted(self.recording.log, f"{self.recording.run}.groups"):
            raise PenstockError(f"steps of {self.recording.run} cannot be planned again, because groups were deleted: {'; '.join(lost)}")
        count, plan = self.config.schedule.prompts_per_step, list[Planned]()
        records = self._follow() if self.follow else self._all()
        for planned in self._selected(records):
            if self._trained(planned):
                plan.append(planned)
            if len(plan) == count:
                yield tuple(plan)
                plan = []

    def steps(self) -> int:
        """Return the number of plans; only for a selection that does not follow the run."""
        return sum(1 for _ in Selection(self.recording, self.config, without=self.without).plans())

    def _selected(self, batches: Iterator[list[Record]]) -> Iterator[Planned]:
        """Yield the groups in the order in which the new filter, order and number of prompts select them."""
        for batch in batches:
            for record in batch:
                if (candidate := self._candidate(record)) is not None:
                    self._selector.add(candidate)
            yield from self._ready()
        # No more groups arrive: do not wait for groups that have no outcome.
        seen = self._selector.outcomes
        self._selector.settle([number for number in range(max(seen, default=-1)) if number not in seen])
        yield from self._ready()

    def _ready(self) -> Iterator[Planned]:
        while (candidate := self._selector.take(learner_version=0)) is not None:
            yield candidate.planned

    def _all(self) -> Iterator[list[Record]]:
        """Add all groups in the log to the selector in the order of scoring; yields one empty batch."""
        reads = RunReader(self.recording.log, self.recording.run).records("groups")
        candidates = [((record.timestamp_ms, record.partition, record.offset), self._candidate(record)) for record in reads]
        for _, candidate in sorted(candidates, key=lambda pair: pair[0]):
            if candidate is not None:
                self._selector.add(candidate)
        yield []

    def _follow(self) -> Iterator[list[Record]]:
        """Yield the records of `groups` in batches as they arrive, until the run is closed."""
        topic, log = f"{self.recording.run}.groups", self.recording.log
        partitions = [(topic, p) for p in range(log.partitions(topic) or 0)]
        with closing(log.tail(dict.fromkeys(partitions, "earliest"))) as tail:
            while True:
                over = self.recording.over
                ends = log.end_offsets(partitions) if over else {}
                while batch := tail.poll(POLL_S):
                    yield batch
                if over and all(tail.position(partition) >= end for partition, end in ends.items()):
                    return
                self.recording.wait(0.0)
                self.waited_s += POLL_S

    def _candidate(self, record: Record) -> Candidate | None:
        """Return the group of a record for the selector, from its headers; None for later parts and unreadable records."""
        try:
            headers = groups.check(record, run=self.recording.run)
        except Unusable:
            return None
        if headers.part != 0:
            return None
        trainable = bool(headers.samples) and not groups.lacks_rewards(headers.samples, headers.no_reward)
        admitted = headers.outcome == "filtered" and trainable and not self.config.algorithm.filter_zero_variance
        candidate = Candidate.of(record, headers)
        return replace(candidate, outcome="scored" if admitted else candidate.outcome, policy_version_min=0)

    def _trained(self, planned: Planned) -> bool:
        """True unless the group is excluded, or the new filter drops a group with equal rewards that the run had trained on."""
        if planned.group in self.without:
            return False
        if not self.config.algorithm.filter_zero_variance or self.recording.config.algorithm.filter_zero_variance:
            return True
        member = PlannedGroups(self.recording.log, self.recording.run).read([planned])[0]
        if member.group is None:
            raise PenstockError(
                f"the step cannot be replayed: group {planned.group} of {self.recording.run} cannot be read: {member.problem}"
            )
        return not zero_variance(member.group.rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """Range of steps to replay, and whether to continue after a difference."""

    from_step: int = 0
    to_step: int | None = None
    follow: bool = False
    """True to wait for more steps until the run is closed."""
    keep_going: bool = False
    """True to continue after a step that differs from the ledger."""


@dataclass(slots=True)
class Times:
    """Durations of a replay in seconds."""

    start_s: float = 0.0
    """Time before the first step: loading the model and restoring its state."""
    replay_s: float = 0.0
    waited_s: float = 0.0
    """The part of `replay_s` spent waiting for the followed run to commit a step."""

    @property
    def busy_s(self) -> float:
        return self.replay_s - self.waited_s


@dataclass(slots=True)
class Result:
    """Base of the results of exact replays and what-ifs; filled while steps are trained."""

    run: str
    _: KW_ONLY
    fingerprint: list[dict[str, object]] = field(default_factory=list)
    """Properties of hardware, libraries and threads that differ from the run's, as rows (name, recorded, here)."""
    start: StartPoint | None = None
    digest: str | None = None
    """Digest of the weights after the last trained step."""
    times: Times = field(default_factory=Times)
    whole: bool = False
    """True if every requested step was trained."""

    def as_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "whole": self.whole,
            "digest": self.digest,
            "fingerprint": self.fingerprint,
            "start": self.start and asdict(self.start),
            "times": {"start_s": self.times.start_s, "replay_s": self.times.busy_s, "waited_s": self.times.waited_s},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepToTrain:
    """One step of a replay."""

    number: int
    recorded: Entry | None
    """Ledger entry of the step; None if the run has not committed this step."""
    members: list[PlanMember]


def replay_steps(
    recording: Recording,
    request: ReplayRequest,
    *,
    times: Times,
    progress: Callable[[], None],
    notify: Notify,
    selection: Selection | None = None,
) -> Generator[StepToTrain, None, None]:
    """Yield the steps of the recorded plans or of `selection`; call `progress` every few seconds. Closing the generator ends `times`."""
    start = shown = time.monotonic()
    steps = _recorded(recording, request, times, notify) if selection is None else _selected(recording, request, times, selection)
    try:
        for step in steps:
            yield step
            if time.monotonic() - shown > PROGRESS_EVERY_S:
                shown = time.monotonic()
                progress()
    finally:
        times.replay_s = time.monotonic() - start


def check_steps(recording: Recording, request: ReplayRequest) -> None:
    """Raise `ConfigError` or `PenstockError` if requested steps are not committed and the replay does not wait for them."""
    count, run = len(recording.steps), recording.run
    if request.to_step is not None and request.to_step < request.from_step:
        raise ConfigError(f"--to-step {request.to_step} is before --from-step {request.from_step}; swap them")
    waits = request.follow and not recording.over
    if not waits and not count:
        more = (
            "change schedule.prompts_per_step or schedule.order to plan steps again" if recording.over else "wait for steps with --follow"
        )
        raise PenstockError(f"{run} has no committed step to replay; {more}")
    if request.from_step > count or (not waits and max(request.from_step, request.to_step or 0) >= count):
        raise ConfigError(
            f"{run} has committed steps 0 to {count - 1}; choose --from-step and --to-step among them"
            + (", or wait for more with --follow" if not recording.over else "")
        )


def await_weights(recording: Recording, request: ReplayRequest) -> None:
    """Wait until a followed run has published its initial weights."""
    while request.follow and not recording.over and 0 not in recording.ledger_state.manifests:
        recording.wait()


def _recorded(recording: Recording, request: ReplayRequest, times: Times, notify: Notify) -> Iterator[StepToTrain]:
    """Yield the requested recorded steps; wait for later ones if the replay follows the run.

    While the caller trains a step, a thread reads the groups of the next one.
    """
    planned, number, waiting = PlannedGroups(recording.log, recording.run), request.from_step, False
    ahead: Future[list[PlanMember]] | None = None
    reader = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
    try:
        while request.to_step is None or number <= request.to_step:
            if number < len(recording.steps):
                entry = recording.steps[number]
                current, ahead = ahead or reader.submit(planned.read, entry.plan), None
                if number + 1 < len(recording.steps) and number != request.to_step:
                    ahead = reader.submit(planned.read, recording.steps[number + 1].plan)
                yield StepToTrain(number=number, recorded=entry, members=current.result())
                number += 1
            elif not request.follow or recording.over:
                return
            else:
                if not waiting:
                    notify(f"replayed all {number} committed steps; waiting for more until {recording.run} is closed (Ctrl-C to stop)")
                waiting, start = True, time.monotonic()
                recording.wait()
                times.waited_s += time.monotonic() - start
    finally:
        reader.shutdown(cancel_futures=True)


def _selected(recording: Recording, request: ReplayRequest, times: Times, selection: Selection) -> Iterator[StepToTrain]:
    """Yield the steps that `selection` plans, up to the requested last step."""
    planned = PlannedGroups(recording.log, recording.run)
    for number, plan in enumerate(selection.plans()):
        if request.to_step is not None and number > request.to_step:
            return
        times.waited_s = selection.waited_s
        recorded = recording.steps[number] if number < len(recording.steps) else None
        yield StepToTrain(number=number, recorded=recorded, members=planned.read(plan))
