"""The environment worker: runs episodes for prompts, and requests their turns through `calls` and `replies`.

It has no model. It may be killed at any moment: its successor runs the open episodes again from their seeds, with the recorded turns.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.infra.errors import ConfigError, LogError
from penstock.infra.log import Assigned, Commits, Event, Member, Membership
from penstock.pipeline.agents.engine import TrajectoryEngine
from penstock.pipeline.runtime.factories import with_environments
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.weights.prefetch import VersionWatch
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from penstock.workers.environment.log_engine import LogEngine
from penstock.workers.rollout.group_tasks import GroupTasks
from penstock.workers.rollout.group_worker import GroupWorker
from penstock.workers.rollout.published_samples import PublishedSamples

_TAKE_S = 0.25
LOOK_EVERY_S = 0.05
"""How often groups are processed; the cost grows with the groups in flight."""


def main(session: Session) -> None:
    """Run episodes until the run is closed."""
    if not session.config.turns_by_log:
        raise ConfigError('this run needs no environment worker: set environment.carrier = "log" to run episodes in one')
    session.check_model()
    EnvironmentWorker.join(session).run()


class WakingMember:
    """A consumer whose events wake a worker that also waits for other things; its own thread polls."""

    def __init__(self, member: Member, wake: Callable[[], None]) -> None:
        self._member, self._wake = member, wake
        self._events: queue.SimpleQueue[list[Event] | LogError] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="replies")
        self._thread.start()

    @property
    def outage_s(self) -> float:
        """The member's."""
        return self._member.outage_s

    def take(self, timeout_s: float) -> list[Event]:
        """The events since the last call; waits up to `timeout_s` for the first. Raises LogError once the member has failed."""
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
        """The member's."""
        return self._member.commit(offsets)

    def membership(self) -> Membership | None:
        """The member's."""
        return self._member.membership()

    def close(self, timeout_s: float = 3.0) -> None:
        """Leave the group, within `timeout_s`."""
        self._closing.set()
        self._thread.join(_TAKE_S + timeout_s)
        self._member.close(timeout_s)

    def _follow(self) -> None:
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
    """A worker of groups whose engine is elsewhere."""

    log_engine: LogEngine = field(kw_only=True)
    _looked: float = 0.0

    @classmethod
    def join(cls, session: Session) -> "EnvironmentWorker":
        """Join the run's environment workers."""
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
        return cls(session, engine, weights, WakingMember(member, engine.wake), published, tasks, log_engine=log_engine)

    def turn(self) -> None:
        """Pass on replies at once; process groups when an episode has ended, and periodically."""
        self.weights.check()
        idle = self.engine.idle
        self._take(LOOK_EVERY_S if idle else 0.0)
        ended = [] if idle else self.engine.step()
        self._ended(ended)
        if ended or time.monotonic() - self._looked > LOOK_EVERY_S:
            super(EnvironmentWorker, self).turn()
            self._looked = time.monotonic()

    def _assigned(self, event: Assigned) -> None:
        topic = self.session.topic("replies")
        starts = {partition: committed.offset or 0 for (held, partition), committed in event.partitions.items() if held == topic}
        ends = self.session.log.end_offsets((topic, partition) for partition in starts)
        self.log_engine.recorded.assign(starts, {partition: end for (_, partition), end in ends.items()})
        super(EnvironmentWorker, self)._assigned(event)

    def _received(self, record: Record) -> None:
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

    def _marks(self) -> Commits:
        marks = dict(super(EnvironmentWorker, self)._marks())
        self.log_engine.recorded.forget(self._has_ended)
        topic = self.session.topic("replies")
        return marks | {(topic, partition): (offset, "") for partition, offset in self.log_engine.recorded.offsets()}

    def _has_ended(self, partition: int, group: int) -> bool:
        """True if no episode of a group will run: its prompt was delivered, and it is not in flight."""
        owned, task = self.tasks.partitions.get(partition), self.tasks.tasks.get(group)
        return owned is not None and group <= owned.newest and (task is None or task.done)
