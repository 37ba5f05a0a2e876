"""The facts kept of each record: numbers and hashes.

The rule: facts, never payloads: a run of 100,000 samples is judged in a few hundred megabytes.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.pipeline.audit.anchors import Anchor
from penstock.pipeline.audit.drawn_turns import DrawnTurn
from penstock.pipeline.audit.rules import DROPS, Terms
from penstock.topics.ledger import Entry
from penstock.topics.turns.calls import TurnKey
from penstock.topics.weights import Manifest

INCOMPLETE = "incomplete"
"""Kind of an unusable record: a part of a group whose other parts are missing."""


class Where(NamedTuple):
    """Topic, partition and offset of a record."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        """Format it as topic/partition/offset."""
        return f"{self.topic}/{self.partition}/{self.offset}"


class PromptFact(NamedTuple):
    """A prompt that was admitted."""

    where: Where
    group: int
    slot: int
    min_version: int
    samples: int
    created_ns: int
    prompt_hash: bytes
    """Hash of the fields that the group's outcome has to repeat."""
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
    """Hash of all its fields."""
    sequences: int = 1
    """Sequences that are trained of it: the segments of a trajectory."""
    flaw: str | None = None
    """What is wrong with the turns of a trajectory."""
    broken: str | None = None
    """Why its environment ended it."""
    turns: tuple[DrawnTurn, ...] = ()
    """The policy's turns, in runs whose turns travel through the log."""


class ReplyFact(NamedTuple):
    """What was drawn for a call."""

    where: Where
    key: TurnKey
    tokens: bytes


class OutcomeFact(NamedTuple):
    """A group in `groups`, all parts joined."""

    where: Where
    """Topic, partition and offset of its first part."""
    group: int
    outcome: str
    prompt_hash: bytes
    sha256: str
    """SHA-256 recomputed over the payloads of all parts."""
    samples: tuple[tuple[int, bytes], ...]
    """Number and hash of each sample."""
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

    where: Where
    about: Where
    kind: str
    worker: str
    time_ns: int
    body: bytes
    """Hash of the key, headers and value it carries."""


class Unusable(NamedTuple):
    """A record that cannot be used."""

    where: Where
    kind: str
    reason: str
    group: int | None
    """Group named by its headers, None if they are invalid."""
    samples: tuple[int, ...] = ()
    """Samples named by the headers of a record of `rollouts`; empty if they are invalid."""


@dataclass(slots=True)
class WorkerFact:
    """One worker process, from its measurements."""

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
    """The run's `schedule` section in the register of runs."""
    status: str | None
    """The run's status in the register of runs; None when it is not registered."""
    counts: dict[str, int] = field(default_factory=dict)
    """Records read, by topic."""
    begins: dict[tuple[str, int], int] = field(default_factory=dict)
    prompts: list[PromptFact] = field(default_factory=list)
    samples: list[SampleFact] = field(default_factory=list)
    calls: set[TurnKey] = field(default_factory=set)
    replies: list[ReplyFact] = field(default_factory=list)
    outcomes: list[OutcomeFact] = field(default_factory=list)
    entries: list[EntryFact] = field(default_factory=list)
    """Entries of the ledger; of each number only the first record."""
    manifests: list[ManifestFact] = field(default_factory=list)
    chunks: dict[Where, ChunkFact] = field(default_factory=dict)
    recomputed: dict[int, Recomputed] = field(default_factory=dict)
    letters: list[LetterFact] = field(default_factory=list)
    unusable: list[Unusable] = field(default_factory=list)
    bodies: dict[Where, bytes] = field(default_factory=dict)
    """Hash of key, headers and value of every record that a dead letter names."""
    killers: set[Where] = field(default_factory=set)
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

    def steps(self) -> list[EntryFact]:
        """The committed steps, in the ledger's order."""
        return [fact for fact in self.entries if fact.entry.kind == "step"]

    def first_prompts(self) -> dict[int, PromptFact]:
        """Group -> its prompt."""
        prompts: dict[int, PromptFact] = {}
        for prompt in self.prompts:
            prompts.setdefault(prompt.group, prompt)
        return prompts

    def first_samples(self) -> dict[tuple[int, int, int], SampleFact]:
        """(partition, group, sample) -> its first record: the one that counts."""
        samples: dict[tuple[int, int, int], SampleFact] = {}
        for sample in self.samples if not self.killers else [sample for sample in self.samples if sample.where not in self.killers]:
            samples.setdefault((sample.where.partition, sample.group, sample.sample), sample)
        return samples

    def first_outcomes(self) -> dict[int, OutcomeFact]:
        """Group -> its outcome."""
        outcomes: dict[int, OutcomeFact] = {}
        for outcome in self.outcomes:
            outcomes.setdefault(outcome.group, outcome)
        return outcomes

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

    def trained(self) -> dict[int, int]:
        """Group -> the first step that trained it."""
        steps: dict[int, int] = {}
        for fact in self.steps():
            for planned in fact.entry.plan:
                steps.setdefault(planned.group, fact.entry.step or 0)
        return steps

    def stale(self) -> dict[int, int]:
        """Group -> number of the ledger entry that first lists it as stale."""
        entries: dict[int, int] = {}
        for fact in self.entries:
            for group in fact.entry.groups if fact.entry.kind == "stale" else ():
                entries.setdefault(group, fact.entry.seq)
        return entries

    def dropped(self) -> set[int]:
        """Groups that were dropped instead of trained: another prompt was admitted for each."""
        return {group for group, fact in self.first_outcomes().items() if fact.outcome in DROPS} | set(self.stale())
