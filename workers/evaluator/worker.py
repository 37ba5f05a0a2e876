"""The evaluator: evaluates every n-th version on held-out prompts, greedy and sampled, and publishes to `metrics`.

It never delays training or the start of a run: its engine starts after the first samples. It can only request the end of a run.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass

from penstock.infra.engines.base import Engine
from penstock.infra.errors import ConfigError, RecordMissing
from penstock.pipeline.learner.evaluation import Evaluator
from penstock.pipeline.runtime.factories import make_engine
from penstock.pipeline.runtime.ledger_follower import LedgerFollower, LedgerState
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.topic_reader import scan
from penstock.pipeline.runtime.weights.read import fetch
from penstock.topics import metrics
from penstock.topics.catalogue import control_topic
from penstock.topics.metrics import Activity
from penstock.topics.wire.errors import Unusable


def due(*, newest: int, last: int, every: int, done: set[int], closed: bool) -> int | None:
    """The next version to evaluate, or None: version 0 first, then every n-th in order, and always the last one.

    Once the run is closed, intermediate versions that were not reached are skipped.
    """
    if 0 not in done and newest >= 0:
        return 0
    if closed:
        return newest if newest not in done and newest > 0 else None
    versions = [version for version in range(every, newest + 1, every) if version not in done]
    if last <= newest and last not in done:
        versions.append(last)
    return min(versions, default=None)


@dataclass(slots=True)
class EarlyStopping:
    """Requests the end of a run once a target is reached or accuracy no longer improves."""

    target: float | None
    patience: int | None
    best: float = -math.inf
    best_version: int | None = None
    since_best: int = 0

    def note(self, *, version: int, accuracy: float | None) -> str | None:
        """Record a version's greedy accuracy; return why the run should end, or None to continue. An accuracy of None is ignored."""
        if accuracy is None:
            return None
        if accuracy > self.best:
            self.best, self.best_version, self.since_best = accuracy, version, 0
        else:
            self.since_best += 1
        if self.target is not None and accuracy >= self.target:
            return f"greedy accuracy {accuracy:.3f} of version {version} reached the target {self.target:g}"
        if self.patience is not None and self.since_best >= self.patience:
            return f"{self.since_best} evaluations since the best greedy accuracy, {self.best:.3f} of version {self.best_version}"
        return None


@dataclass(slots=True)
class Evaluations:
    """The completed evaluations of a run, and the next one."""

    session: Session
    follower: LedgerFollower
    evaluator: Evaluator
    stopping: EarlyStopping
    done: set[int]

    @classmethod
    def open(cls, session: Session, engine: Engine, *, meanwhile: Callable[[], None]) -> "Evaluations":
        """Open the evaluator, and read from `metrics` which versions have been evaluated; `meanwhile` is called between decode steps."""
        every_version = LedgerState(session.run)  # those that are due may be far behind the newest
        follower = LedgerFollower(session.log, session.run, every_version)
        stopping = EarlyStopping(session.config.eval.target, session.config.eval.patience)
        evaluator = Evaluator.open(
            session.config, session.info, engine, run=session.run, notify=session.reporter.notify, stopped=session.stop.is_set,
            meanwhile=meanwhile,
        )  # fmt: skip
        evaluations = cls(session, follower, evaluator, stopping, set())
        evaluations.read_done()
        return evaluations

    @property
    def due(self) -> int | None:
        """The next version to evaluate according to the records read so far; None if there is none."""
        state, last = self.follower.state, int(self.session.info["versions"])
        closed = state.closed is not None
        return due(newest=state.newest_version, last=last, every=self.session.config.eval.every, done=self.done, closed=closed)

    def read_done(self) -> None:
        """Read which versions any worker has evaluated; early stopping uses each evaluation by this role once."""
        run, counted = self.session.run, set[int]()
        own = control_topic(run, self.session.role)
        for record in scan(self.session.log, self.session.topic("metrics"), own):
            try:
                measurement = metrics.read(record, run=run)[1]
            except Unusable:
                continue  # the tracker owns reading `metrics`
            version = measurement.version
            if measurement.kind != "eval" or version is None:
                continue
            self.done.add(version)
            if record.topic == own and version not in counted:
                counted.add(version)
                self.stopping.note(version=version, accuracy=measurement.values.get("greedy_accuracy"))

    def make(self, version: int) -> None:
        """Evaluate a version and publish the result, unless its weights were deleted or a stop is requested."""
        session = self.session
        self.done.add(version)
        session.reporter.doing(Activity.COMPUTE, f"evaluating version {version}", now=True)
        try:
            tensors = fetch(session.log, self.follower.state.manifests, version, run=session.run)
        except RecordMissing as error:
            session.reporter.notify(f"version {version} was not evaluated, because its weights were deleted (weights.keep): {error}")
            return
        values = self.evaluator.evaluate(version, tensors)
        if values is None:
            return
        reason = self.stopping.note(version=version, accuracy=values.get("greedy_accuracy"))
        labels = {"source": ", ".join(session.config.eval_sources)} | ({"ask": "stop", "reason": reason} if reason else {})
        labels["examples"] = json.dumps(self.evaluator.examples)
        values["best_version"] = float(self.stopping.best_version or 0)
        session.reporter.send(kind="eval", values=values, labels=labels, version=version, control=True)

    def close(self) -> None:
        self.evaluator.close()
        self.follower.close()


@dataclass(slots=True)
class SharedEngine:
    """Evaluates on an engine that also generates training samples."""

    session: Session
    engine: Engine
    state: LedgerState
    """The worker's view of the run: a new evaluation can only be due when it has changed."""
    wrap: Callable[[Engine], Engine] | None = None
    """Makes an engine that runs held-out episodes; None if `engine` generates held-out samples itself."""
    _evaluations: Evaluations | None = None
    _shares: bool = False
    _seen: tuple[int, bool] | None = None

    def takes(self, *, shares: bool, idle: bool, meanwhile: Callable[[], None]) -> bool:
        """Run the next evaluation if one is due and the engine is `idle`; True if one was due, so that the worker must start no group.

        `shares`: evaluations run on this worker's engine, as on one rollout worker at a time. `meanwhile` is called between decode steps.
        """
        if shares and not self._shares:
            if self._evaluations is not None:
                self._evaluations.read_done()  # another worker may have evaluated since
            else:
                self.engine = self.engine if self.wrap is None else self.wrap(self.engine)
                self._evaluations = Evaluations.open(self.session, self.engine, meanwhile=meanwhile)
        self._shares = shares
        if not shares or self._evaluations is None:
            return False
        now = self.state.newest_version, self.state.closed is not None
        if now != self._seen:
            self._evaluations.follower.catch_up()
            self._seen = now
        version = self._evaluations.due
        if version is None:
            return False
        if idle:
            self._evaluations.make(version)
        elif not self.engine.idle:
            self.session.reporter.doing(Activity.BUSY, f"finishing the samples in flight, to evaluate version {version}")
        return True

    def close(self) -> None:
        if self._evaluations is not None:
            self._evaluations.close()
        self.engine.close()  # a wrapper closes the engine that it wraps


def main(session: Session) -> None:
    """Evaluate versions until the run is closed and its last version is evaluated."""
    os.nice(5)  # on a busy machine rollouts and training come first
    if not session.config.eval_sources:
        raise ConfigError("this run has no use for an evaluator, because eval.source is not set")
    if session.config.evaluates_on_rollout_engine:
        raise ConfigError('this run has no use for an evaluator: with eval.engine = "rollout" a rollout worker evaluates')
    _await_samples(session)
    if session.stop.is_set():
        return
    session.reporter.doing(Activity.START, "loading the model", now=True)
    engine = make_engine(session.config)
    evaluations = Evaluations.open(session, engine, meanwhile=session.reporter.status)
    session.ready(finishing=lambda: "drops the current evaluation, which is repeated when the run is resumed (a few s)")
    while not session.stop.is_set():
        evaluations.follower.poll(0.2)
        session.reporter.status()
        version = evaluations.due
        if version is not None:
            evaluations.make(version)
        elif evaluations.follower.state.closed is not None:
            break
        else:
            session.reporter.doing(Activity.NO_WEIGHTS, "waiting for a version to evaluate")
    evaluations.close()
    engine.close()


def _await_samples(session: Session) -> None:
    """Wait until a sample exists, the run is closed, or a stop is requested.

    Until then the rollout engine and the trainer start, and another engine's start would delay them on few cores.
    """
    partitions = [(session.topic("rollouts"), partition) for partition in range(session.config.partitions)]
    follower = LedgerFollower(session.log, session.run)
    while not session.stop.is_set() and follower.state.closed is None and not any(session.log.end_offsets(partitions).values()):
        session.reporter.doing(Activity.NO_SAMPLES, "waiting for the first samples")
        session.reporter.status()
        follower.poll(0.2)
    follower.close()
