"""The environment worker: runs episodes for prompts, and requests their turns through `calls` and `replies`.

It has no model. It may be killed at any moment: its successor runs the open episodes again from their seeds, with the recorded turns. A
call is identified by its episode, turn, attempt and the digest of its context. Under `replay` a call with a recorded reply gets it from
the log; under `restart` each request is a new attempt.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from penstock.infra.engines.base import DIRECTORY_VERSION, Completion, GroupInFlight, GroupRequest, Span
from penstock.infra.errors import ConfigError, LogError
from penstock.infra.log import Assigned, Commits, Event, Member, Membership, Producer
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.agents.engine import TrajectoryEngine, turn_of
from penstock.pipeline.runtime.factories import with_environments
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.weights.receive import VersionWatch
from penstock.topics.turns import calls, replies
from penstock.topics.turns.calls import Call, TurnKey
from penstock.topics.turns.replies import Reply
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from penstock.workers.rollout.group_tasks import GroupTasks, PublishedSamples
from penstock.workers.rollout.worker import GroupWorker

OVERHEADS = 4096
"""Number of recent turns over which percentiles are computed."""
Turn = tuple[int, int, int]
"""Group, sample, number of the model's turn."""


@dataclass(slots=True)
class _Partition:
    """An owned partition of `replies`."""

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
    """The first reply to each call in the owned partitions.

    Later replies to a call are ignored. Replies of a group are retained until its samples are in `rollouts`: a new owner starts to read at
    the oldest reply of an unfinished group, so that no call with a reply is repeated.
    """

    _partitions: dict[int, _Partition] = field(default_factory=dict)
    _attempts: dict[Turn, int] = field(default_factory=dict)
    """The highest attempt of a turn that was requested or has a reply."""
    _committed: dict[int, int] = field(default_factory=dict)

    @property
    def caught_up(self) -> bool:
        """True if all replies that existed when the partitions were assigned have been read."""
        return all(owned.position >= owned.behind for owned in self._partitions.values())

    def assign(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> None:
        """Own exactly these partitions, read from `starts`; `ends` are their end offsets. Replies of partitions that stay are retained."""
        previous = self._partitions
        self._partitions = {}
        for partition, start in starts.items():
            owned = previous.get(partition) or _Partition(start, 0)
            owned.position, owned.behind = start, ends[partition]
            self._partitions[partition] = owned
        self._committed = {}

    def passes(self, partition: int, offset: int) -> None:
        """Move the position of an owned partition behind the record at `offset`, usable or not."""
        if (owned := self._partitions.get(partition)) is not None:
            owned.position = max(owned.position, offset + 1)

    def wants(self, partition: int, key: TurnKey) -> bool:
        """True if the call `key` has no reply yet and its partition is owned."""
        owned = self._partitions.get(partition)
        return owned is not None and key not in owned.replies.get(key.group, {})

    def add(self, partition: int, offset: int, reply: Reply) -> None:
        """Store the first reply to a call, and count its attempt at the turn."""
        owned = self._partitions[partition]
        owned.replies.setdefault(reply.group, {})[reply.key] = reply
        owned.first.setdefault(reply.group, offset)
        turn = (reply.group, reply.sample, reply.turn)
        self._attempts[turn] = max(self._attempts.get(turn, 0), reply.attempt)

    def find(self, partition: int, key: TurnKey) -> Reply | None:
        """Return the stored reply to the call `key`; None if it has none or its partition is not owned."""
        owned = self._partitions.get(partition)
        return None if owned is None else owned.replies.get(key.group, {}).get(key)

    def next_attempt(self, turn: Turn) -> int:
        """The number of the next attempt at a turn; 0 for the first."""
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
        """Yield (partition, offset of its oldest stored reply) to commit, for each partition where that has moved since the last call."""
        for partition, owned in self._partitions.items():
            offset = min(owned.first.values(), default=owned.position)
            if self._committed.get(partition) != offset and owned.position >= owned.behind:
                self._committed[partition] = offset
                yield partition, offset


@dataclass(slots=True, kw_only=True)
class LogEngine:
    """The engine of an environment worker: turns are generated by rollout workers, through calls and replies in the log."""

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
        """True if no reply has arrived that `step` could return; the next reply wakes the waiting worker."""
        return not self._ready

    @property
    def has_room(self) -> bool:
        return True

    def submit(self, request: GroupRequest) -> None:
        """Request one turn of an episode: the next `step` returns its recorded reply, or if there is none a call is sent."""
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
        self.producer.send(calls.outgoing(call, run=self.run, topic=self.topic, key=str(group).encode(), partition=partition))

    def take(self, record: Record) -> None:
        """Store the reply in a record, and let the next `step` return it if its turn waits. Raises `Unusable` for an invalid record."""
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
        """The turns whose replies arrived since the last call. Raises `LogError` if a call could not be written."""
        self.producer.check()
        ready, self._ready = self._ready, []
        return ready

    def abort(self, group: int) -> list[Completion]:
        """Drop a turn; a rollout worker still generates it, but its reply is ignored."""
        self._waiting = {key: call for key, call in self._waiting.items() if call[0] != group}
        self._ready = [completion for completion in self._ready if completion.group != group]
        return []

    def groups_in_flight(self) -> list[GroupInFlight]:
        return []

    def load_weights(self, version: int, tensors: Iterable[TensorBytes]) -> None:
        self.version = version

    def stats(self) -> dict[str, float]:
        """Counters of calls and replies, turns without a reply, and percentiles [ms] of the time that the log adds to a turn."""
        times = np.array(self._overheads_ms or [0.0])
        quantiles = {f"overhead_ms_p{share}": float(np.percentile(times, share)) for share in (50, 99)}
        return {**self._counts, **quantiles, "turns_asked": float(len(self._waiting))}

    def close(self) -> None:
        self._waiting.clear()
        self._ready.clear()
        self.producer.close()


def completion_of(reply: Reply, number: int) -> Completion:
    """Convert a reply to the engine's completion of the turn that was requested as group `number`."""
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


_TAKE_S = 0.25
LOOK_EVERY_S = 0.05
"""How often groups are processed; the cost grows with the groups in flight."""


def main(session: Session) -> None:
    """Run episodes until the run is closed."""
    if not session.config.turns_by_log:
        raise ConfigError('this run has no use for an environment worker: to run episodes in one, set environment.carrier = "log"')
    session.check_model()
    EnvironmentWorker.join(session).run()


class WakingMember:
    """A consumer group member with a polling thread, for a worker that waits for other events too."""

    def __init__(self, member: Member, wake: Callable[[], None]) -> None:
        """Start the thread; it calls `wake` after each batch of events."""
        self._member, self._wake = member, wake
        self._events: queue.SimpleQueue[list[Event] | LogError] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="replies")
        self._thread.start()

    @property
    def outage_s(self) -> float:
        return self._member.outage_s

    def take(self, timeout_s: float) -> list[Event]:
        """Events since the last call; waits up to `timeout_s` for the first. Raises `LogError` once polling has failed."""
        taken: list[Event] = []
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                events = self._events.get(timeout=max(0.0, deadline - time.monotonic())) if not taken else self._events.get_nowait()
            except queue.Empty:
                return taken
            if isinstance(events, LogError):
                raise events
            taken += events

    def commit(self, offsets: Commits) -> bool:
        return self._member.commit(offsets)

    def membership(self) -> Membership | None:
        return self._member.membership()

    def close(self, timeout_s: float = 3.0) -> None:
        """Stop polling and leave the consumer group, within `timeout_s`."""
        self._closing.set()
        self._thread.join(_TAKE_S + timeout_s)
        self._member.close(timeout_s)

    def _follow(self) -> None:
        """Poll until closed; queue events, or the error that ended polling, and wake the worker."""
        try:
            while not self._closing.is_set():
                if events := self._member.take(_TAKE_S):
                    self._events.put(events)
                    self._wake()
        except LogError as error:
            self._events.put(error)
            self._wake()


@dataclass(slots=True)
class EnvironmentWorker(GroupWorker):
    """Runs the episodes of prompts; its engine is the rollout workers, behind the log."""

    log_engine: LogEngine = field(kw_only=True)
    _looked: float = 0.0

    @classmethod
    def join(cls, session: Session) -> "EnvironmentWorker":
        """Join the run's environment workers and their consumer group."""
        config = session.config
        tasks = GroupTasks(session.schedule.oversample)

        def placed(group: int) -> tuple[int, int]:
            task = tasks.tasks[group]
            return task.partition, task.prompt.min_version

        log_engine = LogEngine(
            run=session.run, worker=session.worker, topic=session.topic("calls"), producer=session.log.producer(linger_ms=0.0),
            replay=config.environment.resume == "replay", placed=placed,
        )  # fmt: skip
        engine: TrajectoryEngine = with_environments(log_engine, config, notify=session.reporter.notify)
        member = session.member("prompts", "replies", max_records=2048, gathers=False)
        weights = VersionWatch(session.log, session.run, notify=session.reporter.notify)
        published = PublishedSamples(session.log, session.run)
        woken = WakingMember(member, engine.wake)
        return cls(session, engine, weights, woken, session.producer, tasks, published, log_engine=log_engine)

    def turn(self) -> None:
        """One turn of the loop: pass on replies at once; process groups when an episode has ended, and periodically."""
        self.weights.check()
        idle = self.engine.idle
        self._take(LOOK_EVERY_S if idle else 0.0)
        ended = [] if idle else self.engine.step()
        self._ended(ended)
        if ended or time.monotonic() - self._looked > LOOK_EVERY_S:
            super(EnvironmentWorker, self).turn()
            self._looked = time.monotonic()

    def _assigned(self, event: Assigned) -> None:
        """Read the replies in the assigned partitions from the committed offsets on, then take over their prompts as a rollout worker."""
        topic = self.session.topic("replies")
        starts = {partition: committed.offset or 0 for (held, partition), committed in event.partitions.items() if held == topic}
        ends = self.session.log.end_offsets((topic, partition) for partition in starts)
        self.log_engine.recorded.assign(starts, {partition: end for (_, partition), end in ends.items()})
        super(EnvironmentWorker, self)._assigned(event)

    def _received(self, record: Record) -> None:
        """Apply a record of `prompts` or `replies`; an unusable reply becomes a dead letter."""
        if record.topic != self.session.topic("replies"):
            super(EnvironmentWorker, self)._received(record)
            return
        try:
            with self.session.dead_letters.decoding(record):
                self.log_engine.take(record)
        except Unusable as error:
            self.session.dead_letters.write(record, error)

    def _start(self) -> None:
        if self.log_engine.recorded.caught_up:  # a turn with a reply is not requested again
            super(EnvironmentWorker, self)._start()

    def _offsets_to_commit(self) -> Commits:
        """Offsets of `prompts` as a rollout worker commits them, and of `replies`, whose replies to ended groups are dropped."""
        offsets = dict(super(EnvironmentWorker, self)._offsets_to_commit())
        self.log_engine.recorded.forget(self._has_ended)
        topic = self.session.topic("replies")
        return offsets | {(topic, partition): (offset, "") for partition, offset in self.log_engine.recorded.offsets()}

    def _has_ended(self, partition: int, group: int) -> bool:
        """True if a group's prompt was delivered and the group is no longer in flight, so that no episode of it will run."""
        owned, task = self.tasks.partitions.get(partition), self.tasks.tasks.get(group)
        return owned is not None and group <= owned.newest and (task is None or task.done)
