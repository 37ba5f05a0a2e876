"""Records that a foreign client writes into a run's topics: each ends in dead-letters with its reason or is ignored as a duplicate."""

import zlib
from contextlib import suppress
from pathlib import Path

from confluent_kafka import Producer

from penstock.pipeline.launch.create import create
from penstock.topics import dead_letters
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from tests.support.crew import Crew, complete, config_of

SCHEMAS = {"prompts": "prompts", "rollouts": "rollouts", "groups": "groups", "weights": "weights", "ledger": "ledger", "metrics": "metrics"}
OWNED = [("prompts", 1), ("rollouts", 2), ("groups", 3), ("weights", 0), ("weights", 1), ("ledger", 0), ("metrics", 0)]
ROLES = (("trainer", 0), ("rollout", 0), ("rollout", 1), ("scorer", 0), ("feeder", 0), ("tracker", 0))


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
        "another schema version": (headers(run, topic, b"x", version=99), b"x"),
        "no headers": ([], b"hello"),
        "another run": (headers("somebody-else", topic, b"x"), b"x"),
        "5 MB of zeros": (headers(run, topic, zeros), zeros),
        "no checksum": (headers(run, topic, noise)[:-1], noise),
        "another's checksum": (headers(run, topic, noise), noise[:-1]),
    }


def test_foreign_records_in_every_topic_are_put_aside_and_the_run_is_what_it_was(broker, run_id, tiny_model, tmp_path: Path):
    config = config_of(tiny_model, tmp_path, run={"steps": 6, "seed": 7})
    plain = complete(broker, f"{run_id}-plain", config)
    run = f"{run_id}-dirty"
    foreign = Producer({"bootstrap.servers": broker, "message.max.bytes": 16 << 20, "linger.ms": 0})
    with Crew(broker, run) as crew:
        create(config, log=crew.log, run_id=run, say=lambda _: None)
        expected: dict[tuple[str, int], int] = {}
        for topic, partition in [*OWNED, ("dead-letters", 0)]:
            for head, value in bad_records(run, topic if (topic, partition) != ("weights", 1) else "weights/1").values():
                foreign.produce(f"{run}.{topic}", value, partition=partition, headers=head)
                expected[topic, partition] = expected.get((topic, partition), 0) + 1
        foreign.produce(RUNS_TOPIC, b"not a run", key=run.encode(), partition=0)
        assert foreign.flush(30) == 0
        for role, slot in ROLES:
            crew.start(role, slot)
        crew.wait(lambda: crew.report()["steps"] >= 2)
        for topic in ("prompts", "rollouts", "groups", "ledger", "metrics", "weights"):
            repeat(crew, foreign, run, topic)
        assert foreign.flush(30) == 0
        del foreign  # ends its threads before the broker goes
        crew.wait()
        report = crew.report()
        found = letters(crew, run)
    assert report["weights"]["digest"] == plain["weights"]["digest"]
    assert report["groups"] == plain["groups"]
    assert report["status"] == "finished"
    for place in OWNED:
        reasons = [letter.reason for letter in found if (letter.topic, letter.partition) == (f"{run}.{place[0]}", place[1])]
        assert len(reasons) == expected[place], f"{place}: {reasons}"
        assert all(reasons)
    sizes = {len(letter.value) for letter in found}
    assert 5 << 20 in sizes  # a dead letter holds its record whole
    assert report["duplicates"] >= 5


def repeat(crew: Crew, foreign: Producer, run: str, topic: str) -> None:
    """Write one of the run's own records a second time, exactly as it is."""
    count = crew.log.partitions(f"{run}.{topic}") or 0
    tail = crew.log.tail({(f"{run}.{topic}", partition): "earliest" for partition in range(count if topic != "weights" else 1)})
    own = next(record for record in tail.read_to_end(30.0) if is_own(record, run))
    tail.close()
    foreign.produce(f"{run}.{topic}", own.value, key=own.key, partition=own.partition, headers=list(own.headers))


def is_own(record: Record, run: str) -> bool:
    names = dict(record.headers)
    return names.get("run") == run.encode() and names.get("worker") != b"mallory"


def letters(crew: Crew, run: str) -> list[dead_letters.DeadLetter]:
    """The readable dead letters of a run."""
    tail = crew.log.tail({(f"{run}.dead-letters", 0): "earliest"})
    found = []
    for record in tail.read_to_end(30.0):
        with suppress(Unusable):  # what somebody else wrote there
            found.append(dead_letters.read(record, run=run)[1])
    tail.close()
    return found
