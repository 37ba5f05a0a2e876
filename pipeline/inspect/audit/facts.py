"""Facts about the records of a run that the audit checks: numbers and hashes, no payloads.

Facts about groups and samples are in SQL tables in a temporary file, so that memory grows only with steps and versions. `rowid` is the
order of reading; the first record of a group or sample counts.

Anchors are evidence of committed steps outside the ledger: measurements, checkpoints and `metrics.jsonl`. They reveal a ledger that has
lost its last entries, which otherwise looks complete.
"""

import contextlib
import re
import sqlite3
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from penstock.pipeline.inspect.audit.rules import Terms, as_object
from penstock.topics.ledger import Entry
from penstock.topics.metrics import Measurement
from penstock.topics.weights import Manifest
from penstock.topics.wire.record import RecordId

ANY = sys.maxsize
DROPPED = """
    (coalesce(outcome IN ('filtered', 'failed', 'abandoned'), 0) OR (step IS NULL AND outcome IS NULL AND outcome_deleted))
"""
"""SQL condition on a row of `lifecycles`: the group was dropped, or may have been if retention deleted its outcome."""
INCOMPLETE = "incomplete"
"""Kind of an unusable record that is part of a group whose other parts are missing."""


LAST_BYTES = 1 << 18
"""Number of bytes read from the end of `metrics.jsonl`, which contain its newest step."""
_CHECKPOINT = re.compile(r"step-\d{8,}")


class Anchor(NamedTuple):
    """Evidence that a number of steps was committed."""

    name: str
    steps: int
    """Number of steps committed when the record was written."""


def of_folder(directory: Path) -> list[Anchor]:
    """Return the anchors in a run's directory; empty if it does not exist.

    Call this before reading the log: an active run adds anchors for steps that a ledger read earlier does not have.
    """
    return [*_checkpoints(directory / "checkpoints"), *_points(directory / "metrics.jsonl")]


def _checkpoints(directory: Path) -> list[Anchor]:
    """Return an anchor per readable checkpoint: the number of steps in its state."""
    anchors = []
    for path in sorted(directory.glob("step-*")):
        with contextlib.suppress(OSError, KeyError, ValueError, TypeError):
            if _CHECKPOINT.fullmatch(path.name):
                anchors.append(Anchor(f"checkpoint {path.name}", int(as_object((path / "state.json").read_text())["steps"])))
    return anchors


def _points(path: Path) -> list[Anchor]:
    """Return the anchor in `metrics.jsonl`, its newest step; [] if it has none."""
    lines: list[dict[str, Any]] = []
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LAST_BYTES))
        lines = [as_object(line) for line in file.read().decode(errors="replace").splitlines()]
    steps = [line["step"] + 1 for line in lines if line.get("kind") == "step" and isinstance(line.get("step"), int)]
    return [Anchor(path.name, max(steps))] if steps else []


class EntryFact(NamedTuple):
    """A ledger entry without its plan and metrics."""

    where: RecordId
    entry: Entry
    planned: int
    """Number of groups in the step's plan."""
    sha256: str


class ManifestFact(NamedTuple):
    where: RecordId
    manifest: Manifest


class ChunkFact(NamedTuple):
    """A chunk of a version's weights."""

    version: int
    number: int
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
    """A dead letter: a copy of a record that a worker refused, at `where`; the record itself is at `about`."""

    where: RecordId
    about: RecordId
    kind: str
    worker: str
    time_ns: int
    body: bytes
    """Hash of the key, headers and value of the record in the dead letter."""


class Unusable(NamedTuple):
    """A record that cannot be decoded or does not belong to the run."""

    where: RecordId
    kind: str
    reason: str
    group: int | None
    """Group in the headers; None if they are invalid."""
    samples: tuple[int, ...] = ()
    """Samples in the headers of a record of `rollouts`; empty if they are invalid."""


@dataclass(slots=True)
class WorkerFact:
    """One worker process, from its measurements."""

    worker: str
    role: str
    incarnation: str
    host: str | None
    started_ns: int
    first_seq: int
    """Sequence number of the first retained measurement."""
    final: int | None = None
    """Offset of the final measurement; None if the process did not exit normally."""


CACHE_KIB = 32 << 10
"""Memory for the tables; the rest is in an unnamed temporary file, which is deleted with the connection."""

SCHEMA = """
CREATE TABLE prompts (
    group_id INT, partition INT, offset INT, slot INT, min_version INT, samples INT, created_ns INT,
    prompt_hash BLOB,  -- hash of the fields that the group's outcome has to repeat
    body BLOB          -- hash of the payload
);
CREATE INDEX prompts_by_group ON prompts (group_id);

CREATE TABLE calls (group_id INT, sample INT, turn INT, attempt INT, context TEXT, PRIMARY KEY (group_id, sample, turn, attempt, context));
CREATE TABLE replies (group_id INT, sample INT, turn INT, attempt INT, context TEXT, partition INT, offset INT, tokens BLOB);
CREATE INDEX replies_by_context ON replies (group_id, sample, context, tokens);
CREATE TABLE turns (group_id INT, sample INT, number INT, context TEXT, tokens BLOB, partition INT, offset INT);

CREATE TABLE samples (
    kind TEXT,  -- first; again: a later record of the same sample; poison: the record crashed its readers
    group_id INT, partition INT, sample INT, offset INT, version_min INT, version_max INT, timestamp_ms INT, started_ns INT, worker TEXT,
    body BLOB,    -- hash of all fields
    broken TEXT,  -- error of its environment
    flaw TEXT     -- what is wrong with the turns of its trajectory
);
CREATE INDEX samples_by_group ON samples (group_id, partition, sample);

CREATE TABLE outcomes (
    group_id INT, partition INT, offset INT,  -- of the first part
    outcome TEXT, prompt_hash BLOB,
    body BLOB,        -- SHA-256 recomputed over the payloads of all parts
    version_min INT,  -- oldest version that generated a trained token of any sample
    numbers TEXT,     -- JSON: samples in the outcome
    expected TEXT,    -- JSON: samples that have to be in the outcome
    absent TEXT,      -- JSON: samples that are not in the prompt's partition of rollouts
    differing TEXT,   -- JSON: samples that differ from their first record in rollouts
    parent TEXT       -- parent run, for a regraded group
);
CREATE INDEX outcomes_by_group ON outcomes (group_id);
CREATE INDEX outcomes_by_offset ON outcomes (partition, offset);

CREATE TABLE decided (
    kind TEXT,   -- step: the group is in a plan; stale: it is listed as stale
    entry INT,   -- index of the ledger entry
    seq INT, step INT, group_id INT,
    partition INT, offset INT, body BLOB  -- as planned
);
CREATE INDEX decided_by_group ON decided (group_id, kind);

CREATE VIEW later_samples AS  -- repeated samples, joined with the first record of the same sample
SELECT s.*, s.rowid AS number, f.offset AS first_offset, f.worker AS first_worker, f.timestamp_ms AS sent_ms, s.body = f.body AS copied,
    -- Resampled: generated after the first record was sent (its timestamp), according to the clocks.
    s.body != f.body AND s.started_ns >= (f.timestamp_ms + 1) * 1000000 AS resampled
FROM samples s JOIN samples f ON (f.group_id, f.partition, f.sample, f.kind) = (s.group_id, s.partition, s.sample, 'first')
WHERE s.kind = 'again';

CREATE TABLE measurements (worker TEXT, incarnation TEXT, seq INT, PRIMARY KEY (worker, incarnation, seq));

CREATE TABLE lifecycles (
    group_id INTEGER PRIMARY KEY,
    admitted INT,  -- true if the prompt is in the log or may have been deleted
    partition INT, offset INT, slot INT, min_version INT, samples INT, created_ns INT, prompt_hash BLOB,
    outcome_partition INT, outcome_offset INT, outcome TEXT, outcome_body BLOB, version_min INT, sample_count INT,
    outcome_deleted INT,  -- true if the outcome may have been deleted
    step INT,             -- step that was trained on the group
    stale INT             -- number of the first entry that lists the group as stale
);
"""
"""`lifecycles` has a row per group, joined from its first prompt, outcome, plan, and listing as stale."""

LIFECYCLES = """
WITH RECURSIVE
deleted (group_id) AS (SELECT 0 WHERE :deleted_below > 0 UNION ALL SELECT group_id + 1 FROM deleted WHERE group_id + 1 < :deleted_below),
numbers AS (
    SELECT group_id FROM prompts UNION SELECT group_id FROM outcomes UNION SELECT group_id FROM decided UNION SELECT group_id FROM deleted
)
INSERT INTO lifecycles SELECT
    numbers.group_id, p.slot IS NOT NULL OR numbers.group_id < :deleted_below,
    p.partition, p.offset, p.slot, p.min_version, p.samples, p.created_ns, p.prompt_hash,
    o.partition, o.offset, o.outcome, o.body, o.version_min, json_array_length(o.numbers),
    CASE
        WHEN t.step IS NOT NULL THEN t.offset < start_offset('groups', t.partition)  -- the plan names its offset
        WHEN p.slot IS NOT NULL THEN p.slot < slot_limit('groups', p.partition)
        ELSE :outcomes_deleted
    END,
    t.step, s.seq
FROM numbers
LEFT JOIN prompts p ON p.rowid = (SELECT min(rowid) FROM prompts WHERE group_id = numbers.group_id)
LEFT JOIN outcomes o ON o.rowid = (SELECT min(rowid) FROM outcomes WHERE group_id = numbers.group_id)
LEFT JOIN decided t ON t.rowid = (SELECT min(rowid) FROM decided WHERE group_id = numbers.group_id AND kind = 'step')
LEFT JOIN decided s ON s.rowid = (SELECT min(rowid) FROM decided WHERE group_id = numbers.group_id AND kind = 'stale')
ORDER BY 1
"""


def connect() -> sqlite3.Connection:
    tables = sqlite3.connect("", isolation_level=None)
    tables.executescript(f"PRAGMA journal_mode = OFF; PRAGMA cache_size = -{CACHE_KIB}; {SCHEMA}")
    tables.execute("BEGIN")
    return tables


@dataclass
class Facts:
    """All facts about one run. Lists are in the order of each partition."""

    run: str
    terms: Terms
    status: str | None
    """Status in the topic of all runs; None if the run is not registered."""
    records: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]] = ()
    """(configuration, info) of each record of the topic `run`."""
    changes: Sequence[Mapping[str, Any]] = ()
    """Changes of data and code while the run was stopped: name, digests and time of each."""
    counts: dict[str, int] = field(default_factory=dict)
    start_offsets: dict[tuple[str, int], int] = field(default_factory=dict)
    """Topic and partition -> first retained offset."""
    tables: sqlite3.Connection = field(default_factory=connect)
    """In-memory SQL tables with facts about groups and samples."""
    most_sequences: int = 1
    """Largest number of trained sequences of one sample (segments of a trajectory)."""
    entries: list[EntryFact] = field(default_factory=list)
    """Ledger entries; of repeated ones the first."""
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
    evaluations: dict[str, Measurement] = field(default_factory=dict)
    """SHA-256 of the payload -> evaluation."""
    workers: dict[tuple[str, str], WorkerFact] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)
    """Topic -> number of records identical to an earlier one."""

    def rows(self, query: str, *values: object, **named: object) -> Iterator[Any]:
        """Yield the rows of an SQL query, with `values` for its `?` or `named` for its `:name`."""
        return self.tables.execute(query, named or values)

    def value(self, query: str, *values: object, **named: object) -> Any:
        """Return the first column of the first row; None if there is no row."""
        return next(self.rows(query, *values, **named), (None,))[0]

    def complete(self) -> None:
        """Fill the table `lifecycles`. Call this after reading all records of groups."""
        limits = {
            partition: self._slot_limit(partition, table)
            for topic, table in (("rollouts", "samples"), ("groups", "outcomes"))
            for partition in self.truncated(topic)
        }
        self.tables.create_function("start_offset", 2, lambda *partition: self.start_offsets.get(partition, 0))
        self.tables.create_function("slot_limit", 2, lambda *partition: limits.get(partition, 0))
        sources = ("prompts", "outcomes", "decided WHERE kind = 'step'")
        last = max(self.value(f"SELECT coalesce(max(group_id), -1) FROM {source}") for source in sources)
        deleted_below = min(self.prompts_below, last + 1)
        self.tables.execute(LIFECYCLES, {"deleted_below": deleted_below, "outcomes_deleted": bool(self.truncated("groups"))})

    def _slot_limit(self, partition: tuple[str, int], table: str) -> int:
        """Return the first slot from which on nothing in a partition can have been deleted.

        With order `submission`, no group after the first retained one was trained when that record was written, so only a limited number of
        slots were admitted then. With order by arrival, any number of groups may have overtaken the first retained one.
        """
        first = f"SELECT slot FROM {table} t JOIN prompts p USING (group_id) WHERE t.partition = ? ORDER BY t.offset, p.rowid LIMIT 1"
        slot = self.value(first, partition[1])
        if slot is None or self.terms.order != "submission":
            return ANY
        return self.terms.round_groups * (slot // self.terms.round_groups + 1 + self.terms.max_lag)

    @cached_property
    def prompts_below(self) -> int:
        """First group whose prompt was certainly not deleted by retention."""
        first = "SELECT coalesce((SELECT group_id FROM prompts WHERE partition = ? ORDER BY offset LIMIT 1), ?)"
        return max((self.value(first, partition, ANY) for _, partition in self.truncated("prompts")), default=0)

    @cached_property
    def versions_below(self) -> int:
        """First version whose manifest was certainly not deleted by retention."""
        return min(self.first_manifests(), default=ANY) if self.start_offsets.get(("weights", 0)) else 0

    @property
    def closed(self) -> Entry | None:
        """Ledger entry that closed the run; None while the run is active."""
        return next((fact.entry for fact in self.entries if fact.entry.kind == "run-closed"), None)

    def deleted(self, where: RecordId) -> bool:
        """True if retention has deleted the record at this position."""
        return where.offset < self.start_offsets.get(where[:2], 0)

    def truncated(self, topic: str) -> list[tuple[str, int]]:
        """Return the partitions of a topic, as (topic, number), from which retention has deleted records."""
        return [partition for partition, start in self.start_offsets.items() if start and partition[0] == topic]

    def steps(self) -> list[EntryFact]:
        return [fact for fact in self.entries if fact.entry.kind == "step"]

    def first_manifests(self) -> dict[int, ManifestFact]:
        """Return version -> manifest: the last one with the digest of the first, because it replaces the others."""
        manifests: dict[int, ManifestFact] = {}
        for fact in self.manifests:
            if manifests.setdefault(fact.manifest.version, fact).manifest.digest == fact.manifest.digest:
                manifests[fact.manifest.version] = fact
        return manifests
