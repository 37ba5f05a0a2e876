"""The loop of a worker that draws with an engine: samples of groups, or single turns of trajectories.

The rule: records arrive, weights load and replies go out only between two decode steps; while the consumer group rebalances the worker
draws on and publishes nothing. A worker that shares its device takes it when it has something to draw, and hands it over when another
process wants it and what it has in hand has ended.
"""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal

from penstock.infra.engines.base import Completion, Engine
from penstock.infra.engines.shared_device import POLL_S as DEVICE_POLL_S
from penstock.infra.engines.shared_device import SharedDevice
from penstock.infra.log import Assigned, Member, Records, Revoked
from penstock.pipeline.runtime.generation.evaluation.shared_engine import SharedEngine
from penstock.pipeline.runtime.generation.weight_prefetch import WeightPrefetch
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.scheduling import rules
from penstock.topics.metrics import Activity
from penstock.topics.wire.record import Record

COMMIT_EVERY_S = 0.5

MEASURE_EVERY_S = 1.0


@dataclass(slots=True)
class GenerationLoop(ABC):
    """What such workers have in common; a subclass defines what it draws and how it publishes that."""

    session: Session
    engine: Engine
    weights: WeightPrefetch
    member: Member
    _settled: bool = field(default=False, init=False)
    """True while this worker knows which partitions are its own: not while the consumer group rebalances."""
    _committed: float = field(default=0.0, init=False)
    _measured: float = field(default=0.0, init=False)
    _lends: bool = field(default=False, init=False)
    """Whether evaluations take this worker's engine, if any worker's."""
    shared_engine: SharedEngine | None = field(default=None, init=False)
    """Evaluations on this engine; None where they have one of their own."""
    device: SharedDevice | None = field(default=None, init=False)
    """What this worker shares with the trainer; None where its device is its own."""

    def run(self) -> None:
        """Draw until the run is closed or the worker is asked to stop; hands back what is unfinished."""
        session = self.session
        session.finishing = self.finishing
        session.reporter.outage = lambda: self.member.outage_s
        session.reporter.ready()
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
        """Take what arrived, publish what ended, load what is newer, start what may start, decode one step, commit what is done."""
        self._exchange()
        use = self._device_use()
        if use != "none":
            self._refresh()
        if use == "begin" and not self._evaluates(idle=self.engine.idle):
            self._start()
        if use == "none":
            self._take(DEVICE_POLL_S)
        elif not self.engine.idle:
            self._decode()
        elif use == "begin":
            self._wait()
        self._commit_done()
        if time.monotonic() - self._measured > MEASURE_EVERY_S:
            self._measure()
        self.session.reporter.status()

    def _device_use(self) -> Literal["none", "end", "begin"]:
        """What the device may be used for: to begin something, to end what is in hand because another process waits, or for nothing.

        Who has just taken the device begins what it has room for, however many wait: else it would have woken for nothing.
        """
        device = self.device
        if device is None:
            return "begin"
        if device.owned and device.contended:
            if not self.engine.idle:
                return "end"
            self.session.reporter.doing(Activity.NO_DEVICE, "handing the device over", now=True)
            device.release()
        if device.owned:
            return "begin"
        if self._evaluates(idle=False) or self._has_work():
            self.session.reporter.doing(Activity.NO_DEVICE, "waiting for the device")
            return "begin" if device.acquire() else "none"
        device.leave_queue()
        return "none"

    def _evaluates(self, *, idle: bool) -> bool:
        """Whether an evaluation has, or waits for, this worker's engine."""
        return self.shared_engine is not None and self.shared_engine.takes(lends=self._lends, idle=idle, meanwhile=self._keep_up)

    def _keep_up(self) -> None:
        """What goes on while the engine is lent: partitions, what was drawn before, commits."""
        self._exchange()
        self._commit_done()
        self.session.reporter.status()

    def _exchange(self) -> None:
        """Take what arrived and publish what ended."""
        self.weights.check()
        self._take(0.0)
        self._publish_completions()

    def _commit_done(self) -> None:
        """Note what is acknowledged, and commit it now and then."""
        self._acknowledge()
        if time.monotonic() - self._committed > COMMIT_EVERY_S:
            self._commit()

    def _evaluate_last(self) -> None:
        """Once the run is closed: make what is still due; a worker that was started after that learns first whether it lends its engine."""
        stop = self.session.stop
        while self.shared_engine is not None and not self._settled and not stop.is_set():
            self._take(1.0)
            self.session.reporter.status()
        while not stop.is_set() and self._evaluates(idle=False):
            if self.device is not None and not self.device.wait(stop, meanwhile=self.session.reporter.status):
                return
            self._evaluates(idle=True)

    @abstractmethod
    def drain_samples(self) -> None:
        """Publish what ended and commit what is acknowledged, so that the next owner draws only what is missing."""

    @abstractmethod
    def finishing(self) -> str:
        """What is still done after a request to stop."""

    @abstractmethod
    def close(self) -> None:
        """Leave the other workers of this role."""

    @abstractmethod
    def _assigned(self, event: Assigned) -> None:
        """Drop what others own now, and learn what of the own partitions is drawn already."""

    @abstractmethod
    def _revoke(self) -> None:
        """Hold what is in hand until it is known who owns it."""

    @abstractmethod
    def _received(self, record: Record) -> None: ...

    @abstractmethod
    def _publish_completions(self) -> None:
        """Send what ended, while this worker knows which partitions are its own."""

    @abstractmethod
    def _refresh(self) -> None:
        """Between two decode steps: load the newest weights if the schedule says so, and end what can no longer be fresh."""

    @abstractmethod
    def _has_work(self) -> bool:
        """Whether something could be begun under the weights that are here; says what is missing if not."""

    @abstractmethod
    def _start(self) -> None:
        """Give the engine what it has room for."""

    @abstractmethod
    def _wait(self) -> None:
        """Nothing can be drawn: wait for what is missing."""

    @abstractmethod
    def _ended(self, completions: list[Completion]) -> None:
        """Keep what the engine returned."""

    @abstractmethod
    def _acknowledge(self) -> None:
        """Note which records the log has acknowledged."""

    @abstractmethod
    def _commit(self) -> None:
        """Commit up to where everything is acknowledged."""

    @abstractmethod
    def _measure(self) -> None:
        """Report the engine's counts."""

    def _take(self, wait_s: float) -> None:
        for event in self.member.take(wait_s):
            match event:
                case Assigned():
                    self.session.dead_letters.on_rebalance()
                    self._lends = any(partition == 0 for _, partition in event.partitions)
                    self._assigned(event)
                case Revoked():
                    self._revoke()
                    self._settled = False
                case Records():
                    for record in event.records:
                        self._received(record)

    def _already_stale(self, version: int) -> bool:
        """Whether samples drawn under `version` can no longer be fresh; the newest *announced* version counts, fetched or not."""
        newest, max_lag = self.weights.state.newest_version, self.session.schedule.max_lag
        return rules.will_be_stale(newest_version=newest, policy_version_min=version, max_lag=max_lag)

    def _load(self) -> bool:
        """Load the newest weights that are here into the engine; False if a newer whole version is coming in their place just now."""
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
        """One decode step."""
        started = time.monotonic()
        completions = self.engine.step()
        self.session.reporter.add("generate_s", time.monotonic() - started)
        self._ended(completions)
