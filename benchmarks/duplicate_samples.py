"""Samples in `rollouts`, and turns in `replies`, that stand there more than once: how many needlessly, and the generation they cost.

The rule: the first record of a sample, or turn, is the one; a later one is a copy, needless when its generation began although the sample
was visible already. Copies around a stop of one of their two writers (SIGSTOP, a suspended machine) are counted apart: a process that
does not run cannot look at the log.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.infra.log import Log, Start
from penstock.topics import rollouts
from penstock.topics.turns import replies
from penstock.topics.turns.calls import TurnKey
from penstock.topics.wire.errors import Unusable

NS = 1_000_000_000

Stops = Mapping[str, Sequence[tuple[int, int]]]
"""Worker -> when it was stopped and when it went on, in ns since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What a record of `rollouts` says of the making of a sample."""

    partition: int
    offset: int
    group: int
    sample: int
    worker: str
    started_ns: int
    ended_ns: int
    visible_ms: int
    """The record's timestamp: it became visible in this millisecond or later."""
    turn: TurnKey | None = None
    """Of a reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The figures of one run."""

    samples: int
    """Distinct samples, or turns."""
    copies: int
    """Records beyond the first one of their sample."""
    needless: int
    """Copies begun after the sample was visible."""
    needless_around_stops: int
    """Those that a stopped process explains; not in `needless`."""
    lost_s: float
    """Seconds of generation that brought nothing but copies; the rows of a group are drawn together and count once."""


def read_drawn(log: Log, run: str) -> list[Drawn]:
    """Every readable sample in a run's `rollouts`."""
    topic = f"{run}.rollouts"
    starts: dict[tuple[str, int], Start] = {(topic, partition): "earliest" for partition in range(log.partitions(topic) or 0)}
    tail = log.tail(starts)
    found = []
    for record in tail.read_to_end(300.0):
        try:
            samples = rollouts.read_all(record, run=run)[1]
        except Unusable:
            continue
        found.extend(
            Drawn(
                partition=record.partition,
                offset=record.offset,
                group=sample.group,
                sample=sample.sample,
                worker=sample.worker,
                started_ns=sample.started_ns,
                ended_ns=sample.ended_ns,
                visible_ms=record.timestamp_ms,
            )
            for sample in samples
        )
    tail.close()
    return found


def read_turns(log: Log, run: str) -> list[Drawn]:
    """Every readable reply of a run; none where turns do not travel through the log."""
    topic = f"{run}.replies"
    starts: dict[tuple[str, int], Start] = {(topic, partition): "earliest" for partition in range(log.partitions(topic) or 0)}
    if not starts:
        return []
    tail = log.tail(starts)
    found = []
    for record in tail.read_to_end(300.0):
        try:
            reply = replies.read(record, run=run)[1]
        except Unusable:
            continue
        found.append(
            Drawn(
                partition=record.partition, offset=record.offset, group=reply.group, sample=reply.sample, worker=reply.worker,
                started_ns=reply.started_ns, ended_ns=reply.ended_ns, visible_ms=record.timestamp_ms, turn=reply.key,
            )
        )  # fmt: skip
    tail.close()
    return found


def count(drawn: Iterable[Drawn], *, stops: Stops | None = None) -> Copies:
    """The figures of these records, in whatever order they come."""
    first: dict[object, Drawn] = {}
    copies = []
    for one in sorted(drawn, key=lambda one: (one.partition, one.offset)):
        if first.setdefault(_what(one), one) is not one:
            copies.append(one)
    late = [(first[_what(one)], one) for one in copies if is_late(first[_what(one)], one)]
    around = sum(explained(earlier, copy, stops or {}) for earlier, copy in late)
    return Copies(
        samples=len(first),
        copies=len(copies),
        needless=len(late) - around,
        needless_around_stops=around,
        lost_s=lost_s(first.values(), copies),
    )


def _what(one: Drawn) -> object:
    return one.turn or (one.group, one.sample)


def is_late(earlier: Drawn, copy: Drawn) -> bool:
    """Whether a copy's generation began in a later millisecond than the one the sample was written in."""
    return copy.started_ns >= (earlier.visible_ms + 1) * (NS // 1000)


def explained(earlier: Drawn, copy: Drawn, stops: Stops) -> bool:
    """Whether one of the two writers was stopped at some time from the sample's beginning to the copy's."""
    spans = [*stops.get(earlier.worker, ()), *stops.get(copy.worker, ())]
    return any(stopped < copy.started_ns and earlier.started_ns < continued for stopped, continued in spans)


def lost_s(useful: Iterable[Drawn], copies: Iterable[Drawn]) -> float:
    """Seconds in which a worker drew a group and only copies came of it."""
    until: dict[tuple[str, int, int], int] = {}
    for one in useful:
        key = (one.worker, one.group, one.started_ns)
        until[key] = max(until.get(key, 0), one.ended_ns)
    end: dict[tuple[str, int, int], int] = {}
    for one in copies:
        key = (one.worker, one.group, one.started_ns)
        end[key] = max(end.get(key, 0), one.ended_ns)
    return sum(max(0, ended - until.get(key, key[2])) for key, ended in end.items()) / NS
