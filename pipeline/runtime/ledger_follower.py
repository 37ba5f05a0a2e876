"""The ledger state that every worker follows: the newest weights, the trained steps, and the end of the run.

Entries and versions are applied without gaps. Of the manifests of one version with one digest the last is used, whose chunks replace lost
ones. Any other repetition changes nothing and a record beyond a gap is refused, so that all readers agree.
"""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.infra.log import Log, Partition, Start, Tail, read_to_current_end
from penstock.topics import ledger, weights
from penstock.topics.ledger import Entry
from penstock.topics.weights import Manifest
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record


@dataclass(slots=True)
class LedgerState:
    """State that follows from the run's ledger entries and weight manifests."""

    run: str
    newest_only: bool = False
    """Retain, in addition to version 0, only the manifests from the last but one anchor on."""
    manifests: dict[int, Manifest] = field(default_factory=dict)
    newest_version: int = -1
    steps: int = 0
    """Number of committed optimizer steps."""
    ess: float | None = None
    """Effective sample size of the newest step; None for one that trained nothing."""
    stale: set[int] = field(default_factory=set)
    closed: Entry | None = None
    opened: Entry | None = None
    last_seq: int = -1
    head: str | None = None
    """Digest of the newest entry's payload; None before the first one."""
    chunk_ends: dict[int, int] = field(default_factory=dict)
    """Partition of `weights` -> offset after the newest chunk that a manifest lists."""
    _anchor: int = 0
    """The newest anchor version."""

    @property
    def end(self) -> dict[str, Any]:
        """Digest of the newest entry and number of entries, by which two readers can compare the ledger up to here."""
        return {"head": self.head, "entries": self.last_seq + 1}

    def apply(self, record: Record) -> Entry | Manifest | None:
        """Apply a record of `ledger` or of partition 0 of `weights`; None if it was applied before. Raises `Unusable`."""
        if record.topic == f"{self.run}.ledger":
            entry = self.take(ledger.read(record, run=self.run)[1])
            if entry is not None:
                self.head = ledger.digest(record.value)
            return entry
        if record.topic == f"{self.run}.weights" and record.partition == 0:
            return self.take(weights.read(record, run=self.run)[1])
        return None

    def apply_usable(self, records: Iterable[Record]) -> None:
        """Apply records without the unusable ones, which are left to the role that owns reading their topic."""
        for record in records:
            with contextlib.suppress(Unusable):
                self.apply(record)

    def take(self, item: Entry | Manifest) -> Entry | Manifest | None:
        """Apply an entry or manifest; None if it was applied before. Raises `Unusable`."""
        return self._apply_entry(item) if isinstance(item, Entry) else self._apply_manifest(item)

    def _apply_entry(self, entry: Entry) -> Entry | None:
        """Apply a ledger entry; None if it was applied before. Raises `Unusable` after a gap."""
        if not ledger.continues(entry, after=self.last_seq):
            return None
        self.last_seq = entry.seq
        match entry.kind:
            case "run-opened":
                self.opened = entry
            case "step":
                self.steps = max(self.steps, (entry.step or 0) + 1)
                self.ess = entry.metrics.get("ess")
            case "stale":
                self.stale.update(entry.groups)
            case "run-closed":
                self.closed = entry
        return entry

    def _apply_manifest(self, manifest: Manifest) -> Manifest | None:
        """Apply a manifest; None if it was applied before. Raises `Unusable` after a gap."""
        if manifest.version <= self.newest_version:
            previous = self.manifests.get(manifest.version)
            if previous is None or previous == manifest or previous.digest != manifest.digest:
                return None
        elif manifest.version != self.newest_version + 1:
            raise Unusable(f"weight version {manifest.version} follows {self.newest_version}: versions are missing", kind="mismatch")
        self.add(manifest)
        return manifest

    def add(self, manifest: Manifest) -> None:
        """Count a version as published, or update the offsets of its chunks after they were sent again."""
        for partition, offset in zip(manifest.chunk_partitions, manifest.chunk_offsets, strict=True):
            self.chunk_ends[partition] = max(self.chunk_ends.get(partition, 0), offset + 1)
        if (origin := self.manifests.get(0)) is not None and (manifest.names, manifest.shapes) == (origin.names, origin.shapes):
            dtypes = origin.dtypes if manifest.dtypes == origin.dtypes else manifest.dtypes  # all versions share the tuples
            manifest = replace(manifest, names=origin.names, dtypes=dtypes, shapes=origin.shapes)
        self.manifests[manifest.version] = manifest
        self.newest_version = max(manifest.version, self.newest_version)
        if self.newest_only and manifest.begins_chain:
            for version in [version for version in self.manifests if 0 < version < self._anchor]:
                del self.manifests[version]
            self._anchor = max(manifest.version, self._anchor)


class LedgerFollower:
    """Keeps a `LedgerState` up to date for a worker that reads nothing else from `ledger` and `weights`."""

    def __init__(self, log: Log, run: str, state: LedgerState | None = None, starts: Mapping[Partition, Start] | None = None) -> None:
        """Follow from `starts`, by default the beginning; `state` includes the records before.

        Without a `state` only the newest manifests are retained.
        """
        self.state, self._log = state or LedgerState(run, newest_only=True), log
        self._tail: Tail = log.tail(starts or {(f"{run}.ledger", 0): "earliest", (f"{run}.weights", 0): "earliest"})

    def poll(self, timeout_s: float) -> None:
        """Apply new records, waiting up to `timeout_s` for the first."""
        self.state.apply_usable(self._tail.poll(timeout_s))

    def catch_up(self) -> None:
        """Apply every record up to the current end offsets. Raises `LogError` if none arrives although there are more."""
        self.state.apply_usable(read_to_current_end(self._log, self._tail))

    def close(self) -> None:
        self._tail.close()
