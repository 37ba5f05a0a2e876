"""Ledger of a run as a starting trainer reads it, and the groups of a recorded plan."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.infra.checkpoints import Recorded
from penstock.infra.errors import Unrecoverable
from penstock.infra.log import Log
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.topics import groups
from penstock.topics.groups import Group
from penstock.topics.ledger import Entry, Planned
from penstock.topics.runs import Status
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record

READ_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerHistory:
    """Ledger entries in order, all or from a checkpoint on, and the state of the run after them."""

    entries: Sequence[Entry]
    ledger_state: LedgerState
    first_step: int = 0
    """First step among the entries."""

    def __post_init__(self) -> None:
        """Raise `Unrecoverable` if a step is missing or committed twice."""
        for expected, entry in enumerate(self.steps, start=self.first_step):
            if entry.step != expected:
                advice = f"inspect it with `penstock audit {self.ledger_state.run}`"
                raise Unrecoverable(f"the ledger is damaged: entry {entry.seq} commits step {entry.step}, expected {expected}; {advice}")

    @property
    def steps(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == "step"]

    @property
    def steps_done(self) -> int:
        return self.first_step + len(self.steps)

    @property
    def stale(self) -> list[int]:
        return [group for entry in self.entries if entry.kind == "stale" for group in entry.groups]

    @property
    def trained(self) -> list[int]:
        return [planned.group for entry in self.steps for planned in entry.plan]

    @property
    def drops(self) -> int:
        """Number of groups dropped up to the last committed step."""
        return sum(int(entry.metrics["dropped"]) for entry in self.steps)

    @property
    def ended(self) -> Status:
        """The status with which the ledger closes the run: "failed" or "finished"."""
        closed = self.ledger_state.closed
        status = json.loads((closed.details if closed else None) or "{}").get("status")
        return "failed" if status == "failed" else "finished"

    def recorded(self) -> Recorded:
        """Steps, digests and versions in the ledger, with which checkpoints must agree."""
        digests: dict[int, set[str]] = {}
        for entry in self.entries:
            if entry.kind == "checkpoint" and entry.step is not None and entry.digest is not None:
                digests.setdefault(entry.step, set()).add(entry.digest)
        return Recorded(
            run=self.ledger_state.run,
            steps=self.steps_done,
            seq=self.ledger_state.last_seq,
            versions=self.ledger_state.manifests.keys(),
            digests=digests,
        )


def read_ledger_history(log: Log, run: str) -> LedgerHistory:
    """The ledger and the published versions so far. Raises `LogError`."""
    return ledger_history_of(RunReader(log, run))


def ledger_history_of(reader: RunReader) -> LedgerHistory:
    """The ledger and the published versions, from a reader that reads more of the run. Raises `LogError`."""
    ledger_state = LedgerState(reader.run)
    entries = [item for item in reader.history(ledger_state) if isinstance(item, Entry)]
    return LedgerHistory(entries=entries, ledger_state=ledger_state)


def read_planned(log: Log, run: str, plan: Sequence[Planned]) -> list[Group]:
    """Read the groups of a plan at their recorded offsets, in plan order. Raises `LogError`, or `Unrecoverable` for another group."""
    topic = f"{run}.groups"
    firsts = {}
    for partition in {planned.partition for planned in plan}:
        offsets = [planned.offset for planned in plan if planned.partition == partition]
        firsts.update({(partition, record.offset): record for record in log.read(topic, partition, offsets, timeout_s=READ_LIMIT_S)})
    members = []
    for planned in plan:
        source = f"{topic}/{planned.partition}/{planned.offset}"
        try:
            headers, group = groups.read(with_later_parts(log, run, firsts[planned.partition, planned.offset]), run=run)
        except Unusable as error:
            raise Unrecoverable(f"cannot read trained group {planned.group} from {source}: {error}; see `penstock audit {run}`") from error
        if (group.group, headers.sha256) != (planned.group, planned.sha256):
            actual, recorded = f"group {group.group} ({(headers.sha256 or '')[:16]}…)", f"group {planned.group} ({planned.sha256[:16]}…)"
            raise Unrecoverable(f"{source} contains {actual}, but the ledger records {recorded}; see `penstock audit {run}`")
        members.append(group)
    return members


def with_later_parts(log: Log, run: str, first: Record) -> list[Record]:
    """Return the records of all parts of a group from the first one: one transaction wrote them next to each other.

    Raises `Unusable` for invalid headers, `LogError` if a part cannot be read.
    """
    parts = groups.check(first, run=run).parts or 1
    later = range(first.offset + 1, first.offset + parts)
    return [first, *(log.read(first.topic, first.partition, later, timeout_s=READ_LIMIT_S) if later else ())]
