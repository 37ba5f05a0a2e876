"""What is kept of each record: numbers and hashes.

The rule: facts, never payloads: a run of 100,000 samples is judged in a few hundred megabytes.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.pipeline.audit.rules import DROPS, Terms
from penstock.topics.ledger import Entry
from penstock.topics.weights import Manifest

INCOMPLETE = "incomplete"
"""Kind of a record that is a part of a group whose other parts are missing."""


class Where(NamedTuple):
    """A record's place."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        """As people write it: topic/partition/offset."""
        return f"{self.topic}/{self.partition}/{self.offset}"


class PromptFact(NamedTuple):
    """A prompt that was admitted."""

    where: Where
    group: int
    slot: int
    min_version: int
    samples: int
    created_ns: int
    told: bytes
    """Hash of what the group's outcome has to repeat."""
    body: bytes
    """Hash of the payload."""


class SampleFact(NamedTuple):
    """A sample in `rollouts`."""

    where: Where
    group: int
    sample: int
    version_min: int
    version_max: int
    started_ns: int
    timestamp_ms: int
    worker: str
    body: bytes
    """Hash of everything about it."""


class OutcomeFact(NamedTuple):
    """A group in `groups`, all parts together."""

    where: Where
    """Of its first part."""
    group: int
    outcome: str
    told: bytes
    sha256: str
    """Recomputed over the payloads of all parts."""
    samples: tuple[tuple[int, bytes], ...]
    """Number and hash of each."""
    version_min: int | None
    """Oldest version that any trained token of any sample was drawn under."""


class EntryFact(NamedTuple):
    """An entry of the ledger."""

    where: Where
    entry: Entry
    body: bytes


class ManifestFact(NamedTuple):
    """A manifest."""

    where: Where
    manifest: Manifest
    body: bytes


class ChunkFact(NamedTuple):
    """A chunk as it lies in the log."""

    version: int
    place: int
    """Its index in the version."""
    size: int
    sha256: str


class Recomputed(NamedTuple):
    """What a version's chunks amount to."""

    digest: str | None
    problem: str | None
    """Why there is no digest."""
    released: bool = False
    """Whether retention has deleted a chunk, so that nothing can be said."""


class LetterFact(NamedTuple):
    """A dead letter."""

    where: Where
    about: Where
    kind: str
    worker: str
    time_ns: int
    body: bytes
    """Hash of key, headers and value it carries."""


class Unusable(NamedTuple):
    """A record that cannot be used."""

    where: Where
    kind: str
    reason: str
    group: int | None
    """As far as its headers can be believed."""
    samples: tuple[int, ...] = ()
    """Those of a record of `rollouts`, as far as its headers can be believed."""


@dataclass(slots=True)
class WorkerFact:
    """One process, as its measurements tell it."""

    worker: str
    role: str
    incarnation: str
    host: str | None
    began_ns: int
    seqs: set[int] = field(default_factory=set)
    final: int | None = None
    """Offset of its last measurement, once it has ended in order."""


@dataclass(slots=True)
class Facts:
    """A whole run; lists are in the order of each partition."""

    run: str
    terms: Terms
    schedule: object
    """The schedule's section as the register of runs has it."""
    status: str | None
    """What the register of runs says of it; None when it is not registered."""
    counts: dict[str, int] = field(default_factory=dict)
    """Records read, by topic."""
    begins: dict[tuple[str, int], int] = field(default_factory=dict)
    prompts: list[PromptFact] = field(default_factory=list)
    samples: list[SampleFact] = field(default_factory=list)
    outcomes: list[OutcomeFact] = field(default_factory=list)
    entries: list[EntryFact] = field(default_factory=list)
    """Each number once: the first record of it."""
    manifests: list[ManifestFact] = field(default_factory=list)
    chunks: dict[Where, ChunkFact] = field(default_factory=dict)
    recomputed: dict[int, Recomputed] = field(default_factory=dict)
    letters: list[LetterFact] = field(default_factory=list)
    unusable: list[Unusable] = field(default_factory=list)
    bodies: dict[Where, bytes] = field(default_factory=dict)
    """Hash of key, headers and value of every record that a dead letter names."""
    killers: set[Where] = field(default_factory=set)
    """Records that were set aside because they had ended their readers: sound, and used by nobody."""
    workers: dict[tuple[str, str], WorkerFact] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)
    """Records that repeat another one word for word, by topic, where nothing else is kept of them."""

    @property
    def closed(self) -> Entry | None:
        """The entry that closed the run; None while it goes on."""
        return next((fact.entry for fact in self.entries if fact.entry.kind == "run-closed"), None)

    def steps(self) -> list[EntryFact]:
        """The committed steps, in the ledger's order."""
        return [fact for fact in self.entries if fact.entry.kind == "step"]

    def first_prompts(self) -> dict[int, PromptFact]:
        """Group -> its prompt."""
        found: dict[int, PromptFact] = {}
        for prompt in self.prompts:
            found.setdefault(prompt.group, prompt)
        return found

    def first_samples(self) -> dict[tuple[int, int, int], SampleFact]:
        """(partition, group, sample) -> its first record: the one that counts."""
        found: dict[tuple[int, int, int], SampleFact] = {}
        for sample in self.samples if not self.killers else [sample for sample in self.samples if sample.where not in self.killers]:
            found.setdefault((sample.where.partition, sample.group, sample.sample), sample)
        return found

    def first_outcomes(self) -> dict[int, OutcomeFact]:
        """Group -> its outcome."""
        found: dict[int, OutcomeFact] = {}
        for outcome in self.outcomes:
            found.setdefault(outcome.group, outcome)
        return found

    def first_manifests(self) -> dict[int, ManifestFact]:
        """Version -> its manifest."""
        found: dict[int, ManifestFact] = {}
        for fact in self.manifests:
            found.setdefault(fact.manifest.version, fact)
        return found

    def trained(self) -> dict[int, int]:
        """Group -> the first step that trained it."""
        found: dict[int, int] = {}
        for fact in self.steps():
            for planned in fact.entry.plan:
                found.setdefault(planned.group, fact.entry.step or 0)
        return found

    def stale(self) -> dict[int, int]:
        """Group -> number of the ledger's entry that first called it stale."""
        found: dict[int, int] = {}
        for fact in self.entries:
            for group in fact.entry.groups if fact.entry.kind == "stale" else ():
                found.setdefault(group, fact.entry.seq)
        return found

    def dropped(self) -> set[int]:
        """Groups that were not to be trained: another prompt was admitted for each."""
        return {group for group, fact in self.first_outcomes().items() if fact.outcome in DROPS} | set(self.stale())
