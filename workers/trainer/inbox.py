"""The records that a trainer follows: groups, its own manifests, the end of the prompts, an evaluator's request to end the run.

Reading only updates state; the worker decides what is trained. Headers decide; complete, checked payloads wait for their turn. The first
complete record of a group is used; an unusable one becomes a dead letter, a repeated one is a duplicate.
"""

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final, Self

from penstock.infra.log import Partition, Start, Tail
from penstock.infra.tensors.parameter_count import vocabulary
from penstock.pipeline.algorithms.advantages import HIGH, RewardScale, zero_variance
from penstock.pipeline.learner.micro_batches import untrainable
from penstock.pipeline.rewards.scoring import UNTRAINED
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.topic_reader import POISON
from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.resume_point import ResumePoint
from penstock.pipeline.scheduling.rules import Schedule
from penstock.pipeline.scheduling.step_selector import Candidate, Selector
from penstock.topics import groups, ledger, metrics, weights
from penstock.topics.catalogue import control_topic
from penstock.topics.groups import Group, GroupAssembler
from penstock.topics.wire.checked import whole
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Record
from penstock.workers.trainer.resuming import Resumed, ResumeOffsets
from penstock.workers.trainer.run_writer import RunWriter

NEWEST: Final = 8
"""Number of newest dropped groups whose records are retained, to report their reasons."""


@dataclass(slots=True, kw_only=True)
class GroupInbox:
    """Group outcomes in order of arrival, and the payloads of those that may be trained on."""

    run: str
    schedule: Schedule
    dead_letter: Callable[[Record, Unusable], None]
    duplicate: Callable[[str], None]
    decoding: Callable[[Record], AbstractContextManager[object]] = nullcontext
    """The block in which a payload is decoded; raises `Unusable` for a poison record."""
    vocabulary: int | None = None
    """Size of the model's vocabulary; None if unknown."""
    selector: Selector = field(init=False)
    drop_causes: Counter[str] = field(default_factory=Counter)
    """Since the last step: number of dropped groups by cause, for the error that stops a run which drops too many."""
    filtered_rewards: list[float] = field(default_factory=list)
    """Mean reward of each group filtered since the last step."""
    scale: RewardScale = field(default_factory=RewardScale)
    _dropped: deque[list[Record]] = field(default_factory=lambda: deque(maxlen=NEWEST))
    """The records of the newest groups that a scorer dropped."""
    ended_before: int = 0
    """Groups with a lower number had ended when this trainer started, and are skipped."""
    _groups: dict[int, Group] = field(default_factory=dict)
    _assembler: GroupAssembler = field(default_factory=GroupAssembler)

    def __post_init__(self) -> None:
        self.selector = Selector(self.schedule)

    def receive(self, record: Record) -> None:
        """Apply a record of `groups`; a group is selectable once all its parts have arrived and its digest matches."""
        try:
            headers = groups.check(record, run=self.run)
            assert headers.group is not None and headers.outcome is not None
            if headers.group < self.ended_before:
                return
            if self.selector.knows(headers.group):
                self.duplicate(f"group {headers.group} at {record.id}")
                return
            records = self._assembler.add(record, headers)
            if records is None:
                return
            group = self._decode(records, headers)
        except Unusable as error:
            self.dead_letter(record, error)
            if error.kind == POISON:  # its headers were checked: the group is in the log, and cannot be trained
                self.selector.refuse(Candidate.of(record, headers))
            return
        self.selector.add(Candidate.of(records[0], headers))
        mean = headers.reward_mean
        self.scale.see(() if mean is None else (mean,))
        if headers.outcome != "scored":
            lacking = groups.lacks_rewards(headers.samples, headers.no_reward)
            cause = " for lack of rewards" if lacking else "" if mean is None else f" at reward {mean:.3g}"
            self.drop_causes[headers.outcome + cause] += 1
            self.filtered_rewards += [mean] if headers.outcome == "filtered" and mean is not None and not lacking else []
            self._dropped.append(records)
        elif group is not None and not self.selector.is_settled(group.group):
            self.scale.see(group.rewards)
            self._groups[group.group] = group

    def take(self, *, learner_version: int) -> tuple[Candidate, Group] | None:
        """Return the next group to train, with its payload; None until it has arrived. Stale groups are in `selector.newly_stale`."""
        candidate = self.selector.take(learner_version=learner_version)
        for stale in self.selector.newly_stale:
            self._groups.pop(stale.group, None)
        return None if candidate is None else (candidate, self._groups.pop(candidate.group))

    def newest_reasons(self) -> list[str]:
        """Reasons for which scorers dropped the newest groups, from their payloads; unreadable payloads are skipped."""
        reasons: list[str | None] = []
        for records in self._dropped:
            with contextlib.suppress(Unusable), self.decoding(records[-1]):
                reasons.append(groups.read(records, run=self.run)[1].reason)
        return [reason for reason in reasons if reason]

    def forget_drops(self) -> None:
        """Restart the counts of dropped groups by cause, as after each step."""
        self.drop_causes.clear()
        self.filtered_rewards.clear()

    def start_over(self) -> None:
        """Forget everything, because `groups` will be read from its start."""
        self.selector, self._assembler, self.ended_before = Selector(self.schedule), GroupAssembler(), 0
        self._groups.clear()
        self.forget_drops()

    def restart_offsets(self) -> dict[int, int]:
        """Partition -> first offset that a restarted trainer must read, for partitions with open or untrained groups."""
        waiting = [*self.selector.locations.values(), *((part.partition, part.offset) for part in self._assembler.held())]
        return {partition: min(offset for p, offset in waiting if p == partition) for partition in {p for p, _ in waiting}}

    def _decode(self, records: list[Record], headers: Headers) -> Group | None:
        """Decode a group from the records of its parts; None if it will not be trained. Raises `Unusable` if it cannot be trained on."""
        if headers.outcome != "scored" or self.selector.is_settled(headers.group or 0):
            return None  # not trained, or not again: its headers are enough
        with self.decoding(records[-1]):
            group = groups.read(records, run=self.run)[1]
        if problem := untrainable(group, vocabulary=self.vocabulary):
            raise Unusable(f"group {group.group} is skipped, because it cannot be trained on: {problem}", kind=POISON)
        return group


SHOWN_CAUSES = 6
CONSTANT = (
    "every reward before the first step was {:.6g}: the reward function is constant, or the policy solves all prompts or none; "
    "compare two completions and their rewards with `penstock check CONFIG`"
)


@dataclass(slots=True)
class DropLimit:
    """Counts the groups dropped since the last step.

    Drops from before this process are ignored: the operator who resumed the run has dealt with their cause.
    """

    inbox: GroupInbox
    at_last_step: int = 0
    """Dropped groups when the last step was committed."""
    tolerated: int = 0
    """Dropped groups when this process had read the existing records."""

    @property
    def since_last_step(self) -> int:
        return self.inbox.selector.drops - self.at_last_step

    def tolerate(self) -> None:
        """Ignore all drops so far."""
        self.tolerated = self.inbox.selector.drops
        self.inbox.forget_drops()

    def committed(self) -> None:
        self.at_last_step = self.inbox.selector.drops
        self.inbox.forget_drops()

    def passed(self, *, steps_done: int) -> tuple[str, bool] | None:
        """(why the run must end, True if its task is solved); None unless more groups than the limit were dropped since the last step.

        The task is solved if most of them were dropped because all their samples have (nearly) the full reward.
        """
        # The s groups beyond a round's are admitted to be dropped.
        limit = self.inbox.schedule.max_drops_per_step + self.inbox.schedule.oversample_groups
        dropped = self.inbox.selector.drops - max(self.at_last_step, self.tolerated)
        if dropped <= limit:
            return None
        since = f"since step {steps_done - 1}" if steps_done else "before step 0"
        when = "since the trainer was started" if self.tolerated > self.at_last_step else since
        equal, scale = self._equal(), self.inbox.scale
        mostly_equal = 2 * len(equal) > dropped
        position = scale.position(fmean(equal)) if mostly_equal else None
        if steps_done and position is not None and position >= HIGH:
            counted = f"{len(equal)} of {dropped} groups dropped {when} have equal rewards, {fmean(equal):.3g} on average"
            text = f"solved: {counted}; the full reward is {scale.high:.3g}, so nothing is left to learn from these prompts"
            return text, True
        text = f"{dropped} groups were dropped {when}, more than schedule.max_drops_per_step allows ({limit})"
        return text + self._causes(dropped, steps_done=steps_done), False

    def without_a_step(self, *, requested: int) -> str:
        """The reason for the end of a run whose prompts are all used before its first step."""
        dropped, size = self.inbox.selector.drops, self.inbox.schedule.prompts_per_step
        text = f"all {requested} prompts of the run's epochs were used before the first step, which takes {size}"
        return f"{text} groups with different rewards; {dropped} groups were dropped" + self._causes(dropped, steps_done=0)

    def _causes(self, dropped: int, *, steps_done: int) -> str:
        """The causes of the drops as text, with advice if most groups had equal rewards."""
        causes = ", ".join(f"{count} {cause}" for cause, count in self.inbox.drop_causes.most_common(SHOWN_CAUSES) if count)
        reasons, equal = self.inbox.newest_reasons(), self._equal()
        text = (f": {causes}" if causes else "") + (f"; the last one: {reasons[-1]}" if reasons else "")
        return text + (self._advice(equal, steps_done=steps_done) if 2 * len(equal) > dropped else "")

    def _equal(self) -> list[float]:
        """Mean rewards of the groups filtered for equal rewards; none if most of the newest were filtered for lack of trained tokens."""
        reasons = self.inbox.newest_reasons()
        return [] if 2 * reasons.count(UNTRAINED) > len(reasons) else self.inbox.filtered_rewards

    def _advice(self, equal: list[float], *, steps_done: int) -> str:
        """Advice for a run whose dropped groups had equal rewards, of these means, as the end of a sentence."""
        scale, mean, selector = self.inbox.scale, fmean(equal), self.inbox.selector
        if not steps_done and selector.finished_groups == selector.drops and zero_variance(equal):
            return f"; {CONSTANT.format(mean)}"
        span = f"{mean:.3g} on average in a range of {scale.low:.3g} to {scale.high:.3g}"
        return f"; groups of equal rewards have no advantage ({span}): {scale.advice(mean)}"


POLL_S = 0.5


@dataclass(slots=True)
class Arrivals:
    """Follows the topics that a trainer reads, and keeps the state from their records."""

    session: Session
    writer: RunWriter
    inbox: GroupInbox
    tail: Tail
    followed: Sequence[Partition]
    offsets: ResumeOffsets
    end_reason: str | None = None
    """The reason if the run is to end before all its steps are done; else None."""
    _admitted: int | None = None
    """Groups of the whole run, once the feeder has reported that no prompt will follow; None before."""
    evaluations: dict[str, int] = field(default_factory=dict)
    """Evaluations that no ledger entry lists yet: SHA-256 of the payload -> version."""
    _listed: set[str] = field(default_factory=set)
    """SHA-256 of the evaluations that an entry lists, as far as the ledger was read."""

    @classmethod
    def open(cls, session: Session, writer: RunWriter, resumed: Resumed) -> Self:
        """Open a tail on the trainer's topics, from the offsets in the newest step's resume point, or from their starts without one."""
        config = session.config
        inbox = GroupInbox(
            run=session.run, schedule=session.schedule, dead_letter=session.dead_letters.write, duplicate=session.reporter.duplicate,
            decoding=session.dead_letters.decoding, vocabulary=vocabulary(config.model_directory),
            scale=RewardScale.of(config.reward.functions, config.reward.weights, by_source=config.data.rewards),
        )  # fmt: skip
        starts: dict[Partition, Start] = {(session.topic("groups"), p): "earliest" for p in range(session.config.partitions)}
        starts[session.topic("weights"), 0] = "earliest"
        if session.config.eval_sources:
            starts[control_topic(session.run, session.config.evaluating_role), 0] = "earliest"
        if resumed.resume_point is not None:
            starts.update({at: resumed.resume_point.positions.get(partition_key(session, at), 0) for at in starts})
        starts[control_topic(session.run, "feeder"), 0] = "earliest"  # a feeder reports only once that no prompt follows
        return cls(session, writer, inbox, session.log.tail(starts), list(starts), resumed.offsets)

    @property
    def no_more(self) -> bool:
        """True if all groups of the run have ended, as under `run.epochs`, where the prompts may end before the steps."""
        return self._admitted is not None and self.inbox.selector.finished_groups >= self._admitted

    def settle(self, resumed: Resumed) -> None:
        """Mark the groups that earlier steps have trained on or dropped, from the ledger or a resume point."""
        selector, past, resume = self.inbox.selector, resumed.past, resumed.resume_point
        self._listed = {sha256 for entry in past.entries for sha256 in ledger.evaluations(entry)}
        if resume is None:
            selector.settle([*past.stale, *past.trained])
            selector.drops = self.inbox.drop_causes["stale"] = len(past.stale)
        else:
            later = resumed.later_stale
            selector.resume(below=resume.below, settled=[*resume.settled, *later], drops=resume.drops + len(later))
            self.inbox.ended_before = resume.below
            self.inbox.scale.see(resume.rewards)

    def start_over(self) -> None:
        """Forget the groups, and read every topic from its start."""
        self.inbox.start_over()
        self.evaluations.clear()
        self.tail.add(dict.fromkeys(self.followed, "earliest"))

    def take_in(self, timeout_s: float) -> bool:
        """Apply records that exist or arrive within `timeout_s`; returns True if there were any."""
        records = self.tail.poll(timeout_s)
        for record in records:
            self._receive(record)
        return bool(records)

    def catch_up(self) -> None:
        """Apply all records up to the end offsets at the call, unless a stop is requested."""
        behind = self.session.log.end_offsets(self.followed)
        while behind and not self.session.stop.is_set():
            self.take_in(POLL_S)
            behind = {partition: end for partition, end in behind.items() if self.tail.position(partition) < end}
            self.session.reporter.status()

    def list_evaluations(self) -> None:
        """Record that the newest ledger entry lists all evaluations read before it."""
        self._listed |= self.evaluations.keys()
        self.evaluations.clear()

    def resume_point(self) -> ResumePoint:
        """What the ledger entry of a step stores for a trainer that restarts after it: start offsets of its topics, and settled groups."""
        selector, scale, store = self.inbox.selector, self.inbox.scale, self.writer.checkpoints.store
        checkpoints = self.offsets.checkpoints([] if store is None else store.steps())
        oldest = checkpoints[-1][0] if checkpoints else 0
        version, manifests = self.offsets.anchor(rules.version_after(oldest, steps_per_version=self.session.schedule.steps_per_version))
        open_groups = {(self.session.topic("groups"), partition): offset for partition, offset in self.inbox.restart_offsets().items()}
        return ResumePoint(
            below=selector.below,
            settled=tuple(sorted(selector.settled)),
            drops=selector.drops_to_resume,
            dropped=selector.drops,
            positions={partition_key(self.session, at): open_groups.get(at, self.tail.position(at)) for at in self.followed},
            checkpoints=checkpoints,
            manifests=manifests,
            version=version,
            rebased=self.offsets.rebased,
            rewards=(scale.low, scale.high) if scale.low <= scale.high else (),
        )

    def _receive(self, record: Record) -> None:
        """Apply a record of any followed topic: a group, a manifest of the trainer itself, or a measurement."""
        if record.topic == self.session.topic("groups"):
            self.inbox.receive(record)
        elif record.topic == self.session.topic("weights"):
            self.writer.check_manifest(record)
            with contextlib.suppress(Unusable):
                version = weights.check(record, run=self.session.run).policy_version_min or 0
                self.offsets.note_manifest(self.writer.state.manifests.get(version), record.offset)
        else:
            self._on_measurement(record)

    def _on_measurement(self, record: Record) -> None:
        """Apply a measurement of the feeder or an evaluator, from the topic that only its role may write."""
        try:
            with self.session.dead_letters.decoding(record):
                measurement = metrics.read(record, run=self.session.run)[1]
        except Unusable:
            return  # a lease record of the role
        config = self.session.config
        if record.topic != self.session.topic(f"control-{measurement.role}"):
            return
        if measurement.role == "feeder" and config.run.epochs is not None and measurement.values.get("all_out"):
            self._admitted = whole(measurement.values.get("admitted"))
        if measurement.kind != "eval" or measurement.role != config.evaluating_role or measurement.version is None:
            return
        if (sha256 := ledger.digest(record.value)) not in self._listed:
            self.evaluations[sha256] = measurement.version
        manifest = self.writer.state.manifests.get(measurement.version)
        self.writer.checkpoints.rate(manifest, measurement.values.get("greedy_accuracy"))
        if config.stops_early and measurement.labels.get("ask") == "stop":
            self.end_reason = measurement.labels.get("reason", "the evaluator requested it")


def partition_key(session: Session, at: Partition) -> str:
    """The name of a partition in a resume point, such as `groups/3`."""
    return f"{at[0].removeprefix(f'{session.run}.')}/{at[1]}"
