"""Selects the groups of a what-if's steps under another filter, order or number of prompts, with the trainer's selector.

No group is stale here: off-policy training is intended, and labelled.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from penstock.infra.errors import PenstockError
from penstock.infra.log import Tail
from penstock.pipeline.algorithms.advantages import zero_variance
from penstock.pipeline.config.load import Config
from penstock.pipeline.replay.plan_reader import PlannedGroups
from penstock.pipeline.replay.recording import POLL_S, Recording
from penstock.pipeline.runtime.topic_reader import RunReader, deleted
from penstock.pipeline.scheduling.step_selector import Candidate, Selector
from penstock.topics import groups
from penstock.topics.ledger import Planned
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record

NO_LIMIT = 1 << 40


@dataclass(slots=True)
class Selection:
    """Plans of `prompts_per_step` groups, in the configured order."""

    recording: Recording
    config: Config
    follow: bool = False
    """True to wait for groups until the run is closed."""
    waited_s: float = 0.0
    _selector: Selector = field(init=False)
    _tail: Tail | None = None

    def __post_init__(self) -> None:
        self._selector = Selector(replace(self.config.rules, max_lag=NO_LIMIT))

    def plans(self) -> Iterator[tuple[Planned, ...]]:
        """Yield plans; groups at the end that do not fill a step are not trained. Raises `PenstockError` if groups were deleted."""
        if lost := deleted(self.recording.log, f"{self.recording.run}.groups"):
            raise PenstockError(f"groups cannot be selected again, some were deleted: {'; '.join(lost)}")
        count, plan = self.config.schedule.prompts_per_step, list[Planned]()
        records = self._follow() if self.follow else self._all()
        for planned in self._selected(records):
            if self._trained(planned):
                plan.append(planned)
            if len(plan) == count:
                yield tuple(plan)
                plan = []

    def steps(self) -> int:
        """Number of plans; not for a selection that follows."""
        return sum(1 for _ in Selection(self.recording, self.config).plans())

    def _selected(self, batches: Iterator[list[Record]]) -> Iterator[Planned]:
        for batch in batches:
            for record in batch:
                if (candidate := self._candidate(record)) is not None:
                    self._selector.add(candidate)
            yield from self._ready()
        # No more groups follow: do not wait for groups without an outcome.
        seen = self._selector.outcomes
        self._selector.settle([number for number in range(max(seen, default=-1)) if number not in seen])
        yield from self._ready()

    def _ready(self) -> Iterator[Planned]:
        while (candidate := self._selector.take(learner_version=0)) is not None:
            yield Planned(group=candidate.group, sha256=candidate.sha256, partition=candidate.partition, offset=candidate.offset)

    def _all(self) -> Iterator[list[Record]]:
        """The groups in the log now, in the order of scoring."""
        reads = RunReader(self.recording.log, self.recording.run).records("groups")
        candidates = [((record.timestamp_ms, record.partition, record.offset), self._candidate(record)) for record in reads]
        for _, candidate in sorted(candidates, key=lambda pair: pair[0]):
            if candidate is not None:
                self._selector.add(candidate)
        yield []

    def _follow(self) -> Iterator[list[Record]]:
        topic, log = f"{self.recording.run}.groups", self.recording.log
        partitions = [(topic, p) for p in range(log.partitions(topic) or 0)]
        tail = log.tail(dict.fromkeys(partitions, "earliest"))
        try:
            while True:
                over = self.recording.over
                ends = log.end_offsets(partitions) if over else {}
                while batch := tail.poll(POLL_S):
                    yield batch
                if over and all(tail.position(partition) >= end for partition, end in ends.items()):
                    return
                self.recording.wait(0.0)
                self.waited_s += POLL_S
        finally:
            tail.close()

    def _candidate(self, record: Record) -> Candidate | None:
        try:
            headers = groups.check(record, run=self.recording.run)
        except Unusable:
            return None
        assert headers.group is not None and headers.outcome is not None
        if headers.part != 0:
            return None
        trainable = bool(headers.samples) and not groups.lacks_rewards(headers.samples, headers.no_reward)
        admitted = headers.outcome == "filtered" and trainable and not self.config.algorithm.filter_zero_variance
        return Candidate(
            group=headers.group,
            outcome="scored" if admitted else headers.outcome,
            policy_version_min=0,
            partition=record.partition,
            offset=record.offset,
            parts=headers.parts or 1,
            sha256=headers.sha256 or "",
        )

    def _trained(self, planned: Planned) -> bool:
        """True unless the filter drops a group that was recorded without a filter."""
        if not self.config.algorithm.filter_zero_variance or self.recording.config.algorithm.filter_zero_variance:
            return True
        member = PlannedGroups(self.recording.log, self.recording.run).read([planned])[0]
        if member.group is None:
            raise PenstockError(f"group {planned.group} cannot be read: {member.problem}")
        return not zero_variance(member.group.rewards)
