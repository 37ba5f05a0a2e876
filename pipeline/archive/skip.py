"""Lets all readers skip a damaged offset range, in topics whose lost records are generated or sent again."""

import time

from penstock.infra.errors import ConfigError
from penstock.infra.kafka.log import KafkaLog
from penstock.topics import dead_letters
from penstock.topics.wire.record import Outgoing

PERSON = "person"
SKIPPABLE = {
    "rollouts": "a group whose samples are lost is abandoned after scorer.group_deadline_s and replaced by another prompt",
    "calls": "the turns are requested again",
    "replies": "the turns are requested again",
    "metrics": "some seconds of the workers' measurements are lost",
}
_WITHOUT = {
    "prompts": "an unreadable prompt leaves a gap in the group numbers",
    "groups": "an unreadable outcome leaves its group open",
    "ledger": "the ledger has no gaps",
    "weights": "the trainer sends a damaged newest version again",
    "dead-letters": "skips themselves are recorded in it",
}
WRITE_LIMIT_S = 30.0


def skip(log: KafkaLog, run: str, topic: str, partition: int, offset: int) -> tuple[range, str]:
    """Write a dead letter that makes readers skip the unreadable range at an offset; return the range and its consequence."""
    if topic not in SKIPPABLE:
        reason = _WITHOUT.get(topic, f"topics are {', '.join(SKIPPABLE)}")
        raise ConfigError(f"{topic} cannot be skipped: {reason}; start a new run from a checkpoint: `penstock fork {run} --from-step N`")
    tp = (f"{run}.{topic}", partition)
    count = log.partitions(tp[0])
    if count is None or partition >= count:
        raise ConfigError(f"run {run} has no {topic}/{partition}")
    start, end = log.beginning_offsets([tp])[tp], log.end_offsets([tp], committed=False)[tp]
    if not start <= offset < end:
        raise ConfigError(f"{topic}/{partition} has offsets {start} to {end - 1}")
    for skipped_tp, offsets in dead_letters.stretches(log.read_dead_letters(f"{run}.dead-letters"), run=run):
        if skipped_tp == tp and offset in offsets:
            raise ConfigError(f"readers skip {topic}/{partition} {offsets.start} to {offsets.stop - 1} already")
    after = log.first_readable(tp, offset)
    if after == offset:
        raise ConfigError(f"the record at {topic}/{partition}/{offset} is readable: there is nothing to skip")
    stretch = range(offset, after)
    reason = f"cannot be read up to offset {after - 1}; the operator made all readers skip it"
    dead_letter = dead_letters.of_stretch(tp[0], partition, stretch, reason=reason, worker=PERSON, time_ns=time.time_ns())
    value = dead_letters.encode(dead_letter)
    headers = dead_letters.headers(dead_letter, run=run).encode(value)
    producer = log.producer()
    try:
        key = f"{topic}/{partition}/{offset}".encode()
        producer.send(Outgoing(topic=f"{run}.dead-letters", partition=0, key=key, headers=headers, value=value)).offset(WRITE_LIMIT_S)
    finally:
        producer.close()
    return stretch, SKIPPABLE[topic]
