"""Records that a foreign client writes into a run's topics: each ends in dead-letters with its reason or is ignored as a duplicate."""

from pathlib import Path

from confluent_kafka import Producer

from penstock.pipeline.launch.create import create
from penstock.topics.catalogue import RUNS_TOPIC
from tests.support.crew import Crew, complete, config_of
from tests.support.foreign_records import OWNED, bad_records, letters, repeat

ROLES = (("trainer", 0), ("rollout", 0), ("rollout", 1), ("scorer", 0), ("feeder", 0), ("tracker", 0))
MOVING = ("prompts", "rollouts")
"""Topics whose partitions are handed from worker to worker."""


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
        about = [letter for letter in found if (letter.topic, letter.partition) == (f"{run}.{place[0]}", place[1])]
        assert len({letter.offset for letter in about}) == expected[place], f"{place}: {about}"
        assert all(letter.reason for letter in about)
        # A partition that moves while its owner sets a record aside may have it set aside by the next owner, too: readers count records.
        assert len(about) == expected[place] or place[0] in MOVING, f"{place}: {about}"
    assert report["dead_letters"]["total"] == len({(letter.topic, letter.partition, letter.offset) for letter in found})
    sizes = {len(letter.value) for letter in found}
    assert 5 << 20 in sizes  # a dead letter holds its record whole
    assert report["duplicates"] >= 5
