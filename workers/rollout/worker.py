"""The rollout worker: generates groups of samples, or single turns if environments have workers of their own."""

from functools import partial

from penstock.infra.engines.shared_device import Sleepable
from penstock.pipeline.runtime.factories import make_engine, open_device, with_environments
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.weights.receive import WeightPrefetch
from penstock.topics.metrics import Activity
from penstock.workers.evaluator.shared_engine import SharedEngine
from penstock.workers.rollout.call_worker import CallWorker
from penstock.workers.rollout.group_worker import GroupWorker


def main(session: Session) -> None:
    """Generate samples until the run is closed."""
    session.check_model()
    device = open_device(session.config, session.run)
    if device is not None:
        session.reporter.doing(Activity.NO_DEVICE, "waiting for the device", now=True)
        if not device.wait(session.stop, meanwhile=session.reporter.status):
            return
    session.reporter.doing(Activity.START, "loading the model", now=True)
    by_log = session.config.turns_by_log
    engine = make_engine(session.config, episodes=False, sleeps=device is not None)
    if device is not None:
        assert isinstance(engine, Sleepable)
        device.model = engine
    if session.config.environment.source is not None and not by_log:
        engine = with_environments(engine, session.config, notify=session.reporter.notify)
    settings = session.config.weights
    weights = WeightPrefetch(
        session.log, session.run, notify=session.reporter.notify, shared=settings.shared, direct=settings.transport == "ipc"
    )
    shared_engine = None
    if session.config.evaluates_on_rollout_engine:
        wrap = partial(with_environments, config=session.config, notify=session.reporter.notify) if by_log else None
        shared_engine = SharedEngine(session, engine, weights.state, wrap)
    (CallWorker if by_log else GroupWorker).open(session, engine, weights, device=device, shared_engine=shared_engine).run()
