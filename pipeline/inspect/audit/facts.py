"""Facts about the records of a run: numbers and hashes, no payloads.

Facts of each group are in packed rows: a million groups of eight samples take less than a gigabyte.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.pipeline.inspect.audit.anchors import Anchor
from penstock.pipeline.inspect.audit.rules import Terms
from penstock.pipeline.inspect.audit.store.groups import OutcomeFact, PlannedFact, PromptFact, outcomes_table, planned_table, prompts_table
from penstock.pipeline.inspect.audit.store.samples import Samples
from penstock.pipeline.inspect.audit.store.tables import Table
from penstock.topics.ledger import Entry
from penstock.topics.turns.calls import TurnKey
from penstock.topics.weights import Manifest
from penstock.topics.wire.record import RecordId

INCOMPLETE = "incomplete"
"""Kind of an unusable record: a part of a group whose other parts are missing."""


class ReplyFact(NamedTuple):
    """The completion of a call."""

    where: RecordId
    key: TurnKey
    tokens: bytes


class EntryFact(NamedTuple):
    """An entry of the ledger, without its plan and its metrics."""

    where: RecordId
    entry: Entry
    body: bytes
    plan: range = range(0)
    """Rows of its trained groups in `planned`."""


class ManifestFact(NamedTuple):
    """A manifest of `weights`."""

    where: RecordId
    manifest: Manifest
    body: bytes


class ChunkFact(NamedTuple):
    """A chunk of a version's weights."""

    version: int
    number: int
    """Index in the version."""
    size: int
    sha256: str


class Recomputed(NamedTuple):
    """A version's digest, recomputed from its chunks."""

    digest: str | None
    problem: str | None
    """Reason why there is no digest."""
    released: bool = False
    """True if retention has deleted a chunk, so that the digest cannot be checked."""


class DeadLetterFact(NamedTuple):
    """A dead letter."""

    where: RecordId
    about: RecordId
    kind: str
    worker: str
    time_ns: int
    body: bytes
    """Hash of the key, headers and value it carries."""


class Unusable(NamedTuple):
    """A record that cannot be used."""

    where: RecordId
    kind: str
    reason: str
    group: int | None
    """Group named by its headers, None if they are invalid."""
    samples: tuple[int, ...] = ()
    """Samples named by the headers of a record of `rollouts`; empty if they are invalid."""


@dataclass(slots=True)
class Numbers:
    """Numbers assigned from 0, received in any order."""

    below: int = 0
    """All numbers below this have been received."""
    beyond: set[int] = field(default_factory=set)

    def add(self, number: int) -> bool:
        """Note a number; False if it was received before."""
        if number < self.below or number in self.beyond:
            return False
        self.beyond.add(number)
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1
        return True

    def missing(self) -> int:
        """Number of gaps between the received numbers."""
        return max(self.beyond, default=self.below - 1) + 1 - self.below - len(self.beyond)


@dataclass(slots=True)
class WorkerFact:
    """One worker process, from its measurements."""

    worker: str
    role: str
    incarnation: str
    host: str | None
    started_ns: int
    seqs: Numbers = field(default_factory=Numbers)
    final: int | None = None
    """Offset of its final measurement; None unless it exited in order."""


@dataclass(slots=True)
class Facts:
    """The facts of one run; lists are in the order of each partition."""

    run: str
    terms: Terms
    schedule: object
    """The run's `schedule` section in the register of runs."""
    status: str | None
    """The run's status in the register of runs; None if it is not registered."""
    samples: Samples
    changes: Sequence[Mapping[str, Any]] = ()
    """Changes of data and code while the run was stopped: name, digests and time."""
    counts: dict[str, int] = field(default_factory=dict)
    """Records read, by topic."""
    start_offsets: dict[tuple[str, int], int] = field(default_factory=dict)
    """Topic and partition -> first retained offset."""
    first_retained: dict[tuple[str, int], int] = field(default_factory=dict)
    """Truncated topic and partition -> group of its first record; in `rollouts` and `groups` the first one with a prompt."""
    prompts: Table[PromptFact] = field(default_factory=prompts_table)
    calls: set[TurnKey] = field(default_factory=set)
    replies: list[ReplyFact] = field(default_factory=list)
    outcomes: Table[OutcomeFact] = field(default_factory=outcomes_table)
    planned: Table[PlannedFact] = field(default_factory=planned_table)
    entries: list[EntryFact] = field(default_factory=list)
    """Ledger entries, the first record of each number."""
    manifests: list[ManifestFact] = field(default_factory=list)
    chunks: dict[RecordId, ChunkFact] = field(default_factory=dict)
    recomputed: dict[int, Recomputed] = field(default_factory=dict)
    dead_letters: list[DeadLetterFact] = field(default_factory=list)
    unusable: list[Unusable] = field(default_factory=list)
    bodies: dict[RecordId, bytes] = field(default_factory=dict)
    """Hash of key, headers and value of each record that has a dead letter."""
    poison: set[RecordId] = field(default_factory=set)
    """Valid records that crashed their readers: dead-lettered and not used."""
    anchors: list[Anchor] = field(default_factory=list)
    """Evidence of committed steps outside the ledger."""
    workers: dict[tuple[str, str], WorkerFact] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)
    """Topic -> number of records identical to an earlier one."""

    @property
    def closed(self) -> Entry | None:
        """The entry that closed the run; None while it is running."""
        return next((fact.entry for fact in self.entries if fact.entry.kind == "run-closed"), None)

    def deleted(self, where: RecordId) -> bool:
        """True if the record was deleted by retention."""
        return where.offset < self.start_offsets.get(where[:2], 0)

    def truncated(self, topic: str) -> list[tuple[str, int]]:
        """The partitions of a topic whose first records were deleted."""
        return [partition for partition, start in self.start_offsets.items() if start and partition[0] == topic]

    def steps(self) -> list[EntryFact]:
        """The committed steps, in the ledger's order."""
        return [fact for fact in self.entries if fact.entry.kind == "step"]

    def first_manifests(self) -> dict[int, ManifestFact]:
        """Version -> its manifest: the last one with the first one's digest, which names the offsets of chunks that were sent again."""
        manifests: dict[int, ManifestFact] = {}
        for fact in self.manifests:
            if manifests.setdefault(fact.manifest.version, fact).manifest.digest == fact.manifest.digest:
                manifests[fact.manifest.version] = fact
        return manifests

    def published_ns(self) -> dict[int, int]:
        """Version -> time of its first publication; lost chunks may be sent again much later."""
        return {fact.manifest.version: fact.manifest.created_ns for fact in reversed(self.manifests)}

    def plan(self, fact: EntryFact) -> Iterator[PlannedFact]:
        """The groups of an entry's plan, in its order."""
        return (self.planned[row] for row in fact.plan)

    def stale(self) -> dict[int, int]:
        """Group -> number of the ledger entry that first lists it as stale."""
        entries: dict[int, int] = {}
        for fact in self.entries:
            for group in fact.entry.groups if fact.entry.kind == "stale" else ():
                entries.setdefault(group, fact.entry.seq)
        return entries
