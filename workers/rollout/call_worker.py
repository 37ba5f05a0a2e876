"""Generates single turns for environment workers: `calls` -> `replies`.

A call contains its full context, so the engine has no state of an episode. A call starts only under weights that it allows, the lowest
group first, and only without a reply in the log; its random numbers follow from (run seed, group, sample, turn). During a rebalance
replies are held back, and those that turn out to be another worker's are dropped. A partition's committed offset is the contiguous low
watermark of calls with replies; the offset metadata tell where in `replies` the replies to later calls start, and some before: a new
environment worker may repeat calls.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.infra.engines.base import Completion, Engine, GroupRequest, Sampling
from penstock.infra.log import Assigned, Pending, Tail, read_to_current_end
from penstock.pipeline.agents.engine import turn_number
from penstock.pipeline.runtime import offset_metadata
from penstock.pipeline.runtime.offset_metadata import CallOffsetMetadata
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.weights.receive import WeightPrefetch
from penstock.pipeline.scheduling import rules
from penstock.topics.metrics import Activity
from penstock.topics.turns import calls, replies
from penstock.topics.turns.calls import Call, TurnKey
from penstock.topics.turns.replies import Reply
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from penstock.workers.rollout.generation_loop import GenerationLoop

MAX_REPLIED = 4096
"""Calls with replies of a partition below the watermark that are remembered."""


@dataclass(slots=True, eq=False)
class CallTask:
    """A call that has no reply yet."""

    call: Call
    key: TurnKey
    partition: int
    offset: int
    inherited: bool
    """True if it was in the log when its partition was assigned: an earlier owner may still generate it."""
    sent: Pending | None = None
    """The reply, while it is being sent."""

    @property
    def number(self) -> int:
        """Number of the call's turn, as a group number for the engine; lower numbers come first."""
        return turn_number(self.key.group, self.key.sample, self.key.turn)


@dataclass(slots=True)
class CallPartition:
    """An owned partition of `calls`, with the partition of `replies` of the same number."""

    position: int
    """Offset after the last call that was delivered."""
    inherited_end: int
    """End offset of `calls` when the partition was assigned."""
    replies_end: int
    """All replies before this offset were read or sent."""
    replied: "OrderedDict[TurnKey, tuple[int, int]]" = field(default_factory=OrderedDict)
    """Key -> offset of the reply, and of the call, -1 if that was not delivered here."""
    committed: tuple[int, str] | None = None


@dataclass(slots=True)
class CallTasks:
    """The calls in all partitions that a worker owns; calls in flight survive a rebalance if their partitions stay."""

    partitions: dict[int, CallPartition] = field(default_factory=dict)
    tasks: dict[TurnKey, CallTask] = field(default_factory=dict)
    """Calls whose reply is not acknowledged yet."""
    generating: dict[int, CallTask] = field(default_factory=dict)
    """Number -> the task that the engine generates, or has generated without its reply being sent."""

    def revoke(self) -> None:
        """Forget all partitions, and every call that is not in flight: if its partition stays with this worker, it is delivered again."""
        self.partitions.clear()
        self.tasks = {task.key: task for task in self.tasks.values() if task.sent is not None or self.generating.get(task.number) is task}

    def assign(self, partition: int, *, offset: int, inherited_end: int, replies_end: int) -> None:
        self.partitions[partition] = CallPartition(offset, inherited_end, replies_end)

    def gone(self) -> list[CallTask]:
        """Drop and return the calls whose partitions another worker now owns."""
        lost = [task for task in self.tasks.values() if task.partition not in self.partitions]
        for task in lost:
            del self.tasks[task.key]
        return lost

    def add(self, call: Call, key: TurnKey, *, partition: int, offset: int) -> None:
        """Queue a call unless it has a reply or is already queued."""
        owned = self.partitions.get(partition)
        if owned is None:
            return
        self.passes(partition, offset)
        if key in owned.replied:
            owned.replied[key] = owned.replied[key][0], offset
        elif key not in self.tasks:
            self.tasks[key] = CallTask(call, key, partition, offset, inherited=offset < owned.inherited_end)

    def passes(self, partition: int, offset: int) -> None:
        """Move the position of a partition behind a delivered record, usable or not."""
        if (owned := self.partitions.get(partition)) is not None:
            owned.position = max(owned.position, offset + 1)

    def replied(self, partition: int, key: TurnKey, offset: int) -> CallTask | None:
        """Record that the reply to the call `key` is at this offset of `replies`, from any worker; return the call if queued here."""
        owned, task = self.partitions.get(partition), self.tasks.pop(key, None)
        if owned is not None:
            owned.replies_end = max(owned.replies_end, offset + 1)
            owned.replied.setdefault(key, (offset, -1 if task is None else task.offset))
        return task

    def waiting(self) -> list[CallTask]:
        """Calls that may start, the lowest group first; at most one call per turn."""
        ready = {task.number: task for task in self.tasks.values() if task.sent is None and task.number not in self.generating}
        return [task for _, task in sorted(ready.items())]

    def watermarks(self) -> dict[int, tuple[int, str]]:
        """Partition of `calls` -> (offset, metadata) to commit, for those where either has changed since the last call.

        The offset is that of the first call without a reply in the log.
        """
        lowest: dict[int, int] = {}
        for task in self.tasks.values():
            lowest[task.partition] = min(task.offset, lowest.get(task.partition, task.offset))
        moved = {}
        for number, owned in self.partitions.items():
            offset = min(lowest.get(number, owned.position), owned.position)
            inherited = owned.position < owned.inherited_end  # which calls have replies is not read yet
            while not inherited and len(owned.replied) > MAX_REPLIED and next(iter(owned.replied.values()))[1] < offset:
                owned.replied.popitem(last=False)
            first = min((reply for reply, _ in owned.replied.values()), default=owned.replies_end)
            commit = offset, offset_metadata.encode(CallOffsetMetadata(first))
            if commit != owned.committed:
                moved[number] = owned.committed = commit
        return moved


IDLE_WAIT_S = 0.2
"""How long an idle worker waits for calls or weights before it checks everything again."""


@dataclass(slots=True)
class CallWorker(GenerationLoop):
    """Generates the turns that environment workers request."""

    reads, label, aborted = "calls", "calls", "aborted_calls"
    tasks: CallTasks
    _seen: Tail | None = None
    """Reads `replies` of the owned partitions, for replies of other workers."""
    _completed: list[tuple[CallTask, Completion]] = field(default_factory=list)
    """Turns that ended and are not sent."""
    _waited_s: float = 0.0
    """Seconds without a call to generate."""

    @classmethod
    def open(cls, session: Session, engine: Engine, weights: WeightPrefetch, **shared: Any) -> "CallWorker":
        """Join the run's rollout workers; `shared` contains `device` and `shared_engine`."""
        member = session.member("calls", max_records=2048, gathers=False)
        return cls(session, engine, weights, member, session.log.producer(linger_ms=0.0), CallTasks(), **shared)

    def turn(self) -> None:
        """One iteration of the main loop. Raises `LogError` if a reply could not be sent."""
        self.producer.check()
        GenerationLoop.turn(self)

    def finishing(self) -> str:
        return f"releases its partitions, leaving {len(self.tasks.tasks)} calls without a reply (about 1 s)"

    def close(self) -> None:
        self.member.close(5.0)
        self.producer.close()
        if self._seen is not None:
            self._seen.close()

    def _assigned(self, event: Assigned) -> None:
        """Drop calls that other workers now own, and read from `replies` which of the remaining calls have one."""
        topic, replies_topic, log = self.session.topic("calls"), self.session.topic("replies"), self.session.log
        ends, owned = log.end_offsets(event.partitions), {partition: committed for (_, partition), committed in event.partitions.items()}
        if self._seen is not None:
            self._seen.close()
        starts = {partition: first for (_, partition), first in log.beginning_offsets((replies_topic, p) for p in owned).items()}
        for partition, committed in owned.items():
            if (metadata := offset_metadata.decode(CallOffsetMetadata, committed.metadata)) is not None:
                starts[partition] = max(starts[partition], metadata.replies)
            end, start = ends[topic, partition], starts[partition]
            self.tasks.assign(partition, offset=committed.offset or 0, inherited_end=end, replies_end=start)
        self._seen = log.tail({(replies_topic, partition): start for partition, start in starts.items()}) if owned else None
        self._read_replies()
        for task in self.tasks.gone():
            self._drop(task)

    def _read_replies(self) -> None:
        """Read the new records of `replies`, and drop the calls that they reply to."""
        for record in read_to_current_end(self.session.log, self._seen) if self._seen is not None else ():
            try:
                claims = replies.check(record, run=self.session.run)
            except Unusable:
                continue  # the environment workers own reading `replies`
            if (task := self.tasks.replied(record.partition, calls.key_of(claims), record.offset)) is not None:
                self._drop(task)

    def _drop(self, task: CallTask) -> None:
        """Abort a call that has a reply, or that another worker owns."""
        if self.tasks.generating.get(task.number) is task:
            self.engine.abort(task.number)
            del self.tasks.generating[task.number]
        self._completed = [(other, completion) for other, completion in self._completed if other is not task]

    def _received(self, record: Record) -> None:
        """Queue the call in a record; an unusable record becomes a dead letter."""
        self.tasks.passes(record.partition, record.offset)
        try:
            with self.session.dead_letters.decoding(record):
                claims, call = calls.read(record, run=self.session.run)
        except Unusable as error:
            self.session.dead_letters.write(record, error)
            return
        self.tasks.add(call, calls.key_of(claims), partition=record.partition, offset=record.offset)

    def _has_work(self) -> bool:
        """True if a waiting call may start under the newest weights; otherwise report what the worker waits for."""
        newest, waiting = max(self.engine.version, self.weights.version), self.tasks.waiting()
        ready = any(rules.may_start(min_version=task.call.min_version, loaded_version=newest) for task in waiting)
        if ready and not self._already_stale(newest):
            return True
        if waiting:
            self.session.reporter.doing(Activity.NO_WEIGHTS, "waiting for a version")
        else:
            self.session.reporter.doing(Activity.NO_CALLS, "waiting for calls")
        return False

    def _start(self) -> None:
        """Submit waiting calls while the engine has room, the lowest group first; a call that needs newer weights has them loaded."""
        schedule, newest = self.session.schedule, self.weights.version
        if not self.engine.has_room or not self.tasks.tasks or self._already_stale(max(self.engine.version, newest)):
            return
        waiting = self.tasks.waiting()
        if any(task.inherited for task in waiting):  # an earlier owner may have replied after the partition was assigned
            self._read_replies()
        for task in waiting:
            oldest = task.call.min_version
            if not self.engine.has_room:
                return
            if task.key not in self.tasks.tasks or not rules.may_start(min_version=oldest, loaded_version=max(self.engine.version, newest)):
                continue
            loaded = self.engine.version
            if rules.version_to_load(schedule, min_version=oldest, newest_version=newest, loaded_version=loaded) is not None:
                if not self.engine.idle and schedule.loads_at != "step":
                    return  # the weights change between calls
                if not self._load():
                    return
            self.tasks.generating[task.number] = task
            self.session.reporter.doing(Activity.BUSY, "generating")
            self.engine.submit(self._request(task))

    def _request(self, task: CallTask) -> GroupRequest:
        """The engine's request for one turn: the call's context and sampling settings, with the run's seed."""
        call = task.call
        sampling = Sampling(
            temperature=call.temperature, top_p=call.top_p, top_k=call.top_k, max_new_tokens=call.max_new_tokens,
            stop_ids=tuple(self.session.info["digests"]["stop_ids"]), seeded=bool(call.seeded),
        )  # fmt: skip
        return GroupRequest(
            group=task.number, prompt_ids=call.token_ids, samples=(0,), rows=1, seed=self.session.config.run.seed, sampling=sampling,
            stream=call.stream,
        )  # fmt: skip

    def _wait(self) -> None:
        """Wait for weights if calls need them; otherwise load a newer version, or wait for calls."""
        if any(task.sent is None for task in self.tasks.tasks.values()):
            self.weights.wait(IDLE_WAIT_S)
        elif self.weights.version > self.engine.version:
            self._load()  # the calls for it are about to come
        else:
            started = time.monotonic()
            self.session.reporter.doing(Activity.NO_CALLS, "waiting for calls")
            self._take(0.01 if self.tasks.tasks else IDLE_WAIT_S)
            self._waited_s += time.monotonic() - started

    def _decode(self) -> None:
        """Run one decode step; replies of finished turns are sent at once, because episodes wait for them."""
        GenerationLoop._decode(self)
        self._publish_completions()

    def _ended(self, completions: list[Completion]) -> None:
        for completion in completions:
            if (task := self.tasks.generating.get(completion.group)) is not None:
                self._completed.append((task, completion))

    def _publish_completions(self) -> None:
        """Send replies to the turns that have ended; one generated under a version that is not in the log yet waits for that."""
        if not self._settled or not self._completed:
            return
        completed, self._completed = self._completed, []
        session, topic = self.session, self.session.topic("replies")
        for task, completion in completed:
            if not self._may_publish([completion]):
                self._completed.append((task, completion))
                continue
            reply = reply_to(task.call, task.key.sha256, completion, worker=session.worker)
            key = str(reply.group).encode()
            with session.reporter.encoding:
                outgoing = replies.outgoing(reply, run=session.run, topic=topic, key=key, partition=task.partition)
            task.sent = self.producer.send(outgoing)
            self.tasks.generating.pop(task.number, None)
            session.reporter.add("calls")
            session.reporter.add("tokens", len(reply.token_ids))

    def _acknowledge(self) -> None:
        for task in [task for task in self.tasks.tasks.values() if task.sent is not None and task.sent.done()]:
            assert task.sent is not None
            self.tasks.replied(task.partition, task.key, task.sent.offset(0.0))

    def _measure(self) -> None:
        values = {f"engine_{name}": value for name, value in self.engine.stats().items()}
        values |= {"engine_waits_s": self._waited_s, "calls_in_hand": float(len(self.tasks.tasks))}
        self.session.reporter.values = {**self.session.reporter.values, **values}


def reply_to(call: Call, sha256: str, completion: Completion, *, worker: str) -> Reply:
    """The reply to a call; `sha256` is the digest of the call's context."""
    spans = completion.spans
    return Reply(
        group=call.group, sample=call.sample, turn=call.turn, attempt=call.attempt, sha256=sha256,
        token_ids=np.asarray(completion.token_ids, np.int32), behaviour_logprobs=np.asarray(completion.logprobs, np.float32),
        span_versions=np.array([span.version for span in spans], np.int32), span_starts=np.array([span.start for span in spans], np.int32),
        finish=completion.finish, started_ns=completion.started_ns, ended_ns=completion.ended_ns, worker=worker,
    )  # fmt: skip
