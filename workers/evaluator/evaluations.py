"""The evaluations of a run: each version that is due, in order, once.

Results are in `metrics`, where another worker continues after them. Early stopping reads evaluations, and requests the end, in the
control topic of the evaluating role, which no other role may write.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from penstock.infra.engines.base import Engine
from penstock.infra.errors import RecordMissing
from penstock.pipeline.runtime.ledger_follower import LedgerFollower, LedgerState
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.topic_reader import scan
from penstock.pipeline.runtime.weights.read import fetch
from penstock.topics import metrics
from penstock.topics.catalogue import control_topic
from penstock.topics.metrics import Activity
from penstock.topics.wire.errors import Unusable
from penstock.workers.evaluator.accuracy import EarlyStopping, due
from penstock.workers.evaluator.evaluator import Evaluator


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
        """Continue after the completed evaluations; `meanwhile` is called between two decode steps."""
        eval_config = session.config.eval
        every_version = LedgerState(session.run)  # those that are due may be far behind the newest
        follower, stopping = (
            LedgerFollower(session.log, session.run, every_version),
            EarlyStopping(eval_config.target, eval_config.patience),
        )
        evaluations = cls(session, follower, Evaluator.open(session, engine, meanwhile=meanwhile), stopping, set())
        evaluations.read_done()
        return evaluations

    @property
    def closed(self) -> bool:
        """True if the run is closed, as far as was read."""
        return self.follower.state.closed is not None

    @property
    def due(self) -> int | None:
        """The next version to evaluate, of those that were read; None if there is none."""
        newest, last = self.follower.state.newest_version, int(self.session.info["versions"])
        return due(newest=newest, last=last, every=self.session.config.eval.every, done=self.done, closed=self.closed)

    def read_done(self) -> None:
        """Read which versions were evaluated, by any worker; each evaluation of this role counts once for early stopping."""
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
        """Evaluate a version and publish its measures; none if its weights were deleted, or a stop was requested."""
        session = self.session
        self.done.add(version)
        session.reporter.doing(Activity.COMPUTE, f"evaluating version {version}", now=True)
        try:
            tensors = fetch(session.log, self.follower.state.manifests, version, run=session.run)
        except RecordMissing as error:
            session.reporter.notify(f"version {version} is not evaluated: its weights were deleted (weights.keep): {error}")
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
        """Close everything but the engine."""
        self.evaluator.close()
        self.follower.close()
