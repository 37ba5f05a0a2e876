"""The trainer's pen: the run's one ordered story in `ledger`, and its versions in `weights`.

The rule: one fenced writer; a step is committed by one ledger record, a version by its manifest together with its ledger record.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from infra.log import Transactions
from infra.tensors import TensorBytes
from pipeline.control import Story
from pipeline.session import Session
from pipeline.weights import manifest_record, send_chunks
from topics import ledger, weights
from topics.errors import Unusable
from topics.ledger import Entry
from topics.record import Outgoing, Record

FOREIGN_READ_LIMIT = 1000
"""Records between our own chunks that are looked at one by one, per version."""


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

    def write(self, kind: ledger.EntryKind, *also: Outgoing, **fields: Any) -> Entry:
        """Commit one entry, and records that stand or fall with it."""
        session = self.session
        entry = Entry(seq=self.story.last_seq + 1, kind=kind, time_ns=time.time_ns(), **fields)
        with session.costs.encoding():
            record = Outgoing(
                topic=session.topic("ledger"),
                partition=0,
                key=kind.encode(),
                headers=ledger.headers(entry, run=session.run).encode(),
                value=ledger.encode(entry),
            )
        self.transactions.commit([*also, record])
        self.story.last_seq = entry.seq
        return entry

    def publish(self, tensors: Sequence[TensorBytes], *, version: int, step: int) -> str:
        """Send a version's chunks, then its manifest with the ledger's entry; returns the digest. A published version is left alone."""
        session, started = self.session, time.monotonic()
        known = self.story.manifests.get(version)
        if known is not None:
            return known.digest
        manifest = send_chunks(
            session.producer,
            tensors,
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
            manifest = weights.read(record, run=self.session.run)[1]
        except Unusable as error:
            self.session.dead_letter(record, error)
            return
        if manifest != self.story.manifests.get(manifest.version):
            self.session.duplicate(f"manifest of version {manifest.version} at {record.topic}/{record.partition}/{record.offset}")

    def close(self, *, steps: int, digest: str | None, status: str, reason: str, unused: int) -> None:
        """End the story."""
        ends = self.session.log.end_offsets([(self.session.topic("weights"), p) for p in range(1, self.weight_partitions + 1)])
        self._put_foreign_aside([p for _, p in ends], list(ends.values()))
        self.write("run-closed", step=steps, digest=digest, details=json.dumps({"status": status, "reason": reason, "unused": unused}))

    def _put_foreign_aside(self, partitions: Sequence[int], offsets: Sequence[int]) -> None:
        """Dead-letter what lies between our own chunks and is no chunk."""
        topic = self.session.topic("weights")
        for partition, offset in sorted(zip(partitions, offsets, strict=True)):
            between = range(self._next_chunk.get(partition, 0), offset)
            self._next_chunk[partition] = offset + 1
            for record in self.session.log.read(topic, partition, list(between[:FOREIGN_READ_LIMIT])) if between else ():
                try:
                    version = weights.read_chunk(record, run=self.session.run)[1].version
                except Unusable as error:
                    self.session.dead_letter(record, error)
                else:  # a copy, or what an earlier trainer had sent when it died
                    self.session.duplicate(f"chunk of version {version} at {record.topic}/{record.partition}/{record.offset}")
