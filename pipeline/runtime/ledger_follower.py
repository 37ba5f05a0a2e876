"""What every worker has to know of a run: the newest weights, what was trained, and whether it is closed.

The rule: ledger entries and versions are applied without gaps. A record seen before changes nothing and one beyond a gap is refused, so
that readers agree whatever a broker repeats or a foreign client writes.
"""

from dataclasses import dataclass, field

from penstock.infra.log import Log, Tail
from penstock.topics import ledger, weights
from penstock.topics.ledger import Entry
from penstock.topics.weights import Manifest
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record


@dataclass(slots=True)
class LedgerState:
    """What the run's ledger entries and weight manifests add up to."""

    run: str
    manifests: dict[int, Manifest] = field(default_factory=dict)
    newest_version: int = -1
    steps: int = 0
    """Committed optimizer steps."""
    stale: set[int] = field(default_factory=set)
    closed: Entry | None = None
    opened: Entry | None = None
    last_seq: int = -1

    def apply(self, record: Record) -> Entry | Manifest | None:
        """Apply a record of `ledger` or of partition 0 of `weights`; None when it was applied before. Raises `Unusable`."""
        if record.topic == f"{self.run}.ledger":
            return self._apply_entry(ledger.read(record, run=self.run)[1])
        if record.topic == f"{self.run}.weights" and record.partition == 0:
            return self._apply_manifest(weights.read(record, run=self.run)[1])
        return None

    def _apply_entry(self, entry: Entry) -> Entry | None:
        if not ledger.continues(entry, after=self.last_seq):
            return None
        self.last_seq = entry.seq
        match entry.kind:
            case "run-opened":
                self.opened = entry
            case "step":
                self.steps = max(self.steps, (entry.step or 0) + 1)
            case "stale":
                self.stale.update(entry.groups)
            case "run-closed":
                self.closed = entry
        return entry

    def _apply_manifest(self, manifest: Manifest) -> Manifest | None:
        if manifest.version in self.manifests:
            return None
        if manifest.version != self.newest_version + 1:
            raise Unusable(f"version {manifest.version} follows version {self.newest_version}: it was not published", kind="mismatch")
        self.add(manifest)
        return manifest

    def add(self, manifest: Manifest) -> None:
        """Count a version as published."""
        self.manifests[manifest.version] = manifest
        self.newest_version = max(manifest.version, self.newest_version)


class LedgerFollower:
    """Keeps a `LedgerState` up to date for a worker that reads nothing else from `ledger` and `weights`.

    Records it cannot use are left to the role that owns reading the topic.
    """

    def __init__(self, log: Log, run: str, state: LedgerState | None = None) -> None:
        self.state = state or LedgerState(run)
        self._tail: Tail = log.tail({(f"{run}.ledger", 0): "earliest", (f"{run}.weights", 0): "earliest"})

    def poll(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for new records and apply them."""
        for record in self._tail.poll(timeout_s):
            self._apply(record)

    def catch_up(self, timeout_s: float = 60.0) -> None:
        """Apply every record that is there now."""
        for record in self._tail.read_to_end(timeout_s):
            self._apply(record)

    def close(self) -> None:
        """Close the reader."""
        self._tail.close()

    def _apply(self, record: Record) -> None:
        try:
            self.state.apply(record)
        except Unusable:
            return
