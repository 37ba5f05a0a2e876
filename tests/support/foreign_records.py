"""What a foreign client writes into a run's topics, and what became of it."""

import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from penstock.infra.log import Producer
from penstock.topics import dead_letters
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Outgoing, Record
from tests.support.worker_set import WorkerSet, records_of

SCHEMAS = {"prompts": "prompts", "rollouts": "rollouts", "groups": "groups", "weights": "weights", "ledger": "ledger", "metrics": "metrics"}
OWNED = [("prompts", 1), ("rollouts", 2), ("groups", 3), ("weights", 0), ("weights", 1), ("ledger", 0), ("metrics", 0)]


def headers(run: str, topic: str, value: bytes, *, version: int = 1) -> list[tuple[str, bytes]]:
    """All headers that any topic asks for, and the checksum that fits, so that only the one thing under test is wrong."""
    schema = "weights-chunk" if topic == "weights/1" else SCHEMAS.get(topic.split("/", maxsplit=1)[0], topic)
    numbers = {"group": 900, "sample": 0, "policy-version-min": 0, "policy-version-max": 0, "part": 0, "parts": 1}
    texts = {"run": run, "schema": f"{schema}/{version}", "outcome": "scored", "worker": "mallory", "sha256": "0" * 64}
    found = [(name, str(fact).encode()) for name, fact in {**texts, **numbers}.items()]
    lines = b"".join(b"\n" + name.encode() + b"=" + text for name, text in found)
    return [*found, ("crc32", b"%08x" % zlib.crc32(value + lines))]


def bad_records(run: str, topic: str) -> dict[str, tuple[list[tuple[str, bytes]], bytes]]:
    """What is wrong -> headers and value."""
    noise, zeros = bytes(range(256)) * 3, bytes(5 << 20)
    return {
        "random bytes": (headers(run, topic, noise), noise),
        "another schema version": (headers(run, topic, b"x", version=0), b"x"),
        "no headers": ([], b"hello"),
        "another run": (headers("somebody-else", topic, b"x"), b"x"),
        "5 MB of zeros": (headers(run, topic, zeros), zeros),
        "no checksum": (headers(run, topic, noise)[:-1], noise),
        "another's checksum": (headers(run, topic, noise), noise[:-1]),
    }


def write(
    foreign: Producer, topic: str, value: Any, *, partition: int, key: bytes | None = None, headers: Sequence[tuple[str, bytes]] = ()
) -> None:
    """Write a record, whatever is in it."""
    foreign.send(Outgoing(topic=topic, partition=partition, key=key, headers=tuple(headers), value=value))


def repeat(worker_set: WorkerSet, foreign: Producer, run: str, topic: str) -> None:
    """Write one of the run's own records a second time, exactly as it is."""
    own = next(record for record in records_of(worker_set.log, f"{run}.{topic}") if is_own(record, run))
    write(foreign, own.topic, own.value, key=own.key, partition=own.partition, headers=own.headers)


def is_own(record: Record, run: str) -> bool:
    """Whether one of the run's workers wrote it, and not the stranger; of `weights` only manifests count."""
    names = dict(record.headers)
    written_by_us = names.get("run") == run.encode() and names.get("worker") != b"mallory"
    return written_by_us and not (record.topic == f"{run}.weights" and record.partition)


def letters(worker_set: WorkerSet, run: str) -> list[dead_letters.DeadLetter]:
    """The readable dead letters of a run."""
    readable = []
    for record in records_of(worker_set.log, f"{run}.dead-letters"):
        with suppress(Unusable):  # what somebody else wrote there
            readable.append(dead_letters.read(record, run=run)[1])
    return readable
