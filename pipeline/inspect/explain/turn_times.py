"""Time of a trajectory whose turns went through the log: waiting for an engine, generation, and the environment.

A turn waits from its request until its generation starts. The environment's time is the rest, transport of replies included.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.infra.log import Log
from penstock.pipeline.runtime.topic_reader import drain
from penstock.topics.catalogue import topic_name
from penstock.topics.rollouts import Rollout
from penstock.topics.turns import calls, replies
from penstock.topics.turns.calls import TurnKey
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record

NS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTime:
    """One requested turn."""

    turn: int
    attempt: int
    worker: str
    """The rollout worker that generated it."""
    asked_s: float
    started_s: float
    ended_s: float


def turn_times(log: Log, run: str, *, group: int, partition: int) -> Mapping[int, list[TurnTime]]:
    """Sample -> its turns with a reply; empty if the run's turns are not sent through the log. Raises `LogError`."""
    if log.partitions(topic_name(run, "calls")) is None:
        return {}
    requested: dict[TurnKey, int] = {}
    for record in _records_of(log, topic_name(run, "calls"), group, partition):
        with contextlib.suppress(Unusable):
            call = calls.read(record, run=run)[1]
            requested.setdefault(call.key, call.asked_ns)
    times: dict[int, list[TurnTime]] = {}
    for record in _records_of(log, topic_name(run, "replies"), group, partition):
        with contextlib.suppress(Unusable):
            reply = replies.read(record, run=run)[1]
            if (requested_ns := requested.pop(reply.key, None)) is not None:
                times.setdefault(reply.sample, []).append(
                    TurnTime(
                        turn=reply.turn, attempt=reply.attempt, worker=reply.worker, asked_s=requested_ns / NS,
                        started_s=reply.started_ns / NS, ended_s=reply.ended_ns / NS,
                    )
                )  # fmt: skip
    return times


def summed(times: list[TurnTime], rollout: Rollout) -> dict[str, float]:
    """Seconds of a trajectory: waiting for an engine, generation, and the rest, which is the environment's.

    A restarted trajectory reuses turns generated before its start: the environment's time is then unknown and left out.
    """
    waited = sum(time.started_s - time.asked_s for time in times)
    generated = sum(time.ended_s - time.started_s for time in times)
    whole = (rollout.ended_ns - rollout.started_ns) / NS
    rest = {"environment_s": whole - waited - generated} if whole >= waited + generated else {}
    return {"waited_s": waited, "drawing_s": generated, **rest}


def _records_of(log: Log, topic: str, group: int, partition: int) -> Iterator[Record]:
    tail = log.tail({(topic, partition): "earliest"})
    try:
        for record in drain(tail, log.end_offsets([(topic, partition)])):
            if record.key == str(group).encode():
                yield record
    finally:
        tail.close()
