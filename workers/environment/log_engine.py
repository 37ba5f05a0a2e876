"""An engine that asks others: a turn is written to `calls` and read from `replies`.

The rule: a call is known by its trajectory, turn, attempt and the digest of its context. Under `replay` one that was answered is answered
from the log, whoever had asked; under `restart` each turn that is asked counts as a new attempt.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from penstock.infra.engines.base import DIRECTORY_VERSION, Completion, GroupInFlight, GroupRequest, Span
from penstock.infra.log import Producer
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.envs.agents.engine import turn_of
from penstock.topics.turns import calls, replies
from penstock.topics.turns.calls import Call, TurnKey
from penstock.topics.turns.replies import Reply
from penstock.topics.wire.record import Outgoing, Record
from penstock.workers.environment.replies import RecordedReplies

OVERHEADS = 4096
"""Turns over which percentiles are taken."""


@dataclass(slots=True, kw_only=True)
class LogEngine:
    """The `Engine` of an environment worker; it has no weights, and its version is the newest that was published."""

    run: str
    worker: str
    topic: str
    """Kafka name of `calls`."""
    producer: Producer
    replay: bool
    placed: Callable[[int], tuple[int, int]]
    """Group -> partition of its prompt, and the oldest version it may be drawn under."""
    known: RecordedReplies = field(default_factory=RecordedReplies)
    version: int = DIRECTORY_VERSION
    _waiting: dict[TurnKey, tuple[int, int]] = field(default_factory=dict)
    """Calls without a reply -> number of the turn, and when it was asked [ns]."""
    _ready: list[Completion] = field(default_factory=list)
    _counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("calls", "replies", "replayed"), 0.0))
    _overheads_ms: deque[float] = field(default_factory=lambda: deque(maxlen=OVERHEADS))

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._ready)

    @property
    def idle(self) -> bool:
        """True if there is nothing to take: who waits may wait for other things too, and is woken by the next reply."""
        return not self._ready

    @property
    def has_room(self) -> bool:
        return True

    def submit(self, request: GroupRequest) -> None:
        group, sample, turn = turn_of(request.group)
        attempt = 0 if self.replay else self.known.next_attempt((group, sample, turn))
        partition, min_version = self.placed(group)
        sampling = request.sampling
        call = Call(
            group=group, sample=sample, turn=turn, attempt=attempt, min_version=min_version,
            token_ids=np.asarray(request.prompt_ids, np.int32), stream=request.random_group, max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seeded=int(sampling.seeded),
            asked_ns=time.time_ns(), worker=self.worker,
        )  # fmt: skip
        key = call.key
        if (reply := self.known.find(partition, key)) is not None:
            self._counts["replayed"] += 1
            self._ready.append(completion_of(reply, request.group))
            return
        self._waiting[key] = request.group, time.monotonic_ns()
        self._counts["calls"] += 1
        value = calls.encode(call)
        headers = calls.headers(call, run=self.run).encode(value)
        self.producer.send(Outgoing(topic=self.topic, partition=partition, key=str(group).encode(), headers=headers, value=value))

    def take(self, record: Record) -> None:
        """A record of `replies`. Raises `Unusable`."""
        self.known.passes(record.partition, record.offset)
        claims = replies.check(record, run=self.run)
        key = calls.key_of(claims)
        if not self.known.wants(record.partition, key):
            return
        reply = replies.read(record, run=self.run, checked=claims)[1]
        self.known.add(record.partition, record.offset, reply)
        if (asked := self._waiting.pop(key, None)) is not None:
            number, asked_ns = asked
            self._counts["replies"] += 1
            self._overheads_ms.append((time.monotonic_ns() - asked_ns - (reply.ended_ns - reply.started_ns)) / 1e6)
            self._ready.append(completion_of(reply, number))

    def step(self) -> list[Completion]:
        """The turns that were answered meanwhile. Raises `LogError` where a call could not be written."""
        self.producer.check()
        ready, self._ready = self._ready, []
        return ready

    def abort(self, group: int) -> list[Completion]:
        """Wait no longer for a turn; it is drawn to its end, and its reply is of no use."""
        self._waiting = {key: asked for key, asked in self._waiting.items() if asked[0] != group}
        self._ready = [completion for completion in self._ready if completion.group != group]
        return []

    def groups_in_flight(self) -> list[GroupInFlight]:
        return []

    def load_weights(self, version: int, tensors: Iterable[TensorBytes]) -> None:
        self.version = version

    def stats(self) -> dict[str, float]:
        times = np.array(self._overheads_ms or [0.0])
        quantiles = {f"overhead_ms_p{share}": float(np.percentile(times, share)) for share in (50, 99)}
        return {**self._counts, **quantiles, "turns_asked": float(len(self._waiting))}

    def close(self) -> None:
        self._waiting.clear()
        self._ready.clear()
        self.producer.close()


def completion_of(reply: Reply, number: int) -> Completion:
    """A reply as the engine's own completion of the turn with this number."""
    return Completion(
        group=number,
        sample=0,
        token_ids=reply.token_ids,
        logprobs=reply.behaviour_logprobs,
        finish=reply.finish,
        spans=tuple(Span(int(version), int(start)) for version, start in zip(reply.span_versions, reply.span_starts, strict=True)),
        started_ns=reply.started_ns,
        ended_ns=reply.ended_ns,
    )
