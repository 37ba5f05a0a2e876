"""An engine that requests turns through the log: a turn is written to `calls` and its completion read from `replies`.

A call is identified by its episode, turn, attempt and the digest of its context. Under `replay` a call with a recorded reply gets it from
the log; under `restart` each request is a new attempt.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from penstock.infra.engines.base import DIRECTORY_VERSION, Completion, GroupInFlight, GroupRequest, Span
from penstock.infra.log import Producer
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.agents.engine import turn_of
from penstock.topics.turns import calls, replies
from penstock.topics.turns.calls import Call, TurnKey
from penstock.topics.turns.replies import Reply
from penstock.topics.wire.record import Outgoing, Record

OVERHEADS = 4096
"""Turns over which percentiles are taken."""
Turn = tuple[int, int, int]
"""Group, sample, number of the model's turn."""


@dataclass(slots=True)
class _Partition:
    position: int
    """Offset after the last reply that was read."""
    behind: int
    """End offset of `replies` when the partition was assigned."""
    replies: dict[int, dict[TurnKey, Reply]] = field(default_factory=dict)
    """Group -> its replies."""
    first: dict[int, int] = field(default_factory=dict)
    """Group -> offset of its first reply."""


@dataclass(slots=True)
class RecordedReplies:
    """Replies in the owned partitions.

    The first reply to a call counts. Replies of a group are retained until its samples are in `rollouts`: a new owner starts to read at
    the oldest reply of an unfinished group, so that no call with a reply is repeated.
    """

    _partitions: dict[int, _Partition] = field(default_factory=dict)
    _attempts: dict[Turn, int] = field(default_factory=dict)
    """The highest attempt of a turn that was requested or has a reply."""
    _committed: dict[int, int] = field(default_factory=dict)

    @property
    def caught_up(self) -> bool:
        """True if all replies from before the assignment were read."""
        return all(owned.position >= owned.behind for owned in self._partitions.values())

    def assign(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> None:
        """Own these partitions, whose replies are read from `starts` on; replies of those that stay are retained."""
        previous = self._partitions
        self._partitions = {}
        for partition, start in starts.items():
            owned = previous.get(partition) or _Partition(start, 0)
            owned.position, owned.behind = start, ends[partition]
            self._partitions[partition] = owned
        self._committed = {}

    def revoke(self) -> None:
        """Wait for the next assignment."""
        for owned in self._partitions.values():
            owned.behind = owned.position + 1

    def passes(self, partition: int, offset: int) -> None:
        """Record that the record at an offset was read, usable or not."""
        if (owned := self._partitions.get(partition)) is not None:
            owned.position = max(owned.position, offset + 1)

    def wants(self, partition: int, key: TurnKey) -> bool:
        """True if a reply is the first to its call, in an owned partition."""
        owned = self._partitions.get(partition)
        return owned is not None and key not in owned.replies.get(key.group, {})

    def add(self, partition: int, offset: int, reply: Reply) -> None:
        """Store a new reply."""
        owned = self._partitions[partition]
        owned.replies.setdefault(reply.group, {})[reply.key] = reply
        owned.first.setdefault(reply.group, offset)
        turn = (reply.group, reply.sample, reply.turn)
        self._attempts[turn] = max(self._attempts.get(turn, 0), reply.attempt)

    def find(self, partition: int, key: TurnKey) -> Reply | None:
        """The recorded reply to a call, or None."""
        owned = self._partitions.get(partition)
        return None if owned is None else owned.replies.get(key.group, {}).get(key)

    def next_attempt(self, turn: Turn) -> int:
        """One more than the highest attempt of a turn; 0 at first."""
        self._attempts[turn] = self._attempts.get(turn, -1) + 1
        return self._attempts[turn]

    def forget(self, ended: Callable[[int, int], bool]) -> None:
        """Drop the replies of groups for which `ended(partition, group)` is true."""
        for partition, owned in self._partitions.items():
            for group in [group for group in owned.replies if ended(partition, group)]:
                for key in owned.replies.pop(group):
                    self._attempts.pop((key.group, key.sample, key.turn), None)
                del owned.first[group]

    def offsets(self) -> Iterator[tuple[int, int]]:
        """(partition, offset) to commit, of those that moved since the last call."""
        for partition, owned in self._partitions.items():
            offset = min(owned.first.values(), default=owned.position)
            if self._committed.get(partition) != offset and owned.position >= owned.behind:
                self._committed[partition] = offset
                yield partition, offset


@dataclass(slots=True, kw_only=True)
class LogEngine:
    """The `Engine` of an environment worker; it has no weights, and its version is the newest published one."""

    run: str
    worker: str
    topic: str
    """Kafka name of `calls`."""
    producer: Producer
    replay: bool
    placed: Callable[[int], tuple[int, int]]
    """Group -> partition of its prompt, and the oldest version it may be generated under."""
    recorded: RecordedReplies = field(default_factory=RecordedReplies)
    version: int = DIRECTORY_VERSION
    _waiting: dict[TurnKey, tuple[int, int]] = field(default_factory=dict)
    """Calls without a reply -> number of the turn, and time of the request [ns]."""
    _ready: list[Completion] = field(default_factory=list)
    _counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("calls", "replies", "replayed"), 0.0))
    _overheads_ms: deque[float] = field(default_factory=lambda: deque(maxlen=OVERHEADS))

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._ready)

    @property
    def idle(self) -> bool:
        """True if nothing is ready; the next reply wakes the waiting worker."""
        return not self._ready

    @property
    def has_room(self) -> bool:
        return True

    def submit(self, request: GroupRequest) -> None:
        group, sample, turn = turn_of(request.group)
        attempt = 0 if self.replay else self.recorded.next_attempt((group, sample, turn))
        partition, min_version = self.placed(group)
        sampling = request.sampling
        call = Call(
            group=group, sample=sample, turn=turn, attempt=attempt, min_version=min_version,
            token_ids=np.asarray(request.prompt_ids, np.int32), stream=request.random_group, max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seeded=int(sampling.seeded),
            asked_ns=time.time_ns(), worker=self.worker,
        )  # fmt: skip
        key = call.key
        if (reply := self.recorded.find(partition, key)) is not None:
            self._counts["replayed"] += 1
            self._ready.append(completion_of(reply, request.group))
            return
        self._waiting[key] = request.group, time.monotonic_ns()
        self._counts["calls"] += 1
        value = calls.encode(call)
        headers = calls.headers(call, run=self.run).encode(value)
        self.producer.send(Outgoing(topic=self.topic, partition=partition, key=str(group).encode(), headers=headers, value=value))

    def take(self, record: Record) -> None:
        """Apply a record of `replies`. Raises `Unusable`."""
        self.recorded.passes(record.partition, record.offset)
        claims = replies.check(record, run=self.run)
        key = calls.key_of(claims)
        if not self.recorded.wants(record.partition, key):
            return
        reply = replies.read(record, run=self.run, checked=claims)[1]
        self.recorded.add(record.partition, record.offset, reply)
        if (waiting := self._waiting.pop(key, None)) is not None:
            number, requested_ns = waiting
            self._counts["replies"] += 1
            self._overheads_ms.append((time.monotonic_ns() - requested_ns - (reply.ended_ns - reply.started_ns)) / 1e6)
            self._ready.append(completion_of(reply, number))

    def step(self) -> list[Completion]:
        """The turns that got replies since the last call. Raises `LogError` if a call could not be written."""
        self.producer.check()
        ready, self._ready = self._ready, []
        return ready

    def abort(self, group: int) -> list[Completion]:
        """Drop a turn; it is generated to its end, and its reply is ignored."""
        self._waiting = {key: call for key, call in self._waiting.items() if call[0] != group}
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
    """A reply as the completion of the turn with this number."""
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
