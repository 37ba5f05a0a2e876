"""Stretches of a partition that cannot be read at all, and over which a person has told every reader to go.

The rule: what is passed over stands in the run's `dead-letters`, written by a person; no reader passes over anything by itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

from kafka import TopicPartition

from penstock.infra.errors import LogError
from penstock.infra.kafka.client_repairs import private_api
from penstock.topics import dead_letters
from penstock.topics.wire.record import Record

ReadLetters = Callable[[str], Sequence[Record]]
"""Topic of a run's dead letters -> those that are there."""


def pass_over(consumer: Any, read_letters: ReadLetters) -> bool:
    """Have a consumer go on behind each stretch at which it stands; false when it stands at none."""
    places = {(tp.topic, tp.partition): private_api.position(consumer, tp) for tp in consumer.assignment()}
    moved = False
    for run in {topic.partition(".")[0] for topic, _ in places}:
        letters = _read(read_letters, f"{run}.dead-letters")
        for place, offsets in dead_letters.stretches(letters, run=run):
            if places.get(place) in offsets:
                consumer.seek(TopicPartition(*place), offsets.stop)
                moved = True
    return moved


def _read(read_letters: ReadLetters, topic: str) -> Sequence[Record]:
    """The letters, none for who may not read them: the damage itself is then what is to be said."""
    try:
        return read_letters(topic)
    except LogError:
        return ()
