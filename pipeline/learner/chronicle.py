"""The trainer's pen: the run's one ordered story in `ledger`, and its versions in `weights`.

The rule: one fenced writer; a step is committed by one ledger record, a version by its manifest together with its ledger record.
"""

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.infra import faults
from penstock.infra.log import Transactions
from penstock.pipeline.learner.policy_trainer import Weights
from penstock.pipeline.runtime.ledger_follower import Story
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.weight_sync import manifest_record, send_chunks
from penstock.topics import ledger, weights
from penstock.topics.ledger import Entry
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Outgoing, Record

FOREIGN_READ_S = 5.0
"""How long at most a version waits while what others wrote between our own chunks is looked at."""


@dataclass(slots=True)
class Chronicle:
    """Writes entries with consecutive numbers and publishes versions."""

    session: Session
    transactions: Transactions
    story: Story
    weight_partitions: int
    """Those that carry chunks, numbered from 1."""
    _next_chunk: dict[int, int] = field(default_factory=dict)
    """Per chunk partition the offset after our last chunk: what lies between it and the next one is not ours."""
    _foreign: deque[tuple[int, int, int]] = field(default_factory=deque)
    """Partition, first offset and end of what is not ours and was not looked at."""

    def __post_init__(self) -> None:
        for manifest in self.story.manifests.values():  # what lies before them was looked at by whoever published them
            for partition, offset in zip(manifest.chunk_partitions, manifest.chunk_offsets, strict=True):
                self._next_chunk[partition] = max(self._next_chunk.get(partition, 0), offset + 1)

    def write(self, kind: ledger.EntryKind, *also: Outgoing, **fields: Any) -> Entry:
        """Commit one entry, and records that stand or fall with it."""
        session = self.session
        entry = Entry(seq=self.story.last_seq + 1, kind=kind, time_ns=time.time_ns(), **fields)
        with session.costs.encoding():
            value = ledger.encode(entry)
            headers = ledger.headers(entry, run=session.run).encode(value)
            record = Outgoing(topic=session.topic("ledger"), partition=0, key=kind.encode(), headers=headers, value=value)
        faults.reach(f"ledger.{kind}.before")
        self.transactions.commit([*also, record])
        faults.reach(f"ledger.{kind}.after")
        self.story.last_seq = entry.seq
        return entry

    def publish(self, found: Weights, *, version: int, step: int) -> str:
        """Send a version's chunks, then its manifest with the ledger's entry; returns the digest. A published version is left alone."""
        session, started = self.session, time.monotonic()
        known = self.story.manifests.get(version)
        if known is not None:
            return known.digest
        manifest = send_chunks(
            session.producer,
            found.tensors,
            digest=found.digest,
            run=session.run,
            version=version,
            step=step,
            partitions=self.weight_partitions,
            max_bytes=session.config.weights.chunk_mib * 2**20,
        )
        self._put_foreign_aside(manifest.chunk_partitions, manifest.chunk_offsets)
        metrics = {"bytes": float(manifest.nbytes), "publish_s": time.monotonic() - started}
        record = manifest_record(manifest, run=session.run)
        self.write("version", record, version=version, step=step, digest=manifest.digest, metrics=metrics)
        self.story.manifests[version] = manifest
        self.story.newest_version = max(version, self.story.newest_version)
        return manifest.digest

    def check_manifest(self, record: Record) -> None:
        """Look at a record of partition 0 of `weights`: ours, a repetition, or a dead letter."""
        try:
            with self.session.decoding(record):
                manifest = weights.read(record, run=self.session.run)[1]
        except Unusable as error:
            self.session.dead_letter(record, error)
            return
        if manifest.version not in self.story.manifests:
            self.session.dead_letter(record, Unusable(f"version {manifest.version} was not published", kind="mismatch"))
        elif manifest != self.story.manifests[manifest.version]:
            self.session.duplicate(f"manifest of version {manifest.version} at {record.topic}/{record.partition}/{record.offset}")

    def close(self, *, steps: int, digest: str | None, status: str, reason: str) -> None:
        """End the story."""
        ends = self.session.log.end_offsets([(self.session.topic("weights"), p) for p in range(1, self.weight_partitions + 1)])
        self._put_foreign_aside([p for _, p in ends], list(ends.values()))
        self.write("run-closed", step=steps, digest=digest, details=json.dumps({"status": status, "reason": reason}))

    def _put_foreign_aside(self, partitions: Sequence[int], offsets: Sequence[int]) -> None:
        """Dead-letter what lies between our own chunks and is no chunk; what is too much for once waits for the next version."""
        for partition, offset in sorted(zip(partitions, offsets, strict=True)):
            begin = self._next_chunk.get(partition, 0)
            self._next_chunk[partition] = offset + 1
            if begin < offset:
                self._foreign.append((partition, begin, offset))
        began = time.monotonic()
        while self._foreign and time.monotonic() - began < FOREIGN_READ_S:
            partition, begin, end = self._foreign.popleft()
            if (position := self._look_at(partition, begin, end, until=began + FOREIGN_READ_S)) < end:
                self._foreign.appendleft((partition, position, end))

    def _look_at(self, partition: int, begin: int, end: int, *, until: float) -> int:
        """Judge the records from `begin` on, a few at a time as each may be large; gives the offset of the next one to look at."""
        at = self.session.topic("weights"), partition
        tail = self.session.log.tail({at: begin})
        try:
            while (position := tail.position(at)) < end and time.monotonic() < until:
                for record in tail.poll(0.2, max_records=100):
                    if record.offset < end:
                        self._check_chunk(record)
            return position
        finally:
            tail.close()

    def _check_chunk(self, record: Record) -> None:
        try:
            with self.session.decoding(record):
                version = weights.read_chunk(record, run=self.session.run)[1].version
        except Unusable as error:
            self.session.dead_letter(record, error)
        else:  # a copy, or what an earlier trainer had sent when it died
            self.session.duplicate(f"chunk of version {version} at {record.topic}/{record.partition}/{record.offset}")
