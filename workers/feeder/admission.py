"""The feeder's state: the partition of each admitted group, how it ended, free slots of rollout workers, and the next prompt.

Everything follows from the log. Groups below the first unfinished one are only counted, and the counts are stored with the committed
offsets: neither memory nor restart time grows with the run. A row is skipped by the reward of its group in the epoch before; the choice
of the next prompt waits for that outcome.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.infra.log import Commits, Committed, Partition
from penstock.pipeline.data.prompt_order import PromptOrder, RowId
from penstock.pipeline.runtime import offset_metadata
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.offset_metadata import FeederOffsetMetadata
from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.resume_point import ResumePoint
from penstock.pipeline.scheduling.rules import Presence, update_presence
from penstock.topics import groups, metrics, prompts
from penstock.topics.prompts import Prompt
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Outgoing, Record


class Choice(NamedTuple):
    """A row for the next group."""

    position: int
    """Index in the order of prompts."""
    turn: RowId
    again: int | None = None
    """The abandoned group that this retries."""


@dataclass(slots=True, kw_only=True)
class Choices:
    """The requested prompts, as far as they decide what is next."""

    order: PromptOrder
    limit: int | None = None
    """Number of prompts; None for no end: `run.epochs` counts prompts."""
    solved: float | None = None
    """Rows whose group had at least this mean reward in the epoch before are skipped."""
    unsolved: float | None = None
    """Rows whose group had at most this mean reward in the epoch before are skipped."""
    next_position: int = 0
    left_out: int = 0
    repeated: int = 0
    awaiting: dict[int, Choice] = field(default_factory=dict)
    """Abandoned groups whose prompts are to be retried."""
    _requested: dict[int, Choice] = field(default_factory=dict)
    """By group, of those that have not ended."""
    _repeats: set[int] = field(default_factory=set)
    """Groups that were retried before their outcome was read."""
    _reward: dict[RowId, float | None] = field(default_factory=dict)
    """By row and epoch, of this epoch and the one before; None until it has ended."""

    @property
    def remembers(self) -> bool:
        """True if outcomes decide the next prompts, so that a restarted feeder has to read all of them."""
        return self.solved is not None or self.unsolved is not None

    def next(self) -> Choice | None:
        """The next prompt; None if there is none, yet or for good."""
        if self.awaiting:
            group = min(self.awaiting)
            return self.awaiting[group]._replace(again=group)
        while self.limit is None or self.next_position < self.limit:
            turn = self.order.at(self.next_position)
            before = turn._replace(epoch=turn.epoch - 1)
            if before not in self._reward:
                return Choice(self.next_position, turn)
            reward = self._reward[before]
            if reward is None:
                return None
            if not self._skips(reward):
                return Choice(self.next_position, turn)
            del self._reward[before]  # skipped once; then it is tried again
            self.next_position, self.left_out = self.next_position + 1, self.left_out + 1
        return None

    @property
    def exhausted(self) -> bool:
        """True if no prompt will follow; open groups may still be abandoned."""
        return self.limit is not None and self.next_position >= self.limit and not self.awaiting

    def requested(self, group: int, choice: Choice) -> None:
        """Record that a group's prompt is in the log, or about to be."""
        self._requested[group] = choice
        if choice.again is not None:
            self.repeated += 1
            if self.awaiting.pop(choice.again, None) is None:
                self._repeats.add(choice.again)
        elif choice.position >= self.next_position:
            self.next_position = choice.position + 1
        if self.remembers:
            self._reward.pop(choice.turn._replace(epoch=choice.turn.epoch - 1), None)
            self._reward[choice.turn] = None

    def ended(self, group: int, *, outcome: str | None, reward: float | None) -> None:
        """Record how a group ended; an abandoned one is retried once."""
        choice = self._requested.pop(group, None)
        if choice is None:
            return
        if outcome == "abandoned" and choice.again is None:
            if group in self._repeats:
                self._repeats.discard(group)
            else:
                self.awaiting[group] = choice
            return
        if self.remembers and reward is not None:
            self._reward[choice.turn] = reward
        elif self.remembers:
            self._reward.pop(choice.turn, None)

    def _skips(self, reward: float) -> bool:
        return (self.solved is not None and reward >= self.solved) or (self.unsolved is not None and reward <= self.unsolved)


def choice_of(prompt: Prompt, *, rows_before: Mapping[int, int]) -> Choice:
    """The choice of a recorded prompt; `rows_before` has for each source the rows of those before it."""
    source = max(number for number, rows in rows_before.items() if rows <= prompt.row)
    turn = RowId(source, prompt.epoch, prompt.row - rows_before[source])
    return Choice(prompt.group if prompt.place is None else prompt.place, turn, prompt.again)


@dataclass(slots=True)
class Admission:
    """Applies `prompts`, `groups`, `ledger`, `weights` and the rollout workers' reports."""

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
        """Number of groups dropped, by a scorer or as stale by the trainer."""
        return self.dropped_below + len(self._dropped - self.ledger.stale) + len(self.ledger.stale)

    def admissible(self, limit: int) -> int:
        """Number of groups below `limit` that wait for a free slot; 0 once no further prompt will come."""
        return 0 if self.choices.exhausted else max(0, limit - self.admitted)

    def begin(self, committed: Mapping[Partition, Committed]) -> dict[Partition, int]:
        """Start offsets in `prompts` and `groups` from the previous feeder's commits; empty if their metadata disagree."""
        texts = {commit.metadata for commit in committed.values()}
        note = offset_metadata.decode(FeederOffsetMetadata, texts.pop()) if len(texts) == 1 else None
        if note is None or self.choices.remembers:
            return {}
        self.choices.next_position = note.place
        self.admitted = self.ended_below = note.ended
        self.dropped_below = note.dropped
        starts = {partition: commit.offset or 0 for partition, commit in committed.items()}
        self._ends = {(topic.removeprefix(f"{self.run}."), p): offset for (topic, p), offset in starts.items()}
        return starts

    def count_on(self, resume_point: ResumePoint, *, stale: int) -> None:
        """Start from a resume point; `stale` groups had become stale by then. For a feeder without offset metadata."""
        self.admitted = self.ended_below = resume_point.below
        self.dropped_below = resume_point.drops - stale
        self._reads_all = True

    def commits(self) -> Commits:
        """Commits for the next feeder: offsets, and as metadata the counts of the records before each."""
        text = offset_metadata.encode(
            FeederOffsetMetadata(ended=self.ended_below, dropped=self.dropped_below, place=self.choices.next_position)
        )
        offsets = {
            (f"{self.run}.{topic}", p): self._ends.get((topic, p), 0) for topic in ("prompts", "groups") for p in range(self.partitions)
        }
        unfinished = [("prompts", p, self._prompt_at[group]) for group, p in self.partition_of.items()]
        unfinished += [("groups", p, offset) for p, offset in self._outcome_at.values()]
        for topic, p, offset in unfinished:
            offsets[f"{self.run}.{topic}", p] = min(offsets[f"{self.run}.{topic}", p], offset)
        return {partition: (offset, text) for partition, offset in offsets.items()}

    def apply(self, record: Record) -> None:
        """Apply a record of any of the topics the feeder follows. Raises `Unusable`."""
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
        """Record that a group's prompt is in a partition, or about to be."""
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
        """Forget the oldest groups that have ended, except one whose prompt will be retried."""
        while self.ended_below in self.ended and self.ended_below not in self.choices.awaiting:
            done = self.ended_below
            self.dropped_below += done in self._dropped and done not in self.ledger.stale
            self._dropped.discard(done)
            self.ended.discard(done)
            del self.partition_of[done], self._prompt_at[done], self._outcome_at[done]
            self.ended_below += 1
