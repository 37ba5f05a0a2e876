"""Samples in `rollouts`, and turns in `replies`, that were written more than once.

The first record of a sample or turn counts; each later one is a copy, and needless if its generation started after the sample was
visible. Copies around a stop of one of their two writers (SIGSTOP, a suspended machine) are counted separately: a stopped process cannot
read the log.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.infra.log import Log, Start
from penstock.topics import rollouts
from penstock.topics.turns import replies
from penstock.topics.turns.calls import TurnKey
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record

NS = 1_000_000_000

Stops = Mapping[str, Sequence[tuple[int, int]]]
"""Worker -> nanoseconds since 1970 of each SIGSTOP and of its SIGCONT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Origin of one sample or turn."""

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
    """The turn that a reply answers."""

    @property
    def key(self) -> object:
        """Identity of the sample or turn."""
        return self.turn or (self.group, self.sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The figures of one run."""

    samples: int
    """Distinct samples, or turns."""
    copies: int
    """Records after the first one of their sample."""
    needless: int
    """Copies whose generation started after the sample was visible."""
    needless_around_stops: int
    """Those that a stopped process explains; not in `needless`."""
    lost_s: float
    """Seconds of generation that produced only copies; the rows of a group are generated together and count once."""


def read_samples(log: Log, run: str) -> list[Generated]:
    """Every readable sample in a run's `rollouts`."""
    return list(_read(log, f"{run}.rollouts", lambda record: rollouts.read_all(record, run=run)[1]))


def read_turns(log: Log, run: str) -> list[Generated]:
    """Every readable reply of a run; none if turns do not pass through the log."""
    return list(_read(log, f"{run}.replies", lambda record: [replies.read(record, run=run)[1]]))


def _read(log: Log, topic: str, decode: Callable[[Record], Iterable[Any]]) -> Iterator[Generated]:
    starts: dict[tuple[str, int], Start] = {(topic, partition): "earliest" for partition in range(log.partitions(topic) or 0)}
    if not starts:
        return
    tail = log.tail(starts)
    for record in tail.read_to_end(300.0):
        try:
            samples = decode(record)
        except Unusable:
            continue
        for each in samples:
            yield Generated(
                partition=record.partition, offset=record.offset, group=each.group, sample=each.sample, worker=each.worker,
                started_ns=each.started_ns, ended_ns=each.ended_ns, visible_ms=record.timestamp_ms, turn=getattr(each, "key", None),
            )  # fmt: skip
    tail.close()


def count(generated: Iterable[Generated], *, stops: Stops | None = None) -> Copies:
    """The figures of these records, in any order."""
    first: dict[object, Generated] = {}
    copies = []
    for each in sorted(generated, key=lambda each: (each.partition, each.offset)):
        if first.setdefault(each.key, each) is not each:
            copies.append(each)
    late = [(first[each.key], each) for each in copies if is_late(first[each.key], each)]
    around = sum(explained(earlier, copy, stops or {}) for earlier, copy in late)
    return Copies(
        samples=len(first),
        copies=len(copies),
        needless=len(late) - around,
        needless_around_stops=around,
        lost_s=lost_s(first.values(), copies),
    )


def is_late(earlier: Generated, copy: Generated) -> bool:
    """True if a copy's generation started in a later millisecond than the one the sample was written in."""
    return copy.started_ns >= (earlier.visible_ms + 1) * (NS // 1000)


def explained(earlier: Generated, copy: Generated, stops: Stops) -> bool:
    """True if one of the two writers was stopped between the start of the sample and the start of the copy."""
    spans = [*stops.get(earlier.worker, ()), *stops.get(copy.worker, ())]
    return any(stopped < copy.started_ns and earlier.started_ns < continued for stopped, continued in spans)


def lost_s(useful: Iterable[Generated], copies: Iterable[Generated]) -> float:
    """Seconds in which a worker generated only copies of a group."""
    ends: list[dict[tuple[str, int, int], int]] = [{}, {}]
    for end, samples in zip(ends, (useful, copies), strict=True):
        for each in samples:
            key = (each.worker, each.group, each.started_ns)
            end[key] = max(end.get(key, 0), each.ended_ns)
    return sum(max(0, ended - ends[0].get(key, key[2])) for key, ended in ends[1].items()) / NS
