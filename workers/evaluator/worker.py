"""The evaluator: evaluates every n-th version on held-out prompts, greedy and sampled, and publishes to `metrics`.

It never delays training or the start of a run: its engine starts after the first samples. It can only request the end of a run.
"""

import os

from penstock.infra.errors import ConfigError
from penstock.pipeline.runtime.factories import make_engine
from penstock.pipeline.runtime.ledger_follower import LedgerFollower
from penstock.pipeline.runtime.session import Session
from penstock.topics.metrics import Activity
from penstock.workers.evaluator.evaluator import Evaluations


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
        elif evaluations.closed:
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
