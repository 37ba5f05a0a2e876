"""The evaluator: evaluates every n-th version on held-out prompts, greedy and sampled, and publishes to `metrics`.

The rule: it reads the same weights as every worker and never delays training, nor the start of a run: its engine starts once others have
drawn. To end a run early it can only ask.
"""

import os

from penstock.infra.errors import ConfigError
from penstock.pipeline.runtime.factories import make_engine
from penstock.pipeline.runtime.generation.evaluation.evaluations import Evaluations
from penstock.pipeline.runtime.ledger_follower import LedgerFollower
from penstock.pipeline.runtime.session import Session
from penstock.topics.metrics import Activity


def main(session: Session) -> None:
    """Evaluate versions until the run is closed and its last version is evaluated."""
    os.nice(5)  # on a busy machine rollouts and training come first
    if not session.config.eval_sources:
        raise ConfigError("this run has no eval.source, so there is nothing to evaluate")
    if session.config.evaluates_on_rollout_engine:
        raise ConfigError('this run has nothing for an evaluator: with eval.engine = "rollout" a rollout worker evaluates')
    _await_samples(session)
    if session.stop.is_set():
        return
    session.reporter.doing(Activity.START, "loading the model", now=True)
    engine = make_engine(session.config)
    evaluations = Evaluations.open(session, engine, meanwhile=session.reporter.status)
    session.finishing = lambda: "drops the evaluation under way, which is made again when the run is resumed (a few s)"
    session.reporter.ready()
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
    """Wait until a sample is drawn, the run is closed, or the worker is asked to stop.

    Until then the engine of a rollout worker and the trainer start, and on few cores another engine's start would hold them up.
    """
    partitions = [(session.topic("rollouts"), partition) for partition in range(session.config.partitions)]
    follower = LedgerFollower(session.log, session.run)
    while not session.stop.is_set() and follower.state.closed is None and not any(session.log.end_offsets(partitions).values()):
        session.reporter.doing(Activity.NO_SAMPLES, "waiting for the first samples")
        session.reporter.status()
        follower.poll(0.2)
    follower.close()
