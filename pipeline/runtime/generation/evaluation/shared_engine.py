"""A drawing worker's engine, lent to the run's evaluations: `eval.engine = "rollout"`.

The rule: one worker lends at a time, the one that owns partition 0 of what it draws. While an evaluation is due it begins nothing new;
once its engine is idle the version is loaded and evaluated, and the next prompt brings the newest weights back.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.infra.engines.base import Engine
from penstock.pipeline.runtime.generation.evaluation.evaluations import Evaluations
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.session import Session
from penstock.topics.metrics import Activity


@dataclass(slots=True)
class SharedEngine:
    """What is evaluated on an engine that also draws for training."""

    session: Session
    engine: Engine
    news: LedgerState
    """What the worker knows of the run: only when it changes is there something new to evaluate."""
    playing: Callable[[Engine], Engine] = field(default=lambda engine: engine)
    """Makes of the engine one that draws what is held out: where that is trajectories, one that plays them on it."""
    _evaluations: Evaluations | None = None
    _lends: bool = False
    _seen: tuple[int, bool] | None = None

    def takes(self, *, lends: bool, idle: bool, meanwhile: Callable[[], None]) -> bool:
        """Whether an evaluation is due on this worker, which begins nothing new until it is made; made at once on an `idle` engine."""
        if lends and not self._lends:  # another worker may have evaluated since
            self._look_again(meanwhile)
        self._lends = lends
        if not lends or self._evaluations is None:
            return False
        now = self.news.newest_version, self.news.closed is not None
        if now != self._seen:
            self._evaluations.follower.catch_up()
            self._seen = now
        version = self._evaluations.due
        if version is None:
            return False
        if idle:
            self._evaluations.make(version)
        elif not self.engine.idle:
            self.session.reporter.doing(Activity.BUSY, f"ends its samples in hand, to evaluate version {version}")
        return True

    def close(self) -> None:
        """End what was started for evaluations, and the engine."""
        if self._evaluations is not None:
            self._evaluations.close()
        self.engine.close()  # one that plays on the worker's own closes that, too

    def _look_again(self, meanwhile: Callable[[], None]) -> None:
        if self._evaluations is None:
            self.engine = self.playing(self.engine)
            self._evaluations = Evaluations.open(self.session, self.engine, meanwhile=meanwhile)
        else:
            self._evaluations.read_done()
