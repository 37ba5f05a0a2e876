"""Has every reader of a run pass over a stretch that cannot be read: a batch that is damaged on the broker's disk, or inflates without end.

The rule: only what readers really stumble over, and only in topics of which a lost record is drawn or said again.
"""

import time

from penstock.infra.errors import ConfigError
from penstock.infra.kafka.log import KafkaLog
from penstock.topics import dead_letters
from penstock.topics.wire.record import Outgoing

PERSON = "person"
"""Who writes these letters."""
SKIPPABLE = {
    "rollouts": "a group whose samples are lost is abandoned after scorer.group_deadline_s, and another prompt takes its place",
    "calls": "the turns are asked for again",
    "replies": "the turns are asked for again",
    "metrics": "some seconds of the workers' figures are lost",
}
"""Topic -> what follows."""
_WITHOUT = {
    "prompts": "a prompt that nobody can read leaves a gap in the groups' numbers",
    "groups": "an outcome that nobody can read leaves its group open for ever",
    "ledger": "the ledger has no gaps",
    "weights": "the trainer sends a damaged newest version again by itself",
    "dead-letters": "it is what readers are told by",
}
WRITE_LIMIT_S = 30.0


def skip(log: KafkaLog, run: str, topic: str, partition: int, offset: int) -> tuple[range, str]:
    """Write down that the damaged stretch at an offset is to be passed over; returns it, and what follows.

    Raises `ConfigError` where nothing is damaged, or the run cannot go on without what lies there.
    """
    if topic not in SKIPPABLE:
        why = _WITHOUT.get(topic, f"topics are {', '.join(SKIPPABLE)}")
        raise ConfigError(f"{topic} cannot be passed over: {why}; `penstock fork {run} --from-step N` begins a new run from a checkpoint")
    at = (f"{run}.{topic}", partition)
    count = log.partitions(at[0])
    if count is None or partition >= count:
        raise ConfigError(f"run {run} has no {topic}/{partition}")
    begin, end = log.beginning_offsets([at])[at], log.end_offsets([at], committed=False)[at]
    if not begin <= offset < end:
        raise ConfigError(f"{topic}/{partition} holds the offsets {begin} to {end - 1}")
    for place, known in dead_letters.stretches(log.read_dead_letters(f"{run}.dead-letters"), run=run):
        if place == at and offset in known:
            raise ConfigError(f"readers pass over {topic}/{partition} {known.start} to {known.stop - 1} already")
    after = log.first_readable(at, offset)
    if after == offset:
        raise ConfigError(f"the record at {topic}/{partition}/{offset} can be read: nothing is to be passed over")
    stretch = range(offset, after)
    reason = f"cannot be read up to offset {after - 1}; a person has told all readers to pass it over"
    letter = dead_letters.of_stretch(at[0], partition, stretch, reason=reason, worker=PERSON, time_ns=time.time_ns())
    value = dead_letters.encode(letter)
    headers = dead_letters.headers(letter, run=run).encode(value)
    producer = log.producer()
    try:
        key = f"{topic}/{partition}/{offset}".encode()
        producer.send(Outgoing(topic=f"{run}.dead-letters", partition=0, key=key, headers=headers, value=value)).offset(WRITE_LIMIT_S)
    finally:
        producer.close()
    return stretch, SKIPPABLE[topic]
