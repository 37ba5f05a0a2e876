"""Facts about groups and their packed tables: prompts, outcomes and plans."""

from typing import NamedTuple

from penstock.pipeline.inspect.audit.store.tables import Interned, Table
from penstock.topics.wire.record import RecordId


class PromptFact(NamedTuple):
    """An admitted prompt."""

    where: RecordId
    group: int
    slot: int
    min_version: int
    samples: int
    created_ns: int
    prompt_hash: bytes
    """Hash of the fields that the group's outcome has to repeat."""
    body: bytes
    """Hash of the payload."""


class OutcomeSamples(NamedTuple):
    """The numbers of the samples that an outcome holds."""

    numbers: tuple[int, ...]
    absent: tuple[int, ...] = ()
    """Those missing in the partition of the group's prompt."""
    differing: tuple[int, ...] = ()
    """Those that differ from their first record there."""


class OutcomeFact(NamedTuple):
    """A group in `groups`, all parts joined."""

    where: RecordId
    """Topic, partition and offset of its first part."""
    group: int
    outcome: str
    prompt_hash: bytes
    body: bytes
    """SHA-256 recomputed over the payloads of all parts."""
    samples: OutcomeSamples
    version_min: int | None
    """Oldest version that generated a trained token of any sample."""

    @property
    def sha256(self) -> str:
        """The recomputed SHA-256 in hex."""
        return self.body.hex()


class PlannedFact(NamedTuple):
    """A group in the plan of a step."""

    where: RecordId
    """Record that the plan names."""
    group: int
    step: int
    body: bytes
    """SHA-256 in the plan."""

    @property
    def sha256(self) -> str:
        """The plan's SHA-256 in hex."""
        return self.body.hex()


def prompts_table() -> Table[PromptFact]:
    """An empty table of prompts."""
    return Table(
        dict.fromkeys(("offset", "group", "slot", "min_version", "samples", "created_ns"), "q")
        | {"partition": "H", "prompt_hash": "8s", "body": "8s"},
        lambda fact: (fact.where.offset, *fact[1:6], fact.where.partition, *fact[6:]),
        lambda offset, group, slot, version, samples, created_ns, partition, *hashes: PromptFact(
            RecordId("prompts", partition, offset), group, slot, version, samples, created_ns, *hashes
        ),
    )


def outcomes_table() -> Table[OutcomeFact]:
    """An empty table of outcomes."""
    names = Interned()

    def pack(fact: OutcomeFact) -> tuple[object, ...]:
        version = -1 if fact.version_min is None else fact.version_min
        status_number = names.number((fact.outcome, fact.samples))
        return fact.where.offset, fact.group, version, fact.where.partition, status_number, fact.prompt_hash, fact.body

    def unpack(offset: int, group: int, version: int, partition: int, status_number: int, prompt_hash: bytes, body: bytes) -> OutcomeFact:
        outcome, samples = names.values[status_number]
        where = RecordId("groups", partition, offset)
        return OutcomeFact(where, group, outcome, prompt_hash, body, samples, None if version < 0 else version)

    columns = {"offset": "q", "group": "q", "version": "q", "partition": "H", "status_number": "I", "prompt_hash": "8s", "body": "32s"}
    return Table(columns, pack, unpack)


def planned_table() -> Table[PlannedFact]:
    """An empty table of trained groups."""
    return Table(
        {"partition": "q", "offset": "q", "group": "q", "step": "q", "body": "32s"},
        lambda fact: (*fact.where[1:], *fact[1:]),
        lambda partition, offset, *rest: PlannedFact(RecordId("groups", partition, offset), *rest),
    )
