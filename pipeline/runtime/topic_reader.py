"""Reads a run's topics from Kafka, an archive or memory, as iterators.

Of repeated records only the first is used, a group is complete once all its parts have arrived, the ledger has no gaps, and a poison
record is not decoded. At most one batch is in memory. The silence between records is limited, not the duration of a read.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Generic, TypeVar

from penstock.infra.errors import RecordMissing
from penstock.infra.log import Log, Partition, Start, drain
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.topics import dead_letters, groups, prompts, rollouts
from penstock.topics.dead_letters import DeadLetter
from penstock.topics.groups import Group, GroupAssembler
from penstock.topics.ledger import Entry
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout
from penstock.topics.weights import Manifest
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Record, RecordId

EFFECTS_FIRST = ("metrics", "ledger", "weights", "groups", "rollouts", "prompts", "dead-letters")
"""Order in which end offsets are read, so that the records that any record refers to are before the end of their topic."""

POISON: Final = "poison"
"""Kind of the dead letter about a record that has crashed the processes which decoded it."""

_ALL: Final[Mapping[Partition, int]] = {}

Payload = TypeVar("Payload")
Check = Callable[..., Headers]
Decoder = Callable[..., tuple[Headers, Payload]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(Generic[Payload]):
    """The content of one record, or of all parts of a group, or the reason why it is unusable."""

    records: tuple[Record, ...]
    headers: Headers | None = None
    """Parsed headers; None if they are invalid."""
    payload: Payload | None = None
    """None if it cannot be decoded, or was not decoded."""
    problem: Unusable | None = None
    repeats: bool = False
    """True for a later copy of a record; the run uses the first one."""

    @property
    def record(self) -> Record:
        """The record, or the first of a group's parts."""
        return self.records[0]


class RunReader:
    """Reads one run up to the end offsets at the first call, so that all its results are consistent."""

    def __init__(self, log: Log, run: str, *, alive: Callable[[], None] = lambda: None, ends: Mapping[str, int] | None = None) -> None:
        """Read a run; `alive` is called before every batch, and an exception from it ends the read.

        `ends`, offsets by TOPIC/PARTITION, are those of an earlier read: later records and other partitions are not read.
        """
        self.log, self.run = log, run
        self._alive, self._earlier = alive, ends

    def entries(self) -> Iterator[Entry]:
        """The ledger's entries, without repeated ones and without those after a gap."""
        return (item for item in self.history(LedgerState(self.run), topics=("ledger",)) if isinstance(item, Entry))

    def history(self, ledger_state: LedgerState, *, topics: Sequence[str] = ("ledger", "weights")) -> Iterator[Entry | Manifest]:
        """Every new ledger entry and manifest, after applying it to `ledger_state`; skips repeated and unusable records."""
        for record in itertools.chain.from_iterable(self.records(topic, partitions=[0]) for topic in topics):
            with contextlib.suppress(Unusable):
                if record.id not in self.poison and (item := ledger_state.apply(record)) is not None:
                    yield item

    def prompts(
        self, *, only: AbstractSet[int] | None = None, partitions: Sequence[int] | None = None, decode: bool = True, repeats: bool = False
    ) -> Iterator[Read[Prompt]]:
        """The prompt of each group, or of each in `only`; an unusable record is yielded with its `problem`.

        With `repeats` also later copies of a prompt; `decode=False` leaves `payload` None.
        """
        seen = set[int | None]()
        for checked in self._checked("prompts", prompts.check, only, partitions):
            if checked.headers is None:
                yield checked
                continue
            group = checked.headers.group
            if (repeated := group in seen) and not repeats:
                continue
            yield (read := self._decoded(replace(checked, repeats=repeated), prompts.read if decode else None))
            if read.problem is None:
                seen.add(group)

    def samples(
        self,
        *,
        only: AbstractSet[int] | None = None,
        partitions: Sequence[int] | None = None,
        since: Mapping[Partition, int] | None = None,
        decode: bool = True,
        repeats: bool = False,
    ) -> Iterator[Read[Rollout]]:
        """Each sample, or each of the groups in `only`; an unusable record is yielded with its `problem`. `since` gives start offsets.

        A record may hold several samples: each is yielded with the record, and with its own number and tokens in the headers.
        With `repeats` also later copies of a sample; `decode=False` leaves `payload` None.
        """
        seen = set[tuple[int | None, int]]()
        for checked in self._checked("rollouts", rollouts.check, only, partitions, since):
            if (headers := checked.headers) is None:
                yield checked
                continue
            tokens = rollouts.tokens_of(headers)
            if not repeats and all((headers.group, number) in seen for number in tokens):
                continue
            whole: Read[tuple[Rollout, ...]] = self._decoded(checked, rollouts.read_all if decode else None)
            by_number = {rollout.sample: rollout for rollout in whole.payload or ()}
            for number, count in tokens.items():
                if (repeated := (headers.group, number) in seen) and not repeats:
                    continue
                own = replace(headers, sample=number, tokens=count, samples=None, sample_tokens=None)
                yield Read(records=whole.records, headers=own, payload=by_number.get(number), problem=whole.problem, repeats=repeated)
                if whole.problem is None:
                    seen.add((headers.group, number))

    def groups(
        self, *, only: AbstractSet[int] | None = None, partitions: Sequence[int] | None = None, decode: bool = True, repeats: bool = False
    ) -> Iterator[Read[Group]]:
        """The outcome of each group, or of each in `only`, once all its parts have arrived; an unusable part is yielded with its `problem`.

        With `repeats` also later copies of a finished group; `decode=False` leaves `payload` None.
        """
        assembler, ended = GroupAssembler(), set[int | None]()
        for part in self._checked("groups", groups.check, only, partitions):
            if part.headers is None:
                yield part
                continue
            if (repeated := part.headers.group in ended) and not repeats:
                continue
            try:
                records = assembler.add(part.record, part.headers)
            except Unusable as error:
                yield replace(part, headers=None, problem=error)
                continue
            if records is None:
                continue
            whole = replace(part, records=tuple(records), repeats=repeated)
            yield (read := self._decoded(whole, groups.read if decode else None))
            if read.problem is None or read.problem.kind == POISON:  # its headers were checked, and the trainer uses them
                ended.add(part.headers.group)

    def dead_letters(self) -> Iterator[Read[DeadLetter]]:
        """Every dead letter; later ones about the same record have `repeats` set."""
        refused = set[RecordId]()
        for record in self.records("dead-letters"):
            try:
                headers, dead_letter = dead_letters.read(record, run=self.run)
            except Unusable as error:
                yield Read(records=(record,), problem=error)
                continue
            yield Read(records=(record,), headers=headers, payload=dead_letter, repeats=dead_letter.record_id in refused)
            refused.add(dead_letter.record_id)

    def records(
        self, *topics: str, partitions: Sequence[int] | None = None, since: Mapping[Partition, int] | None = None
    ) -> Iterator[Record]:
        """The retained records of the run's topics, undecoded, in order within a partition; none of a topic that does not exist.

        `since` gives start offsets.
        """
        ends = {at: end for topic in topics for at, end in self._ends.get(topic, {}).items()}
        if partitions is not None:
            ends = {at: end for at, end in ends.items() if at[1] in partitions}
        return _up_to(self.log, ends, alive=self._alive, since=since or {})

    @cached_property
    def poison(self) -> frozenset[RecordId]:
        """Records that crashed the processes which decoded them."""
        payloads = (read.payload for read in self.dead_letters() if read.payload is not None)
        return frozenset(dead_letter.record_id for dead_letter in payloads if dead_letter.kind == POISON)

    @cached_property
    def _ends(self) -> dict[str, dict[Partition, int]]:
        """Topic -> partition -> offset before which this reader reads."""
        ends = {topic: self.log.end_offsets(_partitions(self.log, f"{self.run}.{topic}")) for topic in EFFECTS_FIRST}
        if (earlier := self._earlier) is None:
            return ends
        return {
            topic: {at: min(end, earlier.get(f"{topic}/{at[1]}", 0)) for at, end in of_topic.items()} for topic, of_topic in ends.items()
        }

    def _checked(
        self,
        topic: str,
        check: Check,
        only: AbstractSet[int] | None,
        partitions: Sequence[int] | None,
        since: Mapping[Partition, int] | None = None,
    ) -> Iterator[Read[Any]]:
        """Records with their headers, or with the reason why those are invalid; skips groups outside `only`."""
        claims = None if only is None else {b"%d" % group for group in only}
        for record in self.records(topic, partitions=partitions, since=since):
            if claims is not None and not _claims(record, claims):
                continue
            try:
                headers = check(record, run=self.run)
            except Unusable as error:
                yield Read(records=(record,), problem=error)
                continue
            if only is None or headers.group in only:
                yield Read(records=(record,), headers=headers)

    def _decoded(self, read: Read[Any], decoder: Decoder[Payload] | None) -> Read[Payload]:
        """Decode the payload of a record, unless it is a poison record."""
        if decoder is None:
            return read
        if not self.poison.isdisjoint(record.id for record in read.records):
            return replace(read, problem=Unusable("processes crashed while decoding the record", kind=POISON))
        try:
            return replace(read, payload=decoder(read.records if len(read.records) > 1 else read.record, run=self.run)[1])
        except Unusable as error:
            return replace(read, problem=error)


def deleted(log: Log, *names: str, partition: int | None = None) -> list[str]:
    """Describe what retention has deleted from these Kafka topics, one line per partition; with `partition` only that one."""
    partitions = [at for name in names for at in _partitions(log, name) if partition in (None, at[1])]
    first_offsets = log.beginning_offsets(partitions)
    return [
        f"{topic}/{p}: the records at offsets 0 to {first_offsets[topic, p] - 1} were deleted"
        for topic, p in partitions
        if first_offsets[topic, p]
    ]


def scan(log: Log, *names: str, since: Mapping[Partition, int] = _ALL) -> Iterator[Record]:
    """Every retained record of these Kafka topics from `since` to the current end offsets; nothing for a missing topic."""
    return _up_to(log, log.end_offsets([at for name in names for at in _partitions(log, name)]), since=since)


def between(log: Log, at: Partition, start: int, end: int, *, fetch_bytes: int | None = None) -> Iterator[Record]:
    """Yield the records of one partition from offset `start` to before `end`, which both exist; `fetch_bytes` are fetched at once."""
    if start >= end:
        return
    with contextlib.closing(log.tail({at: start}, fetch_bytes=fetch_bytes)) as tail:
        yield from (record for record in drain(tail, {at: end}) if record.offset < end)


def _up_to(
    log: Log, ends: Mapping[Partition, int], *, alive: Callable[[], None] = lambda: None, since: Mapping[Partition, int] = _ALL
) -> Iterator[Record]:
    """Yield the records of the partitions in `ends` from `since`, or the first retained one, to before these end offsets."""
    first_offsets = {at: max(start, since.get(at, start)) for at, start in log.beginning_offsets(ends).items()}
    starts: dict[Partition, Start] = {at: start for at, start in first_offsets.items() if start < ends[at]}
    if not starts:
        return
    ends = {at: ends[at] for at in starts}
    with contextlib.closing(log.tail(starts)) as tail:
        while ends:
            try:
                records = drain(tail, ends, alive=alive)
                yield from (record for record in records if record.offset < ends.get((record.topic, record.partition), 0))
                return
            except RecordMissing:  # retention deletes meanwhile
                moved = {at: start for at, start in log.beginning_offsets(ends).items() if start > tail.position(at)}
                if not moved:
                    raise
                ends = {at: end for at, end in ends.items() if moved.get(at, 0) < end}
                tail.add({**moved})


def _partitions(log: Log, name: str) -> list[Partition]:
    return [(name, number) for number in range(log.partitions(name) or 0)]


def _claims(record: Record, claims: AbstractSet[bytes]) -> bool:
    """True if the key or the group header of a record, both unchecked, is one of these group numbers."""
    return record.key in claims or any(name == "group" and value in claims for name, value in record.headers)
