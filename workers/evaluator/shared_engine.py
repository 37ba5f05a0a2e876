"""Runs evaluations on a rollout worker's engine: `eval.engine = "rollout"`.

Only the worker that owns partition 0 evaluates. While an evaluation is due it starts no new groups; once its engine is idle it loads and
evaluates the version, and the next prompt loads the newest weights again.
"""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.infra.engines.base import Engine
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.session import Session
from penstock.topics.metrics import Activity
from penstock.workers.evaluator.evaluator import Evaluations


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
        """True if an evaluation is due on this worker, which must start no new groups; it runs at once if the engine is `idle`."""
        if shares and not self._shares:  # another worker may have evaluated since
            self._open_or_refresh(meanwhile)
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

    def _open_or_refresh(self, meanwhile: Callable[[], None]) -> None:
        if self._evaluations is None:
            self.engine = self.engine if self.wrap is None else self.wrap(self.engine)
            self._evaluations = Evaluations.open(self.session, self.engine, meanwhile=meanwhile)
        else:
            self._evaluations.read_done()
