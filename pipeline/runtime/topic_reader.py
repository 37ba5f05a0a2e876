"""A topic from its beginning to the end it has now, record by record.

The rule: never more than a batch in memory, however long the topic is; what comes after the beginning of the call is left out.
"""

from collections.abc import Iterator, Sequence

from penstock.infra.errors import LogError
from penstock.infra.log import Log, Partition, Start
from penstock.topics.wire.record import Record

BATCH = 500
POLL_S = 0.2
"""Marks of transactions at the end of a partition are passed without a record: what waits for one looks at its place so often."""
READ_LIMIT_S = 600.0
"""A broker that sends nothing for so long, although there is more to read, is given up."""


def deleted(log: Log, name: str) -> list[str]:
    """What retention has taken from the Kafka topic `name`, a line for each partition that has lost its beginning.

    Example:
        deleted(log, "demo.groups")  # -> ["demo.groups/3: the records at offsets 0 to 41 were deleted"]
    """
    begins = log.begin_offsets([(name, number) for number in range(log.partitions(name) or 0)])
    return [f"{topic}/{number}: the records at offsets 0 to {begin - 1} were deleted" for (topic, number), begin in begins.items() if begin]


def scan(log: Log, name: str, *, partitions: Sequence[int] | None = None) -> Iterator[Record]:
    """Every kept record of the Kafka topic `name`, in order within a partition; none of a topic that does not exist. Raises `LogError`."""
    places: list[Partition] = [(name, number) for number in (range(log.partitions(name) or 0) if partitions is None else partitions)]
    begins, ends = log.begin_offsets(places), log.end_offsets(places)
    left = {at for at in places if ends[at] > begins[at]}
    if not left:
        return
    starts: dict[Partition, Start] = {at: begins[at] for at in left}
    tail, waited = log.tail(starts), 0.0
    try:
        while left:
            records = tail.poll(POLL_S, max_records=BATCH)
            waited = 0.0 if records else waited + POLL_S
            if waited >= READ_LIMIT_S:
                raise LogError(f"{name}: nothing came for {READ_LIMIT_S:g} s, {len(left)} partitions are not read to their ends")
            yield from (record for record in records if record.offset < ends[record.topic, record.partition])
            left = {at for at in left if tail.position(at) < ends[at]}
    finally:
        tail.close()
