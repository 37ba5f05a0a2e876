"""A thread that brings points to MLflow, however often the server goes away.

The rule: nobody waits for MLflow, and no point is lost: what is not delivered is still in the log, where the next tracker finds it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from infra.errors import TrackingError
from infra.tracking import MAX_POINTS, MlflowRun, Point, Target, without_credentials

LONGEST_PAUSE_S = 15.0
GATHER_S = 2.0
"""Points of so long go into one request, which costs as much as a single one."""


class Uploader:
    """Brings points to MLflow from a thread of its own, with growing pauses while the server does not answer."""

    def __init__(self, target: Target, *, say: Callable[[str], None]) -> None:
        self.shown_uri = without_credentials(target.uri)
        self.run_id: str | None = None
        self._target, self._say = target, say
        self._waiting: deque[tuple[str, int, tuple[Point, ...]]] = deque()
        self._changed = threading.Condition()
        self._ending: tuple[str, tuple[Path, ...]] | None = None
        self._done = False
        self.failing = False
        """Whether MLflow refused or did not answer the last time."""
        self._mlflow_run: MlflowRun | None = None
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Points that MLflow has not got yet."""
        with self._changed:
            return sum(len(points) for _, _, points in self._waiting)

    def put(self, points: Sequence[Point], *, source: str, number: int) -> None:
        """Hand over what the record `number` of `source` says; dropped when MLflow has got it in an earlier life."""
        with self._changed:
            self._waiting.append((source, number, tuple(points)))
            self._changed.notify()

    def wait_for_run(self, timeout_s: float) -> str | None:
        """The MLflow run's id, as soon as the server has answered."""
        with self._changed:
            self._changed.wait_for(lambda: self.run_id is not None, timeout_s)
            return self.run_id

    def finish(self, status: str, *, artifacts: Sequence[Path]) -> None:
        """Deliver what is left, attach the files, set the status, and end; `wait` tells when that is done."""
        with self._changed:
            self._ending = (status, tuple(artifacts))
            self._changed.notify()

    def wait(self, timeout_s: float) -> bool:
        """Whether everything was delivered and the run ended, at the latest after so long."""
        self._thread.join(timeout_s)
        return self._done

    def _work(self) -> None:
        pause = 0.5
        while not self._done:
            try:
                self._advance()
            except TrackingError as error:
                if not self.failing:
                    self._say(f"{error}; the run goes on, and its points wait in the log")
                self.failing = True
                self._pause(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                continue
            if self.failing:
                self._say(f"MLflow at {self.shown_uri} answers again")
            pause, self.failing = 0.5, False

    def _pause(self, seconds: float) -> None:
        """Wait before the next try; asked to end, it tries on at once: the caller has set a limit."""
        with self._changed:
            if self._ending is None and self._changed.wait_for(lambda: self._ending, seconds):
                return
        time.sleep(min(seconds, 0.5))

    def _advance(self) -> None:
        """One step towards MLflow having everything: connect, send a batch, or end."""
        if self._mlflow_run is None:
            self._mlflow_run = MlflowRun(self._target)
            with self._changed:
                self.run_id = self._mlflow_run.run_id
                self._changed.notify_all()
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending)
            self._changed.wait_for(lambda: self._ending or len(self._waiting) >= MAX_POINTS, GATHER_S)
            taken, points, position = self._batch(self._mlflow_run.position)
        if points or position:
            self._mlflow_run.log(points, position=position)
        with self._changed:
            for _ in range(taken):
                self._waiting.popleft()
            if self._waiting or self._ending is None:
                return
            status, artifacts = self._ending
        self._mlflow_run.finish(status, artifacts=artifacts)
        self._done = True

    def _batch(self, have: Mapping[str, int]) -> tuple[int, list[Point], dict[str, int]]:
        points: list[Point] = []
        position: dict[str, int] = {}
        taken = 0
        for source, number, found in self._waiting:
            if taken and len(points) + len(found) > MAX_POINTS:
                break
            taken += 1
            if number >= have.get(source, 0):
                points += found
                position[source] = number + 1
        return taken, points, position
