"""Base of the workers that own an engine: they generate samples of groups, or single turns of episodes.

Between two decode steps records are read, weights load and results are sent. During a rebalance the worker generates on and publishes
nothing. A worker that shares its device acquires it when it has work, and releases it when another process waits and nothing is in
flight.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from penstock.infra.engines.base import Completion, Engine
from penstock.infra.engines.shared_device import POLL_S as DEVICE_POLL_S
from penstock.infra.engines.shared_device import SharedDevice
from penstock.infra.log import Assigned, Commits, Member, Producer, Records, Revoked
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.weights.receive import WeightPrefetch
from penstock.pipeline.scheduling import rules
from penstock.topics.metrics import Activity
from penstock.topics.wire.record import Record
from penstock.workers.evaluator.worker import SharedEngine

COMMIT_EVERY_S = 0.5

MEASURE_EVERY_S = 1.0


class Tasks(Protocol):
    """The work in all partitions that a worker owns."""

    def revoke(self) -> None:
        """Forget all partitions until the new owners of the work in flight are determined."""

    def watermarks(self) -> dict[int, tuple[int, str]]:
        """Partition -> (offset, metadata) to commit: its first record without an acknowledged result; only those that have moved."""
        ...


@dataclass(slots=True)
class GenerationLoop(ABC):
    """Loop of a worker with an engine; subclasses define what is generated and how it is published."""

    reads: ClassVar[str]
    """Topic of the work."""
    label: ClassVar[str]
    """Label of the worker's status for the owned partitions."""
    aborted: ClassVar[str]
    """Counter of what was aborted as stale."""
    session: Session
    engine: Engine
    weights: WeightPrefetch
    member: Member
    producer: Producer
    tasks: Tasks
    _settled: bool = field(default=False, init=False)
    """True while this worker knows its partitions: False during a rebalance."""
    _committed: float = field(default=0.0, init=False)
    _measured: float = field(default=0.0, init=False)
    _checked_version: int = field(default=-1, init=False)
    """The newest version at the last check of groups in flight for staleness."""
    _shares: bool = field(default=False, init=False)
    """True if evaluations use this worker's engine, if any engine of a rollout worker."""
    shared_engine: SharedEngine | None = field(default=None, kw_only=True)
    """Runs evaluations on this engine; None if they have an engine of their own."""
    device: SharedDevice | None = field(default=None, kw_only=True)
    """Shared with the trainer; None if the worker has a device of its own."""

    def run(self) -> None:
        """Generate until the run is closed or a stop is requested; then release unfinished work."""
        session = self.session
        session.ready(finishing=self.finishing, outage=lambda: self.member.outage_s)
        try:
            while self.weights.state.closed is None and not session.stop.is_set():
                self.turn()
            self.drain_samples()
            self._evaluate_last()
        finally:
            self.close()
            self.weights.close()
            (self.shared_engine or self.engine).close()
            if self.device is not None:
                self.device.close()

    def turn(self) -> None:
        """One iteration of the main loop: read records, publish finished samples, load newer weights, fill the engine, decode one step."""
        self._exchange()
        use = self._device_use()
        if use != "none":
            self._refresh()
        if use == "start" and not self._evaluates(idle=self.engine.idle):
            self._start()
        if use == "none":
            self._take(DEVICE_POLL_S)
        elif not self.engine.idle:
            self._decode()
        elif use == "start":
            self._wait()
        self._commit_done()
        if time.monotonic() - self._measured > MEASURE_EVERY_S:
            self._measured = time.monotonic()
            self._measure()
        self.session.reporter.status()

    def _device_use(self) -> Literal["none", "end", "start"]:
        """Return what this worker may do with the device that it shares with the trainer, acquiring or releasing it as needed.

        "start": start new groups; always without a shared device. "end": only finish those in flight, because another process waits.
        "none": nothing. A worker that has just acquired the device always fills its free slots first.
        """
        device = self.device
        if device is None:
            return "start"
        if device.owned and device.contended:
            if not self.engine.idle:
                return "end"
            self.session.reporter.doing(Activity.NO_DEVICE, "releasing the device", now=True)
            device.release()
        if device.owned:
            return "start"
        if self._evaluates(idle=False) or self._has_work():
            self.session.reporter.doing(Activity.NO_DEVICE, "waiting for the device")
            return "start" if device.acquire() else "none"
        device.leave_queue()
        return "none"

    def _evaluates(self, *, idle: bool) -> bool:
        """True if an evaluation is due on this worker's engine; with `idle`, the engine generates nothing and the evaluation runs now."""
        return self.shared_engine is not None and self.shared_engine.takes(shares=self._shares, idle=idle, meanwhile=self._keep_up)

    def _keep_up(self) -> None:
        """Do the loop's work apart from generating, between the decode steps of an evaluation."""
        self._exchange()
        self._commit_done()
        self.session.reporter.status()

    def _exchange(self) -> None:
        """Read new records and publish finished samples. Raises an error of the thread that fetches weights."""
        self.weights.check()
        self._take(0.0)
        self._publish_completions()

    def _commit_done(self) -> None:
        """Record acknowledgements; commit at most every COMMIT_EVERY_S."""
        self._acknowledge()
        if time.monotonic() - self._committed > COMMIT_EVERY_S:
            self._commit()

    def _evaluate_last(self) -> None:
        """After the run is closed: run the evaluations that are due; a worker that joined later first waits for its partitions."""
        stop = self.session.stop
        while self.shared_engine is not None and not self._settled and not stop.is_set():
            self._take(1.0)
            self.session.reporter.status()
        while not stop.is_set() and self._evaluates(idle=False):
            if self.device is not None and not self.device.wait(stop, meanwhile=self.session.reporter.status):
                return
            self._evaluates(idle=True)

    def drain_samples(self) -> None:
        """Publish what is finished and commit offsets before the worker exits, so that the next owner generates only what is missing."""
        self._publish_completions()
        self.producer.flush(10.0)
        self._acknowledge()
        self._commit()
        self._measure()
        self.session.reporter.labels[self.label] = ""

    @abstractmethod
    def finishing(self) -> str:
        """Describe the remaining work after a stop request."""

    @abstractmethod
    def close(self) -> None:
        """Leave the consumer group."""

    @abstractmethod
    def _assigned(self, event: Assigned) -> None:
        """Drop what other workers now own, and find out which results for the owned partitions are in the log."""

    @abstractmethod
    def _received(self, record: Record) -> None:
        """Queue the work in a record; an unusable record becomes a dead letter."""

    @abstractmethod
    def _publish_completions(self) -> None:
        """Send finished samples or replies, if this worker's partitions are assigned."""

    @abstractmethod
    def _has_work(self) -> bool:
        """True if something could start under the available weights; reports what is missing if not."""

    @abstractmethod
    def _start(self) -> None:
        """Fill the engine with new work."""

    @abstractmethod
    def _wait(self) -> None:
        """Wait for records or weights, because nothing can be generated."""

    @abstractmethod
    def _ended(self, completions: list[Completion]) -> None:
        """Store completions that the engine has returned."""

    @abstractmethod
    def _acknowledge(self) -> None:
        """Record which of the sent records the log has acknowledged."""

    @abstractmethod
    def _measure(self) -> None:
        """Report the engine's counters."""

    def _commit(self) -> None:
        self._committed = time.monotonic()
        if offsets := self._offsets_to_commit():
            self.member.commit(offsets)

    def _offsets_to_commit(self) -> Commits:
        topic = self.session.topic(self.reads)
        return {(topic, partition): commit for partition, commit in self.tasks.watermarks().items()}

    def _refresh(self) -> None:
        """Under a schedule that loads between decode steps: load newer weights, and abort what would be stale."""
        schedule = self.session.schedule
        if schedule.loads_at != "step":
            return
        if self.weights.version > self.engine.version and not self.engine.idle:
            self._load()
        newest = self.weights.state.newest_version
        if schedule.stale_in_hand == "abort" and (newest > self._checked_version or self._already_stale(self.engine.version)):
            self._checked_version = newest
            for group in self.engine.groups_in_flight():
                if group.oldest_version is not None and self._already_stale(group.oldest_version):
                    self._ended(self.engine.abort(group.group))
                    self.session.reporter.add(self.aborted)

    def _take(self, wait_s: float) -> None:
        """Apply assignments, revocations and records that arrive within `wait_s`."""
        for event in self.member.take(wait_s):
            match event:
                case Assigned():
                    self.session.dead_letters.on_rebalance()
                    self._shares = any(partition == 0 for _, partition in event.partitions)
                    self._assigned(event)
                    self._settled = True
                    owned = sorted(partition for topic, partition in event.partitions if topic == self.session.topic(self.reads))
                    self.session.reporter.labels[self.label] = ",".join(map(str, owned))
                    self.session.reporter.status(force=True)
                case Revoked():
                    self.tasks.revoke()
                    self._settled = False
                case Records():
                    for record in event.records:
                        self._received(record)

    def _already_stale(self, version: int) -> bool:
        """True if samples generated under `version` would be stale at the newest published version, whether it is fetched or not."""
        newest, max_lag = self.weights.state.newest_version, self.session.schedule.max_lag
        return rules.will_be_stale(newest_version=newest, policy_version_min=version, max_lag=max_lag)

    def _may_publish(self, completions: Iterable[Completion]) -> bool:
        """True if every version that generated tokens of these completions is in the log."""
        published = self.weights.published()
        return all(span.version <= published for completion in completions for span in completion.spans)

    def _load(self) -> bool:
        """Load the newest fetched weights into the engine; False if none is newer than its own, as while one is being fetched."""
        with self.weights.taken() as (version, tensors):
            if version <= self.engine.version:
                return False
            started = time.monotonic()
            if self.engine.idle:
                self.session.reporter.doing(Activity.LOAD, f"loading version {version}")
            self.engine.load_weights(version, tensors)
        self.session.reporter.add("load_s", time.monotonic() - started)
        self.session.reporter.values["version"] = version
        return True

    def _decode(self) -> None:
        """Run one decode step of the engine, and store the completions that end with it."""
        started = time.monotonic()
        completions = self.engine.step()
        self.session.reporter.add("generate_s", time.monotonic() - started)
        self._ended(completions)
