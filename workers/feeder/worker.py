"""The feeder: publishes the data set's rows to `prompts`, as fast as the rules admit them.

Group n's prompt is a function of (seed, n). Admission follows the newest weights and the dropped groups, so that a slow trainer limits
the whole pipeline. Only the trainer enforces `schedule.max_drops_per_step`: a second count could reach the limit first, and the trainer
would wait for groups that are never admitted.
"""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.infra.errors import LogError, Unrecoverable
from penstock.infra.log import Commits, Committed, Partition, Start, Tail, read_to_current_end
from penstock.pipeline.data.read_files import Row
from penstock.pipeline.data.run_data import Choice, Choices, Data, PromptOrder, choice_of, open_data, pool_of, refuse_changed
from penstock.pipeline.data.tokenization import Renderer
from penstock.pipeline.runtime import offset_metadata
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.offset_metadata import FeederOffsetMetadata
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.topic_reader import RunReader, deleted
from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.resume_point import ResumePoint, resume_point_of
from penstock.pipeline.scheduling.rules import Presence, WorkingClock, update_presence
from penstock.topics import groups, metrics, prompts
from penstock.topics.metrics import Activity
from penstock.topics.prompts import Prompt
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Outgoing, Record

POLL_S = 0.5
COMMIT_EVERY_S = 2.0
"""Interval between commits of the offsets from which a restarted feeder reads."""


@dataclass(slots=True)
class Admission:
    """Decides which groups may be admitted, from prompts, outcomes, steps, versions and the rollout workers' reports."""

    run: str
    partitions: int
    ledger: LedgerState
    admitted: int = 0
    """Groups below this number have been admitted."""
    ended_below: int = 0
    """Groups below this number have ended."""
    dropped_below: int = 0
    """Number of the groups below `ended_below` that a scorer dropped."""
    partition_of: dict[int, int] = field(default_factory=dict)
    """Group -> partition of its prompt, for groups from `ended_below` on."""
    ended: set[int] = field(default_factory=set)
    unfinished: list[int] = field(default_factory=list)
    choices: Choices = field(default_factory=lambda: Choices(order=PromptOrder(sizes=(1,), weights=(1.0,))))
    """The requested prompts, and the next one."""
    rows_before: Mapping[int, int] = field(default_factory=lambda: {0: 0})
    """Source -> rows of the sources before it."""
    presence: Presence = field(init=False)
    _reads_all: bool = False
    """True if all retained records are read, also of groups below `ended_below`: they define which prompts are retried."""
    _dropped: set[int] = field(default_factory=set)
    _prompt_at: dict[int, int] = field(default_factory=dict)
    _outcome_at: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Group -> partition and offset of its outcome."""
    _ends: dict[Partition, int] = field(default_factory=dict)
    """Partition -> the offset up to which it was read or written."""

    def __post_init__(self) -> None:
        self.unfinished = [0] * self.partitions
        self.presence = Presence(self.partitions)

    @property
    def dropped(self) -> int:
        """Number of groups dropped so far, by a scorer or as stale by the trainer."""
        return self.dropped_below + len(self._dropped - self.ledger.stale) + len(self.ledger.stale)

    def admissible(self, limit: int) -> int:
        """Number of groups below number `limit` that wait for a worker's free slot; 0 once no further prompt will come."""
        return 0 if self.choices.exhausted else max(0, limit - self.admitted)

    def start_offsets(self, committed: Mapping[Partition, Committed]) -> dict[Partition, int]:
        """Restore the counts of the previous feeder from its commits; return its offsets in `prompts` and `groups`, from which to read.

        Empty, and no counts, if the metadata of the commits are missing or differ, or if the choice of rows depends on all outcomes.
        """
        texts = {commit.metadata for commit in committed.values()}
        counts = offset_metadata.decode(FeederOffsetMetadata, texts.pop()) if len(texts) == 1 else None
        if counts is None or self.choices.remembers:
            return {}
        self.choices.next_position = counts.place
        self.admitted = self.ended_below = counts.ended
        self.dropped_below = counts.dropped
        starts = {partition: commit.offset or 0 for partition, commit in committed.items()}
        self._ends = {(topic.removeprefix(f"{self.run}."), p): offset for (topic, p), offset in starts.items()}
        return starts

    def count_on(self, resume_point: ResumePoint, *, stale: int) -> None:
        """Take the counts from a trainer's resume point instead of a feeder's metadata; `stale` groups had become stale before it."""
        self.admitted = self.ended_below = resume_point.below
        self.dropped_below = resume_point.drops - stale
        self._reads_all = True

    def commits(self) -> Commits:
        """Offsets to commit for the next feeder, with the counts of all earlier records as metadata."""
        counts = FeederOffsetMetadata(ended=self.ended_below, dropped=self.dropped_below, place=self.choices.next_position)
        metadata = offset_metadata.encode(counts)
        offsets = {
            (f"{self.run}.{topic}", p): self._ends.get((topic, p), 0) for topic in ("prompts", "groups") for p in range(self.partitions)
        }
        unfinished = [("prompts", p, self._prompt_at[group]) for group, p in self.partition_of.items()]
        unfinished += [("groups", p, offset) for p, offset in self._outcome_at.values()]
        for topic, p, offset in unfinished:
            offsets[f"{self.run}.{topic}", p] = min(offsets[f"{self.run}.{topic}", p], offset)
        return {partition: (offset, metadata) for partition, offset in offsets.items()}

    def apply(self, record: Record) -> None:
        """Apply a record of any topic that the feeder follows. Raises `Unusable`."""
        topic = record.topic.removeprefix(f"{self.run}.")
        self._ends[topic, record.partition] = record.offset + 1
        if topic == "prompts":
            prompt = prompts.read(record, run=self.run)[1]
            self.admit(prompt.group, record.partition, record.offset, choice=choice_of(prompt, rows_before=self.rows_before))
        elif topic == "groups":
            headers = groups.check(record, run=self.run)
            assert headers.group is not None
            self._end(headers.group, record, headers)
        elif topic == "metrics":
            update_presence(self.presence, metrics.read(record, run=self.run)[1])
        else:
            self.ledger.apply(record)

    def admit(self, group: int, partition: int, offset: int = 0, *, choice: Choice) -> None:
        """Count a group as admitted, whose prompt is at this partition and offset or is about to be written there."""
        if group < self.ended_below:
            if self._reads_all:
                self.choices.requested(group, choice)
        elif group not in self.partition_of:
            self.partition_of[group], self._prompt_at[group] = partition, offset
            while self.admitted in self.partition_of:  # groups are admitted in order: a number beyond a gap is not ours
                self.admitted += 1
            self.unfinished[partition] += 1
            self.choices.requested(group, choice)
            self._pass_ended()

    def written(self, batch: Sequence[Outgoing], offsets: Sequence[int]) -> None:
        """Record the offsets of a batch of prompts, whose keys are their group numbers."""
        for outgoing, offset in zip(batch, offsets, strict=True):
            self._prompt_at[int(outgoing.key or b"")] = offset
            self._ends["prompts", outgoing.partition] = offset + 1

    def _end(self, group: int, record: Record, headers: Headers) -> None:
        """Apply a group's outcome: free its slot, and pass its reward to the choice of rows."""
        reward = None if groups.lacks_rewards(headers.samples, headers.no_reward) else headers.reward_mean
        if group < self.ended_below and self._reads_all:
            self.choices.ended(group, outcome=headers.outcome, reward=reward)
        if group in self.ended or group not in self.partition_of:
            return  # only admitted groups make room
        self.ended.add(group)
        self.unfinished[self.partition_of[group]] -= 1
        self._outcome_at[group] = (record.partition, record.offset)
        self.choices.ended(group, outcome=headers.outcome, reward=reward)
        if headers.outcome in rules.DROPPED:
            self._dropped.add(group)
        self._pass_ended()

    def _pass_ended(self) -> None:
        """Raise `ended_below` over groups that have ended, and forget their state; a group whose prompt will be retried stops it."""
        while self.ended_below in self.ended and self.ended_below not in self.choices.awaiting:
            done = self.ended_below
            self.dropped_below += done in self._dropped and done not in self.ledger.stale
            self._dropped.discard(done)
            self.ended.discard(done)
            del self.partition_of[done], self._prompt_at[done], self._outcome_at[done]
            self.ended_below += 1


def main(session: Session) -> None:
    """Admit prompts until the run is closed."""
    session.check_model()
    data, renderer = open_data(session.config), Renderer.of(session.config)
    if session.config.data.on_change == "refuse":
        refuse_changed(session.info, session.config.data_sources, data.sources, context="training", run=session.run)
    # Fence before reading: no write of an earlier feeder can follow the records read now.
    transactions = session.transactions()
    state = _nothing_admitted(session, data)
    tail = _catch_up(session, state)
    session.ready(finishing=lambda: "exits at once (about 1 s)", outage=lambda: tail.outage_s)
    committed, clock = time.monotonic(), WorkingClock()
    while state.ledger.closed is None and not session.stop.is_set():
        state.presence.now_s = clock.tick(working=tail.outage_s == 0)
        batch = _admissible(state, session, data, renderer)
        if batch:
            state.written(batch, transactions.commit(batch))
        all_out = bool(session.reporter.values.get("all_out"))
        session.reporter.values.update(_counts(state, session))
        if session.reporter.values["all_out"] and not all_out:
            session.reporter.send(kind="status", values=session.reporter.values, control=True)
        session.reporter.status()
        for record in tail.poll(POLL_S):
            _apply(session, state, record)
        if time.monotonic() - committed > COMMIT_EVERY_S:
            committed = time.monotonic()
            with contextlib.suppress(LogError):  # without the commit a restart only takes longer
                tail.commit(state.commits())
    session.reporter.doing(Activity.DONE, "done")
    session.reporter.values.update(admissible=0.0, unfinished=0.0)
    tail.close()
    transactions.close()


def _nothing_admitted(session: Session, data: Data) -> Admission:
    """The state of a feeder before it has read any record: the order of the data's rows, and no admitted group."""
    settings = session.config.data
    choices = Choices(
        order=data.order(session.config), limit=session.info.get("prompts"), solved=settings.skip_solved, unsolved=settings.skip_unsolved,
        skipped={data.at(number) for number in settings.skip_rows},
    )  # fmt: skip
    state, rows_before = LedgerState(session.run, newest_only=True), dict(enumerate(data.rows_before))
    return Admission(session.run, session.config.partitions, state, choices=choices, rows_before=rows_before)


def _limit(state: Admission, session: Session) -> int:
    """Number of groups that the schedule allows to be admitted by now, counted from the start of the run."""
    return rules.admission_limit(
        session.schedule, newest_version=state.ledger.newest_version, dropped=state.dropped, steps=session.steps,
        ahead=not _paused(state, session),
    )  # fmt: skip


def _paused(state: Admission, session: Session) -> bool:
    """True if the last step's effective sample size is so low that nothing is admitted ahead of its round."""
    return rules.too_far_off(state.ledger.ess, floor=session.config.algorithm.ess_floor)


def _counts(state: Admission, session: Session) -> dict[str, float]:
    """The feeder's metrics: `all_out` is 1 once all prompts have ended and none will follow; `admissible` groups wait for a slot."""
    choices = state.choices
    all_out = choices.exhausted and state.ended_below == state.admitted
    return {
        "admitted": float(state.admitted),
        "dropped": float(state.dropped),
        "repeated": float(choices.repeated),
        "left_out": float(choices.left_out),
        "all_out": float(all_out),
        "admissible": float(state.admissible(_limit(state, session))),
        "unfinished": float(sum(state.unfinished)),
    }


def _catch_up(session: Session, state: Admission) -> Tail:
    """Read the run's records from the previous feeder's offsets to their current ends; return the tail that delivers later records.

    If its offset metadata have expired and records were deleted, the counts come from the newest step's resume point; raises
    `Unrecoverable` if there is none.
    """
    group, count = f"{session.run}.feeder", session.config.partitions
    prompt_starts: dict[Partition, Start] = {(session.topic("prompts"), p): "earliest" for p in range(count)}
    ended: dict[Partition, Start] = {(session.topic("groups"), p): "earliest" for p in range(count)}
    past, tail = session.log.tail(prompt_starts, group=group), session.log.tail(ended, group=group)
    committed, first_offsets = {**past.committed(), **tail.committed()}, session.log.beginning_offsets([*prompt_starts, *ended])
    reaches = all((committed[at].offset or 0) >= first for at, first in first_offsets.items())
    starts = state.start_offsets(committed) if reaches else {}
    if not starts and any(first_offsets.values()):
        _count_on(session, state)
    for partition, offset in starts.items():
        (past if partition[0] == session.topic("prompts") else tail).seek(partition, offset)
    ledger_starts: dict[Partition, Start] = {(session.topic("ledger"), 0): "earliest", (session.topic("weights"), 0): "earliest"}
    tail.add({**ledger_starts, (session.topic("metrics"), 0): "latest"})
    for reader in (past, tail):
        for record in read_to_current_end(session.log, reader):
            _apply(session, state, record)
    past.close()
    return tail


def _count_on(session: Session, state: Admission) -> None:
    """Take the counts from the newest step's resume point, because counting the records that were not deleted would admit too many prompts.

    Raises `Unrecoverable` if there is none.
    """
    stale, newest = 0, None
    for entry in RunReader(session.log, session.run).entries():
        stale += len(entry.groups) if entry.kind == "stale" else 0
        newest = (resume_point_of(entry), stale) if entry.kind == "step" else newest
    if newest is None or newest[0] is None or state.choices.remembers:
        gone = "; ".join(deleted(session.log, session.topic("prompts"), session.topic("groups")))
        lost = f"no feeder has committed how many groups were admitted and dropped, and {gone}"
        raise Unrecoverable(f"cannot resume: {lost}. Continue from a published version: penstock fork {session.run}")
    state.count_on(newest[0], stale=newest[1])


def _apply(session: Session, state: Admission, record: Record) -> None:
    """Apply a record to the state; an unusable one is skipped, because the role that owns its topic writes the dead letter."""
    with contextlib.suppress(Unusable), session.dead_letters.decoding(record):
        state.apply(record)


def _admissible(state: Admission, session: Session, data: Data, renderer: Renderer) -> list[Outgoing]:
    """Admit as many groups as the schedule and the workers' free slots allow now; return their prompts as records to write.

    Empty if none is allowed; the worker's status then tells what it waits for.
    """
    batch: list[Outgoing] = []
    schedule, reporter = session.schedule, session.reporter
    limit = _limit(state, session)
    while state.admitted < limit:
        number, choice = state.admitted, state.choices.next()
        if choice is None:
            if state.choices.exhausted:
                reporter.doing(Activity.DONE, "all prompts of the run's epochs are admitted")
            else:
                reporter.doing(Activity.NO_GROUP, f"group {number} waits for the outcome of the epoch before")
            return batch
        row = data.row(choice.turn.source, choice.turn.row)
        pool = pool_of(row, session.config)
        owners = _owners(state, session, pool)
        partition = rules.choose_partition(unfinished=state.unfinished, slots=state.presence.slots, owners=owners)
        if partition is None:
            worker = "rollout worker" if pool is None else f"rollout worker for pool {pool!r}"
            reporter.doing(Activity.NO_ROOM, f"group {number} waits for a free {worker}" if any(owners) else f"waiting for a {worker}")
            return batch
        slot = rules.slot_of(admitted=number, dropped=state.dropped)
        oldest = rules.min_version(schedule, slot=slot, newest_version=state.ledger.newest_version)
        prompt = _prompt(session, data, renderer, choice, row, number=number, slot=slot, min_version=oldest)
        topic, key = session.topic("prompts"), str(number).encode()
        with reporter.encoding:
            batch.append(prompts.outgoing(prompt, run=session.run, topic=topic, key=key, partition=partition))
        state.admit(number, partition, choice=choice)
    everything = limit - state.dropped >= session.steps * schedule.prompts_per_step + schedule.oversample_groups
    if everything:
        reporter.doing(Activity.DONE, "all prompts of the run are admitted")
        return batch
    waiting = "waiting for new weights"
    if _paused(state, session):
        ess, floor = state.ledger.ess, session.config.algorithm.ess_floor
        waiting += f": no prompt is admitted ahead of its round, because the last step's ESS {ess:.2f} is below {floor:g}"
    reporter.doing(Activity.FULL_WINDOW, waiting)
    return batch


def _owners(state: Admission, session: Session, pool: str | None) -> list[str | None]:
    """The worker that owns each partition; None if none reports, or if the partition is not of the rollout pool `pool` (None: any)."""
    owners = state.presence.owners
    if pool is None:
        return owners
    return [owner if pools[0] == pool else None for owner, pools in zip(owners, session.config.pools_by_partition, strict=True)]


def _prompt(
    session: Session, data: Data, renderer: Renderer, choice: Choice, row: Row, *, number: int, slot: int, min_version: int
) -> Prompt:
    """Render a data row as the prompt of group `number`; `slot` is its position among the trained groups."""
    source, epoch, _ = choice.turn
    text, token_ids = renderer.render(row)
    # Every turn of an episode renders the conversation: its driver needs the messages.
    messages = row.messages if session.config.environment.source is None else renderer.messages(row)
    return Prompt(
        group=number, slot=slot, min_version=min_version,
        samples_per_prompt=session.schedule.samples_per_prompt, epoch=epoch, row=data.rows_before[source] + row.index, prompt=text,
        messages=None if messages is None else json.dumps(messages), token_ids=token_ids, columns=json.dumps(row.columns),
        created_ns=time.time_ns(), place=choice.position, again=choice.again,
    )  # fmt: skip
