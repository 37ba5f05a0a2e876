"""Writes a re-scored run: the prompts and samples of a recorded one under a new id, with the new outcomes.

It is registered last, so that an interruption leaves no run.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Self

from penstock.infra.errors import LogError
from penstock.infra.log import Log, Producer, Transactions
from penstock.pipeline.config.load import Config, ConfigError, to_json
from penstock.pipeline.inspect.recorded_run import RecordedRun
from penstock.pipeline.replay.rescore.cases import SkippedGroup
from penstock.pipeline.replay.rescore.score import ScoredGroup
from penstock.pipeline.runtime.registration.run_key import make_key
from penstock.pipeline.runtime.registration.run_registry import find, write
from penstock.pipeline.runtime.topic_reader import Read
from penstock.pipeline.runtime.weights.publish import chunk_partitions, manifest_record, send_version
from penstock.pipeline.runtime.weights.read import fetch
from penstock.topics import groups, ledger, prompts, rollouts
from penstock.topics.catalogue import check_run_id, topics_of
from penstock.topics.groups import Group
from penstock.topics.ledger import Entry
from penstock.topics.runs import RunRecord
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Outgoing, Record

WORKER = "replay-score"
BATCH_BYTES = 8 << 20
"""Size of a transaction."""
WAIT_S = 60.0


@dataclass(slots=True, kw_only=True)
class NewRun:
    """A run being written; leaving the block without `finish` deletes its topics."""

    log: Log
    source: RecordedRun
    run: str
    config: Config
    origin: dict[str, Any]
    _producer: Producer
    _transactions: Transactions
    _waiting: list[Outgoing] = field(default_factory=list)
    _bytes: int = 0
    _written: int = 0
    _done: bool = False

    @classmethod
    def create(cls, log: Log, source: RecordedRun, run: str, config: Config, *, origin: dict[str, Any]) -> Self:
        """Create the topics of a new run. Raises `ConfigError` for an invalid or existing id."""
        try:
            check_run_id(run)
        except ValueError as error:
            raise ConfigError(f"--write {error}") from error
        if find(log, run) is not None or log.topics(f"{run}."):
            raise ConfigError(f"--write {run}: the run exists already, or its topics do; choose another id")
        count = log.partitions(f"{source.run}.prompts")
        if not count or 0 not in source.past.ledger_state.manifests:
            raise LogError(f"{source.run} cannot be copied: it has no topics, or its version 0 was never published")
        specs = topics_of(
            run,
            partitions=count,
            weight_partitions=config.weight_partitions,
            weight_segment_bytes=config.weight_segment_bytes,
            sample_segment_bytes=config.sample_segment_bytes,
        )
        log.create_topics(specs, copies=config.kafka.copies)
        return cls(
            log=log,
            source=source,
            run=run,
            config=config,
            origin=origin,
            _producer=log.producer(),
            _transactions=log.transactions(f"{run}.{WORKER}"),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._transactions.close()
            self._producer.close()
        finally:
            if not self._done:
                self.log.delete_topics(self.log.topics(f"{self.run}."))

    def add(self, result: ScoredGroup | SkippedGroup) -> None:
        """Write a group's outcome; a skipped group keeps the recorded one, if any."""
        group = result.group
        partition = result.partition if isinstance(result, SkippedGroup) else result.case.partition
        if group is None:
            return
        self._written += 1
        for headers, value in groups.encode_parts(_stamped(result, group), run=self.run, worker=WORKER):
            key = str(group.group).encode()
            self._waiting.append(
                Outgoing(topic=f"{self.run}.groups", partition=partition, key=key, headers=headers.encode(value), value=value)
            )
            self._bytes += len(value)
        if self._bytes >= BATCH_BYTES:
            self._commit()

    def finish(self, *, notify: Callable[[str], None]) -> RunRecord:
        """Copy prompts, samples and version 0, close the ledger, and register the run."""
        self._commit()
        notify(f"copying prompts and samples to {self.run}")
        reader = self.source.reader
        copied: tuple[tuple[str, Callable[..., Headers], Iterator[Read[Any]]], ...] = (
            ("prompts", prompts.check, reader.prompts()),
            ("rollouts", rollouts.check, reader.samples()),
        )
        for topic, check, reads in copied:
            # A record may hold several samples; it is copied once.
            for _, records in groupby((read.record for read in reads if read.payload is not None), key=lambda record: record.id):
                record = next(records)
                self._copy(record, check(record, run=reader.run), to=f"{self.run}.{topic}")
        self._producer.flush(WAIT_S)
        self._producer.check()
        created_ns = time.time_ns()
        info = {**json.loads(self.source.record.info if self.source.record else "{}"), "rescored_from": self.origin}
        self._write_ledger(info)
        text, now = json.dumps(info), time.time_ns()
        done = RunRecord(run=self.run, status="finished", config=to_json(self.config), info=text, created_ns=created_ns, updated_ns=now)
        make_key(self.run)
        write(self.log, done)
        self._done = True
        return done

    def _copy(self, record: Record, headers: Headers, *, to: str) -> None:
        named = replace(headers, run=self.run).encode(record.value)
        self._producer.send(Outgoing(topic=to, partition=record.partition, key=record.key, headers=named, value=record.value))

    def _write_ledger(self, info: dict[str, Any]) -> None:
        """A ledger without steps, and the weights of version 0."""
        ledger_state = self.source.past.ledger_state
        tensors = fetch(self.log, ledger_state.manifests, 0, run=self.source.run)
        manifest = send_version(
            self._producer,
            tensors,
            run=self.run,
            version=0,
            step=0,
            partitions=chunk_partitions(0, count=self.log.partitions(f"{self.run}.weights") or 0),
            max_bytes=self.config.weights.chunk_mib * 2**20,
            digest=lambda: ledger_state.manifests[0].digest,
        )
        opened = {
            **json.loads((ledger_state.opened and ledger_state.opened.details) or "{}"),
            "config": json.loads(to_json(self.config)),
            "info": info,
        }
        end = {"status": "finished", "reason": f"rescored from {self.source.run}: nothing was trained"}
        now = time.time_ns()
        entries = (
            Entry(seq=0, kind="run-opened", time_ns=now, details=json.dumps(opened)),
            Entry(seq=1, kind="version", time_ns=now, version=0, step=0, digest=manifest.digest, metrics={"bytes": float(manifest.nbytes)}),
            Entry(seq=2, kind="run-closed", time_ns=now, step=0, digest=manifest.digest, details=json.dumps(end)),
        )
        self._transactions.commit([manifest_record(manifest, run=self.run), *map(self._as_record, entries)])

    def _as_record(self, entry: Entry) -> Outgoing:
        value = ledger.encode(entry)
        headers = ledger.headers(entry, run=self.run).encode(value)
        return Outgoing(topic=f"{self.run}.ledger", partition=0, key=entry.kind.encode(), headers=headers, value=value)

    def _commit(self) -> None:
        if self._waiting:
            self._transactions.commit(self._waiting)
        self._waiting, self._bytes = [], 0


def _stamped(result: ScoredGroup | SkippedGroup, group: Group) -> Group:
    """The group with its time of scoring: now if it was never scored, else the recorded one, which keeps the order of arrival."""
    first_scored = isinstance(result, ScoredGroup) and result.case.before is None
    return replace(group, scored_ns=time.time_ns()) if first_scored else group
