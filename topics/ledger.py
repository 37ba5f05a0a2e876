"""`ledger`: the run's events in one order, written by the trainer alone and read by every worker.

An event has happened only if its entry is committed; a step has exactly one. Each entry has the digest of the one before, so that the
digest of the last one, the head, commits to all."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from penstock.topics.wire.checked import json_object, require_whole
from penstock.topics.wire.codec import Codec, Format
from penstock.topics.wire.columns import Payload, Row, as_row
from penstock.topics.wire.errors import Unusable, require
from penstock.topics.wire.fields import fields_of
from penstock.topics.wire.secrets import without_passwords

SCHEMA = "ledger/1"
ALL_DONE = "all steps done"
"""Reason in the last entry of a run that has completed all its steps."""
EntryKind = Literal["run-opened", "step", "stale", "version", "checkpoint", "rebased", "run-closed"]
ENTRY_KINDS: tuple[EntryKind, ...] = get_args(EntryKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One group of a step's plan: its digest identifies the trained record; partition and offset are where a reader looks first."""

    group: int
    sha256: str
    """Digest of the group's record, as in its header."""
    partition: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One event of the run; fields that its kind does not use are `None` or empty."""

    seq: int
    """Index in the ledger, from 0."""
    kind: EntryKind
    """`run-opened`, `step`, `stale`, `version`, `checkpoint`, `rebased` or `run-closed`."""
    time_ns: int
    step: int | None = None
    """Index of a step, from 0; of another entry the number of steps before it."""
    version: int | None = None
    """The learner's version at a step; the version that is published or checkpointed."""
    plan: tuple[Planned, ...] = ()
    """The groups of a step, in the order in which they were trained."""
    boundaries: tuple[int, ...] = ()
    """Number of samples, in plan order, at which each micro-batch ends."""
    groups: tuple[int, ...] = ()
    """Groups dropped as stale."""
    loss_bits: int | None = None
    """Bits of the loss as an IEEE-754 double, read as int64."""
    grad_norm_bits: int | None = None
    """Bits of the gradient norm as an IEEE-754 double, read as int64."""
    digest: str | None = None
    """Hex digest of the weights; of a `step` only for small models."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Figures of a step by name."""
    details: str | None = None
    """JSON: configuration, arithmetic fingerprint, reason, status; for a rebase, results of the repeated steps and the recorded ones; of a
    step and the end, evaluations read since the step before (SHA-256 of the payload -> version); SHA-256 of a checkpoint's manifest."""
    previous: str | None = None
    """Hex SHA-256 of the payload of the entry before; null in the first entry and in those of earlier releases."""


CODEC = Codec(SCHEMA, fields=fields_of(Entry))


def digest(value: Payload) -> str:
    """Return the SHA-256 (hex) of an entry's payload, which the next entry contains as `previous`."""
    return hashlib.sha256(value).hexdigest()


def evaluations(entry: Entry) -> dict[str, int]:
    """Return SHA-256 of the payload -> evaluated version, of the evaluations that an entry commits to."""
    listed = json.loads(entry.details or "{}").get("evaluations")
    return {sha256: version for sha256, version in listed.items() if type(version) is int} if isinstance(listed, dict) else {}


def decode(value: Payload) -> Entry:
    """Return the entry in a payload. Raises `Unusable`."""
    (row,) = CODEC.decode(value)
    require(row["kind"] in ENTRY_KINDS, f"kind is {row['kind'][:60]!r}, expected one of {', '.join(ENTRY_KINDS)}")
    require_whole(row, "seq", "time_ns", "step", "version")
    for planned in row["plan"]:
        require_whole(planned, "group", "partition")
        require_whole(planned, "offset", least=-1)  # -1: not in the archive that was imported
    numbers = (*row["boundaries"], *row["groups"])
    require(min(numbers, default=0) >= 0, f"boundaries or groups have {min(numbers, default=0)}, which is below 0")
    if row["details"]:
        json_object(row["details"], "details")
    if row["kind"] == "run-opened" and row["details"]:
        row["details"] = without_passwords(row["details"])
    return Entry(**{**row, "plan": tuple(Planned(**planned) for planned in row["plan"])})


def _columns(entry: Entry) -> Row:
    return {**as_row(entry), "plan": [as_row(planned) for planned in entry.plan]}


def _facts(entry: Entry) -> dict[str, Any]:
    return {"outcome": entry.kind, "policy_version_min": entry.version, "policy_version_max": entry.version}


def continues(entry: Entry, *, after: int) -> bool:
    """Return True if `entry` is the next one after entry number `after` (-1: none yet), False if it repeats an earlier one.

    Raises `Unusable(kind="mismatch")` for an entry after a gap: accepted, it would make the missing entries look like repeats.
    """
    if entry.seq > after + 1:
        raise Unusable(f"ledger entry {entry.seq} follows entry {after}, expected {after + 1}: entries are missing", kind="mismatch")
    return entry.seq == after + 1


_FORMAT = Format(CODEC, decode, _facts, ("outcome",), ENTRY_KINDS, _columns)
encode, headers, outgoing, check, read = _FORMAT.encode, _FORMAT.headers, _FORMAT.outgoing, _FORMAT.check, _FORMAT.read
