"""What a run's log already says when its trainer starts.

The rule: the ledger decides; every counter of the schedule follows from it and from the groups, none from a checkpoint.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.infra.checkpoints.rules import Recorded
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
class Past:
    """The ledger's entries, in order, or those from a checkpoint on; and what they add up to with the published versions."""

    entries: Sequence[Entry]
    ledger_state: LedgerState
    first_step: int = 0
    """The first step among the entries: those before are not here."""

    def __post_init__(self) -> None:
        """Refuse a ledger in which a step is missing or stands twice."""
        for expected, entry in enumerate(self.steps, start=self.first_step):
            if entry.step != expected:
                raise Unrecoverable(f"entry {entry.seq} of the ledger commits step {entry.step} where step {expected} was expected")

    @property
    def steps(self) -> list[Entry]:
        """The committed steps, from `first_step` on."""
        return [entry for entry in self.entries if entry.kind == "step"]

    @property
    def steps_done(self) -> int:
        """Committed steps of the whole run."""
        return self.first_step + len(self.steps)

    @property
    def stale(self) -> list[int]:
        """Groups that were found too old."""
        return [group for entry in self.entries if entry.kind == "stale" for group in entry.groups]

    @property
    def trained(self) -> list[int]:
        """Groups of committed steps."""
        return [planned.group for entry in self.steps for planned in entry.plan]

    @property
    def drops(self) -> int:
        """Groups that had been dropped when the last step was committed."""
        return sum(int(entry.metrics["dropped"]) for entry in self.steps)

    @property
    def ended(self) -> Status:
        """How a closed run ended."""
        closed = self.ledger_state.closed
        status = json.loads((closed.details if closed else None) or "{}").get("status")
        return "failed" if status == "failed" else "finished"

    def recorded(self) -> Recorded:
        """What a checkpoint has to agree with."""
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


def read_past(log: Log, run: str) -> Past:
    """The ledger and the published versions so far. Raises `LogError`."""
    return past_of(RunReader(log, run))


def past_of(reader: RunReader) -> Past:
    """The same from a reader that reads more of the run. Raises `LogError`."""
    ledger_state = LedgerState(reader.run)
    entries = [said for said in reader.history(ledger_state) if isinstance(said, Entry)]
    return Past(entries=entries, ledger_state=ledger_state)


def read_planned(log: Log, run: str, plan: Sequence[Planned]) -> list[Group]:
    """The groups of a plan, in its order, from where it says they are. Raises `LogError`, `Unrecoverable` for other groups than planned."""
    topic = f"{run}.groups"
    firsts = {}
    for partition in {planned.partition for planned in plan}:
        offsets = [planned.offset for planned in plan if planned.partition == partition]
        firsts.update({(partition, record.offset): record for record in log.read(topic, partition, offsets, timeout_s=READ_LIMIT_S)})
    members = []
    for planned in plan:
        place = f"{topic}/{planned.partition}/{planned.offset}"
        try:
            headers, group = groups.read(with_later_parts(log, run, firsts[planned.partition, planned.offset]), run=run)
        except Unusable as error:
            raise Unrecoverable(f"group {planned.group}, which a step was trained on, cannot be read at {place}: {error}") from error
        if (group.group, headers.sha256) != (planned.group, planned.sha256):
            what = f"group {group.group} ({(headers.sha256 or '')[:16]}…)"
            raise Unrecoverable(f"{what} stands at {place}, the ledger says group {planned.group} ({planned.sha256[:16]}…)")
        members.append(group)
    return members


def with_later_parts(log: Log, run: str, first: Record) -> list[Record]:
    """The records of all parts of the group whose first part this is: one transaction wrote them, so they follow each other.

    Raises `Unusable`, `LogError`.
    """
    parts = groups.check(first, run=run).parts or 1
    later = range(first.offset + 1, first.offset + parts)
    return [first, *(log.read(first.topic, first.partition, later, timeout_s=READ_LIMIT_S) if later else ())]
