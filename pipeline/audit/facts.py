"""The facts kept of each record: numbers and hashes.

The rule: facts, never payloads, and those of each group in packed rows: a million groups of eight samples are judged in under a gigabyte.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.pipeline.audit.anchors import Anchor
from penstock.pipeline.audit.kept.groups import OutcomeFact, PlannedFact, PromptFact, outcomes_table, planned_table, prompts_table
from penstock.pipeline.audit.kept.samples import Samples
from penstock.pipeline.audit.kept.tables import Table
from penstock.pipeline.audit.rules import Terms
from penstock.topics.ledger import Entry
from penstock.topics.turns.calls import TurnKey
from penstock.topics.weights import Manifest
from penstock.topics.wire.record import RecordId

INCOMPLETE = "incomplete"
"""Kind of an unusable record: a part of a group whose other parts are missing."""


class ReplyFact(NamedTuple):
    """What was drawn for a call."""

    where: RecordId
    key: TurnKey
    tokens: bytes


class EntryFact(NamedTuple):
    """An entry of the ledger, without its plan and its metrics."""

    where: RecordId
    entry: Entry
    body: bytes
    plan: range = range(0)
    """Rows of the groups that it trained, in `planned`."""


class ManifestFact(NamedTuple):
    """A manifest."""

    where: RecordId
    manifest: Manifest
    body: bytes


class ChunkFact(NamedTuple):
    """A chunk of a version's weights."""

    version: int
    place: int
    """Its index in the version."""
    size: int
    sha256: str


class Recomputed(NamedTuple):
    """A version's digest, recomputed from its chunks."""

    digest: str | None
    problem: str | None
    """Why there is no digest."""
    released: bool = False
    """True if retention has deleted a chunk, so that the digest cannot be judged."""


class LetterFact(NamedTuple):
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
    """Numbers given out from 0, in any order."""

    below: int = 0
    """All up to here have come."""
    beyond: set[int] = field(default_factory=set)

    def add(self, number: int) -> bool:
        """Note a number; False if it had come already."""
        if number < self.below or number in self.beyond:
            return False
        self.beyond.add(number)
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1
        return True

    def missing(self) -> int:
        """Count the gaps between those that have come."""
        return max(self.beyond, default=self.below - 1) + 1 - self.below - len(self.beyond)


@dataclass(slots=True)
class WorkerFact:
    """One worker process, from its measurements."""

    worker: str
    role: str
    incarnation: str
    host: str | None
    began_ns: int
    seqs: Numbers = field(default_factory=Numbers)
    final: int | None = None
    """Offset of its last measurement, once it has ended in order."""


@dataclass(slots=True)
class Facts:
    """A whole run; lists are in the order of each partition."""

    run: str
    terms: Terms
    schedule: object
    """The run's `schedule` section in the register of runs."""
    status: str | None
    """The run's status in the register of runs; None when it is not registered."""
    samples: Samples
    changes: Sequence[Mapping[str, Any]] = ()
    """Changes of data and code while the run was stopped: name, digests and time."""
    counts: dict[str, int] = field(default_factory=dict)
    """Records read, by topic."""
    begins: dict[tuple[str, int], int] = field(default_factory=dict)
    """Topic and partition -> the offset from which on everything is kept."""
    first_kept: dict[tuple[str, int], int] = field(default_factory=dict)
    """Topic and partition whose beginning was deleted -> group of the first record there; in `rollouts` and `groups` one with a prompt."""
    prompts: Table[PromptFact] = field(default_factory=prompts_table)
    calls: set[TurnKey] = field(default_factory=set)
    replies: list[ReplyFact] = field(default_factory=list)
    outcomes: Table[OutcomeFact] = field(default_factory=outcomes_table)
    planned: Table[PlannedFact] = field(default_factory=planned_table)
    entries: list[EntryFact] = field(default_factory=list)
    """Entries of the ledger; of each number only the first record."""
    manifests: list[ManifestFact] = field(default_factory=list)
    chunks: dict[RecordId, ChunkFact] = field(default_factory=dict)
    recomputed: dict[int, Recomputed] = field(default_factory=dict)
    letters: list[LetterFact] = field(default_factory=list)
    unusable: list[Unusable] = field(default_factory=list)
    bodies: dict[RecordId, bytes] = field(default_factory=dict)
    """Hash of key, headers and value of every record that a dead letter names."""
    killers: set[RecordId] = field(default_factory=set)
    """Valid records that were set aside, and used by no worker, because they had killed their readers."""
    anchors: list[Anchor] = field(default_factory=list)
    """What has seen how far the ledger had come."""
    workers: dict[tuple[str, str], WorkerFact] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)
    """Topic -> number of records identical to an earlier one, where nothing else is kept of them."""

    @property
    def closed(self) -> Entry | None:
        """The entry that closed the run; None while it goes on."""
        return next((fact.entry for fact in self.entries if fact.entry.kind == "run-closed"), None)

    def deleted(self, where: RecordId) -> bool:
        """Whether the record that stood here was deleted."""
        return where.offset < self.begins.get(where[:2], 0)

    def cut(self, topic: str) -> list[tuple[str, int]]:
        """The partitions of a topic whose beginning was deleted."""
        return [place for place, begin in self.begins.items() if begin and place[0] == topic]

    def steps(self) -> list[EntryFact]:
        """The committed steps, in the ledger's order."""
        return [fact for fact in self.entries if fact.entry.kind == "step"]

    def first_manifests(self) -> dict[int, ManifestFact]:
        """Version -> its manifest: of those with the digest of the first one the last, which says where lost chunks were sent again."""
        manifests: dict[int, ManifestFact] = {}
        for fact in self.manifests:
            if manifests.setdefault(fact.manifest.version, fact).manifest.digest == fact.manifest.digest:
                manifests[fact.manifest.version] = fact
        return manifests

    def published_ns(self) -> dict[int, int]:
        """Version -> when it was published first: chunks that were lost may have been sent again long after."""
        return {fact.manifest.version: fact.manifest.created_ns for fact in reversed(self.manifests)}

    def plan(self, fact: EntryFact) -> Iterator[PlannedFact]:
        """The groups that an entry trained, in the order of its plan."""
        return (self.planned[row] for row in fact.plan)

    def stale(self) -> dict[int, int]:
        """Group -> number of the ledger entry that first lists it as stale."""
        entries: dict[int, int] = {}
        for fact in self.entries:
            for group in fact.entry.groups if fact.entry.kind == "stale" else ():
                entries.setdefault(group, fact.entry.seq)
        return entries
