"""A scorer's groups: the samples that have arrived, complete groups, the offsets that may be committed, and the writer of outcomes.

A sample is used once per (group, sample), a group ends once, and offsets are committed below the oldest unfinished group, so that a new
owner needs only the log. The offset metadata tell where in `groups` it starts to read: a restart costs the same at any time of a run.
Outcomes and offsets are one transaction, and only the owner of a partition commits; after an unknown result the log decides.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.infra.errors import LogError, LostPartition, OutcomeUnknown
from penstock.infra.log import Member, Partition, Transactions
from penstock.pipeline.runtime import offset_metadata
from penstock.pipeline.runtime.offset_metadata import ScorerOffsetMetadata
from penstock.pipeline.runtime.roles import generating_roles
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.scheduling.rules import CALLS, PROMPTS, IdSet, Presence, WorkingClock, update_presence
from penstock.topics import groups, metrics, prompts
from penstock.topics.groups import Group
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Outgoing, Record

ORPHAN_AFTER_S = 30.0
"""After this working time without its prompt a sample is checked against the log, where prompts precede their samples."""


@dataclass(slots=True)
class OpenGroup:
    """A group that has no outcome yet."""

    group: int
    prompt: Prompt | None = None
    prompt_record: Record | None = None
    samples: dict[int, Rollout] = field(default_factory=dict)
    records: dict[int, Record] = field(default_factory=dict)
    seen_s: float = 0.0
    """The owner's working time when the group was first seen, or last checked."""
    opened_s: float = 0.0
    """`PartitionGroups.present_s` when the group was first seen."""
    submitted: bool = False

    @property
    def complete(self) -> bool:
        """True if the prompt and all its samples have arrived."""
        return self.prompt is not None and len(self.samples) == self.prompt.samples_per_prompt

    @property
    def aborted(self) -> int:
        """Number of samples that were aborted because the group would be stale."""
        return sum(sample.finish == "abort" for sample in self.samples.values())

    def ordered(self) -> list[Rollout]:
        return [self.samples[number] for number in sorted(self.samples)]


@dataclass(slots=True)
class PartitionGroups:
    """The open groups of one partition number: prompts and samples are read from it, outcomes written to it."""

    partition: int
    finished: IdSet = field(default_factory=IdSet)
    """Groups whose outcome is in `groups`, of those that this owner has read."""
    open: dict[int, OpenGroup] = field(default_factory=dict)
    prompts_position: int = 0
    rollouts_position: int = 0
    groups_position: int = 0
    """End of `groups` as far as this owner has read."""
    below: int = 0
    """Groups below this number ended before the partition was assigned, if the numbers of its prompts rise, as the feeder writes them."""
    newest: int = -1
    """The highest number of a prompt so far."""
    rising: bool = True
    """False once a prompt came out of order: then only all of `groups` tells which groups have ended."""
    cut: bool = False
    """True if its first prompts were deleted, and no metadata tell which groups had ended."""
    present_s: float = 0.0
    """Seconds in which a rollout worker was present for the partition; a group's deadline counts only these."""
    outcomes: dict[int, int] = field(default_factory=dict)
    """Group -> offset of its outcome, of the finished groups above the oldest unfinished one."""

    def start(self, *, prompts: int, metadata: str) -> None:
        """Start at the committed offset in `prompts`, with its metadata; without metadata all of `groups` is read."""
        self.prompts_position = prompts
        self.below, self.groups_position = offset_metadata.decode(ScorerOffsetMetadata, metadata) or (0, 0)
        self.newest = self.below - 1

    def note(self, *, without: Collection[int] = ()) -> str:
        """Offset metadata to commit for the next owner, as if the groups in `without` had ended; empty if it must read all of `groups`."""
        if not self.rising:
            return ""
        below = min((group.group for group in self._unfinished(without) if group.prompt), default=self.newest + 1)
        self.outcomes = {group: at for group, at in self.outcomes.items() if group >= below}
        return offset_metadata.encode(ScorerOffsetMetadata(below=below, groups=min(self.outcomes.values(), default=self.groups_position)))

    def out_of_order(self, group: int) -> bool:
        """True if prompts do not come in rising order, as this group's shows: then `below` is wrong, and all of `groups` must be read."""
        return self.rising and group <= self.newest and group not in self.finished and not (group in self.open and self.open[group].prompt)

    def distrust(self) -> None:
        """Read `groups` from its start, now and after every later assignment."""
        self.rising, self.below, self.groups_position = False, 0, 0

    def add_prompt(self, record: Record, prompt: Prompt, *, now_s: float) -> bool:
        """Add a prompt; False if it is a duplicate or its group has ended."""
        if self.cut and self.newest < 0:
            self.below = prompt.group  # a prompt is deleted only once its group and all before it have ended
        self.prompts_position = record.offset + 1
        self.newest = max(self.newest, prompt.group)
        if prompt.group in self.finished:
            return False
        group = self._group(prompt.group, now_s)
        if group.prompt is not None:
            return False
        group.prompt, group.prompt_record = prompt, record
        return True

    def has(self, group: int, sample: int) -> bool:
        """True if this sample has already arrived, or its group has ended."""
        return group in self.finished or (group in self.open and sample in self.open[group].samples)

    def missing(self, group: int, *, samples: int) -> int:
        """Number of samples that a group still needs; with oversampling it takes the first in the log."""
        return max(0, samples - len(self.open[group].samples)) if group in self.open else samples

    def add_sample(self, record: Record, rollout: Rollout, *, now_s: float) -> None:
        group = self._group(rollout.group, now_s)
        group.samples[rollout.sample] = rollout
        group.records[rollout.sample] = record

    def finish(self, group: int, *, offset: int) -> None:
        self.finished.add(group)
        self.open.pop(group, None)
        self.outcomes.setdefault(group, offset)
        self.groups_position = max(self.groups_position, offset + 1)

    def offsets(self, *, without: Collection[int] = ()) -> tuple[int, int]:
        """Start offsets of the next owner in `prompts` and `rollouts`, as if the groups in `without` had ended."""
        unfinished = self._unfinished(without)
        prompts = min((group.prompt_record.offset for group in unfinished if group.prompt_record), default=self.prompts_position)
        rollouts = min((record.offset for group in unfinished for record in group.records.values()), default=self.rollouts_position)
        return prompts, rollouts

    def overdue(self, *, deadline_s: float) -> list[OpenGroup]:
        """Groups with a prompt that are incomplete after the deadline."""
        latest_s = self.present_s - deadline_s
        return [group for group in self.open.values() if group.prompt and not group.submitted and group.opened_s < latest_s]

    def orphans(self, *, now_s: float) -> list[OpenGroup]:
        """Groups whose samples have waited `ORPHAN_AFTER_S` for a prompt, late, missing, or of a group that had ended (`below`)."""
        return [group for group in self.open.values() if group.prompt is None and now_s - group.seen_s > ORPHAN_AFTER_S]

    def _unfinished(self, without: Collection[int]) -> list[OpenGroup]:
        return [group for number, group in self.open.items() if number not in without]

    def _group(self, group: int, now_s: float) -> OpenGroup:
        """Return the open group with this number, opened now if it is new."""
        if group not in self.open:
            self.open[group] = OpenGroup(group, seen_s=now_s, opened_s=self.present_s)
        return self.open[group]


LOOK_EVERY_S = 1.0


class RolloutReports:
    """Measures time by the rollout workers' reports, so that it stops during an outage.

    A group's deadline counts only time in which a worker was present for its partition; if turns go through the log, an environment
    worker and a rollout worker.
    """

    def __init__(self, session: Session) -> None:
        """Follow `metrics` from its current end."""
        self._session = session
        self.clock, self._looked_s = WorkingClock(), 0.0
        labels = (PROMPTS, CALLS) if session.config.turns_by_log else (PROMPTS,)
        self._presences = {label: Presence(session.config.partitions) for label in labels}
        self._tail = session.log.tail({(session.topic("metrics"), 0): "latest"})

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    def pass_time(self, owned: Iterable[PartitionGroups], *, working: bool) -> None:
        """Advance the clock, and `present_s` of each owned partition whose rollout worker reports; `working` is False during an outage."""
        before = self.clock.now_s
        now = self.clock.tick(working=working)
        if now - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now
            self._read()
        for presence in self._presences.values():
            presence.now_s = now
        for state in owned:
            if all(presence.present(state.partition) for presence in self._presences.values()):
                state.present_s += now - before

    def close(self) -> None:
        self._tail.close()

    def _read(self) -> None:
        """Apply the new reports of the workers that own partitions of `prompts` or `calls`."""
        for record in self._tail.poll(0.0, max_records=5000):
            with contextlib.suppress(Unusable):  # the tracker owns reading `metrics`
                if (metrics.check(record, run=self._session.run).worker or "").startswith(tuple(generating_roles())):
                    with self._session.dead_letters.decoding(record):
                        measured = metrics.read(record, run=self._session.run)[1]
                    for label, presence in self._presences.items():
                        update_presence(presence, measured, label=label)


LATE_LIMIT_S = 5.0


def reject_orphans(session: Session, state: PartitionGroups, *, now_s: float) -> None:
    """Drop groups whose prompt is not in the log, and write a dead letter about each sample; one whose prompt is late stays open."""
    suspects = state.orphans(now_s=now_s)
    late = _prompts_to_come(session, state) if suspects else ()
    for group in suspects:
        if late is None or group.group in late:
            group.seen_s = now_s
            continue
        del state.open[group.group]
        if group.group < state.below:
            continue  # it had ended before its samples were read again
        for record in group.records.values():
            error = Unusable(f"the prompt of group {group.group} is missing in partition {state.partition}", kind="orphan")
            session.dead_letters.write(record, error)


def _prompts_to_come(session: Session, state: PartitionGroups) -> Collection[int | None] | None:
    """Numbers of the groups whose prompts are in the log but have not been read; None if the log cannot be read."""
    numbers = set[int | None]()
    try:
        with contextlib.closing(session.log.tail({(session.topic("prompts"), state.partition): state.prompts_position})) as tail:
            for record in tail.read_to_end(LATE_LIMIT_S, include_open=True):
                with contextlib.suppress(Unusable):
                    numbers.add(prompts.check(record, run=session.run).group)
    except LogError:
        return None
    return numbers


WRITE_BYTES, WRITE_GROUPS = 32 << 20, 256
"""Limits of one transaction, except for a larger single group: on a slow link it must end before the broker aborts it."""


@dataclass(frozen=True, slots=True)
class OutcomeWriter:
    """Writes the outcomes of groups in the owned partitions."""

    session: Session
    transactions: Transactions
    member: Member
    owned: Mapping[int, PartitionGroups]
    read_finished: Callable[[list[int]], None]
    """Reads from the log which groups of these partitions have ended."""

    def write(self, ended: Sequence[Group]) -> None:
        """Write outcomes in transactions of limited size; groups of partitions that were revoked are skipped."""
        batch, size = dict[int, list[Outgoing]](), 0
        for group in ended:
            partition = next((p for p, state in self.owned.items() if group.group in state.open), None)
            if partition is None:
                continue
            records = self._encoded(group, partition)
            nbytes = sum(len(record.value) for record in records)
            if batch and (size + nbytes > WRITE_BYTES or len(batch) == WRITE_GROUPS):
                self._commit(batch)
                batch, size = {}, 0
            batch[group.group], size = records, size + nbytes
        if batch:
            self._commit(batch)

    def _encoded(self, group: Group, partition: int) -> list[Outgoing]:
        """The records with the parts of a group's outcome, in order."""
        topic, key = self.session.topic("groups"), str(group.group).encode()
        with self.session.reporter.encoding:
            parts = groups.encode_parts(group, run=self.session.run, worker=self.session.worker)
            return [
                Outgoing(topic=topic, partition=partition, key=key, headers=headers.encode(value), value=value) for headers, value in parts
            ]

    def _commit(self, batch: Mapping[int, Sequence[Outgoing]]) -> None:
        """Commit the records of each group in `batch` with the offsets in one transaction; nothing if the partition was reassigned.

        If the result of the commit is unknown, the groups that the log does not contain are written again.
        """
        records = [record for parts in batch.values() for record in parts]
        partitions = {record.partition for record in records}
        try:
            committed = self._offsets(partitions, without=batch.keys())
            offsets = self.transactions.commit(records, offsets=committed, member=self.member.membership())
        except LostPartition:
            return  # Revoked and Assigned follow: the new owner, maybe this worker, reads the groups again
        except OutcomeUnknown:
            self.read_finished(sorted(partitions))
            if still_open := {group: parts for group, parts in batch.items() if group in self.owned[parts[0].partition].open}:
                self._commit(still_open)
            return
        for record, offset in zip(records, offsets, strict=True):
            self.owned[record.partition].finish(int(record.key or b""), offset=offset)
        for parts in batch.values():
            self.session.reporter.add(f"outcome_{dict(parts[0].headers)['outcome'].decode()}")

    def _offsets(self, partitions: Collection[int], *, without: Collection[int]) -> dict[Partition, tuple[int, str]]:
        """Offsets and metadata for the next owner, as if the groups in `without` had ended."""
        offsets: dict[Partition, tuple[int, str]] = {}
        for partition in partitions:
            state = self.owned[partition]
            prompts_offset, rollouts_offset = state.offsets(without=without)
            offsets[self.session.topic("prompts"), partition] = prompts_offset, state.note(without=without)
            offsets[self.session.topic("rollouts"), partition] = rollouts_offset, ""
        return offsets
