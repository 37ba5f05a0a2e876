"""Thousands of damaged records in all topics of a run while it goes on: each is accounted for, and the run is what it would have been."""

import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from penstock.infra.kafka.log import KafkaLog
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.wire.record import Record, RecordId
from tests.support.bare_clients import c_client
from tests.support.foreign_records import letters
from tests.support.mutations import DAMAGE, HARMLESS
from tests.support.worker_set import WorkerSet, complete, config_of, same_run

MUTATIONS = DAMAGE | HARMLESS
TOPICS = ("prompts", "rollouts", "groups", "weights", "ledger", "metrics", "dead-letters")
ROLES = ("trainer", "rollout", "feeder", "tracker")
"""With them a run begins; it waits for a scorer."""
SORTS = len(TOPICS) + 2
"""Of records: chunks are not manifests, and there is the register of runs."""


class Mallory:
    """Follows a run and writes damaged copies of its records beside them, by a client that is not ours."""

    def __init__(self, broker: str, run: str, *, wanted: int) -> None:
        self.run, self.wanted = run, wanted
        self.sent: dict[RecordId, str] = {}
        """Where each damaged record stands, and what was done to it."""
        self._rng = random.Random(f"{wanted}")
        self._kinds: Iterator[str] = iter(())
        self._log = KafkaLog(broker, client_id="mallory")
        self._producer = Producer({**c_client(broker), "message.max.bytes": 16 << 20, "linger.ms": 1})
        names = [RUNS_TOPIC, *(f"{run}.{topic}" for topic in TOPICS)]
        self._tail = self._log.tail({(name, p): "earliest" for name in names for p in range(self._log.partitions(name) or 0)})
        self._known: dict[tuple[str, int], list[Record]] = {}
        """Genuine records by sort."""
        self._spoiled: Counter[tuple[str, int]] = Counter()
        self._share = math.ceil(wanted / SORTS)

    def work(self) -> None:
        """Spoil what came since the last time, each record many times over, and some that came before."""
        new = [record for record in self._tail.read_to_end(30.0) if self._genuine(record)]
        for record in new:
            self._known.setdefault(_sort(record), []).append(record)
        open_sorts = [sort for sort in self._known if self._spoiled[sort] < self._share]
        again = [self._rng.choice(self._known[self._rng.choice(open_sorts)]) for _ in range(self.wanted // 6 if open_sorts else 0)]
        for record in [*(record for record in new for _ in range(8)), *again]:
            if self._spoiled[_sort(record)] < self._share:
                self._spoil(record)
        assert self._producer.flush(30) == 0

    def close(self) -> None:
        self._tail.close()
        self._log.close()
        del self._producer  # ends its threads before the broker goes

    def _genuine(self, record: Record) -> bool:
        ours = record.topic != RUNS_TOPIC or record.key == self.run.encode()
        return ours and (record.topic, record.partition, record.offset) not in self.sent

    def _spoil(self, record: Record) -> None:
        sort = _sort(record)
        self._spoiled[sort] += 1
        kind = next(self._kinds, None)
        if kind is None:
            self._kinds = iter(self._rng.sample(sorted(MUTATIONS), len(MUTATIONS)))
            kind = next(self._kinds)
        other = self._rng.choice(self._known[sort])
        alone = (other.headers, other.value) == (record.headers, record.value)
        if (alone and kind in ("headers of another", "payload of another")) or (record.topic == RUNS_TOPIC and kind == "another key"):
            kind = "payload bits"
        spoiled = MUTATIONS[kind](record, other, self._rng)
        place = {"key": spoiled.key, "partition": record.partition, "headers": list(spoiled.headers)}
        delivered = lambda error, message, kind=kind: self._delivered(error, message, kind)  # noqa: E731
        self._producer.produce(record.topic, spoiled.value, on_delivery=delivered, **place)
        self._producer.poll(0)

    def _delivered(self, error: Any, message: Any, kind: str) -> None:
        assert error is None, error
        self.sent[RecordId(message.topic(), message.partition(), message.offset())] = kind


def _sort(record: Record) -> tuple[str, int]:
    """What kind of record it is: manifests and chunks share a topic."""
    return record.topic, min(record.partition, 1) if record.topic.endswith(".weights") else 0


def disturbed(worker_set: WorkerSet, mallory: Mallory, *, steps: int) -> None:
    """Spoil records, most of them before there is a scorer; no more in the run's last steps: whoever reads a topic has to pass them."""
    while len(mallory.sent) < 0.6 * mallory.wanted:
        mallory.work()
        assert not worker_set.failures, worker_set.failures
    worker_set.start("scorer")
    looked, done = time.monotonic(), 0
    while len(mallory.sent) < mallory.wanted and done < steps - 2:
        mallory.work()
        if time.monotonic() - looked > 1.0:
            looked, done = time.monotonic(), worker_set.report()["steps"]
        assert not worker_set.failures, worker_set.failures
    mallory.close()
    worker_set.wait()


def account(worker_set: WorkerSet, mallory: Mallory) -> Counter[tuple[str, str]]:
    """What was done to a record, what became of it -> how often. Every damaged one must be a dead letter, and no other."""
    found = {(letter.topic, letter.partition, letter.offset): letter for letter in letters(worker_set, worker_set.run)}
    assert not found.keys() - mallory.sent.keys(), "a genuine record was put aside"
    table = Counter[tuple[str, str]]()
    for place, kind in mallory.sent.items():
        fate = found[place].kind if place in found else "duplicate" if kind in HARMLESS else "nobody's"
        if place[0].endswith(".dead-letters") and fate == "nobody's":
            fate = "passed over"  # a letter nobody can read is not put aside once more
        table[kind, fate] += 1
        assert fate != "nobody's", f"{kind} at {place}: {table}"
        assert (fate in ("duplicate", "passed over")) or kind in DAMAGE, f"{kind} at {place} is a dead letter: {found[place].reason}"
    return table


def show(table: Counter[tuple[str, str]]) -> None:
    for kind in sorted({kind for kind, _ in table}):
        print(f"{kind:20} " + "  ".join(f"{count} {fate}" for (one, fate), count in sorted(table.items()) if one == kind))


@pytest.mark.slow
def test_fifteen_hundred_damaged_records_change_nothing_and_each_is_accounted_for(broker, run_id, tiny_model, tmp_path: Path, capsys):
    steps = 12
    config = config_of(tiny_model, tmp_path, run={"steps": steps, "seed": 7}, rollout={"workers": 1})
    plain = complete(broker, f"{run_id}-plain", config)
    capsys.readouterr()
    run = f"{run_id}-dirty"
    with WorkerSet(broker, run) as worker_set:
        worker_set.create(config)
        mallory = Mallory(broker, run, wanted=1500)
        for role in ROLES:
            worker_set.start(role)
        disturbed(worker_set, mallory, steps=steps)
        report = worker_set.report()
        assert report["status"] == "finished"
        same_run(report, plain)
        table = account(worker_set, mallory)
    assert len(mallory.sent) >= 1500
    assert {topic for topic, _, _ in mallory.sent} == {RUNS_TOPIC, *(f"{run}.{topic}" for topic in TOPICS)}
    said = capsys.readouterr().out.splitlines()
    assert len([line for line in said if "dead letter" in line or "duplicate" in line]) < 300
    assert any(" more: " in line for line in said)
    show(table)
