"""Delivers points to MLflow from a thread of its own, through any outage of the server."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.infra.errors import TrackingError
from penstock.infra.mlflow.tracking import MAX_POINTS, MlflowRun, Point, RegisteredCheckpoints, Target
from penstock.topics.wire.secrets import without_password

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
GATHER_S = 2.0
"""Time for which points are collected into one request: a full request costs as much as one with a single point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The points of one record; numbers rise within a source."""

    source: str
    number: int
    points: tuple[Point, ...]


class Journal(Protocol):
    """All points to deliver, in order, on disk; can be read repeatedly."""

    @property
    def end(self) -> int: ...
    @property
    def points(self) -> int: ...
    def read(self, offset: int, *, max_points: int) -> tuple[Sequence[Delivery], int]: ...
    def sync(self) -> None: ...


class Uploader:
    """Delivers a journal to MLflow from a thread of its own, with growing pauses while the server does not respond."""

    def __init__(self, target: Target, journal: Journal, *, notify: Callable[[str], None]) -> None:
        self.shown_uri = without_password(target.uri)
        self.run_id: str | None = None
        self.failing = False
        """True if the last request was refused or timed out."""
        self._target, self._journal, self._notify = target, journal, notify
        self._offset = self._passed = 0
        self._delivered: Mapping[str, int] = {}
        self._mlflow_run: MlflowRun | None = None
        self._checkpoints = self._registered = RegisteredCheckpoints()
        self._changed = threading.Condition()
        self._ending: dict[str, Any] | None = None
        """Arguments of `MlflowRun.finish`, which is called once every point is delivered."""
        self._done = False
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    def start(self) -> None:
        """Start the thread unless it has started."""
        if self._thread.ident is None:
            self._thread.start()

    @property
    def queued(self) -> int:
        """Number of the journal's points without confirmed delivery."""
        return self._journal.points - self._passed

    def more(self, checkpoints: RegisteredCheckpoints) -> None:
        """Wake the thread: the journal may have grown, and these checkpoints exist."""
        with self._changed:
            self._checkpoints = checkpoints
            self._changed.notify_all()

    def wait_for_run(self, timeout_s: float) -> str | None:
        """Return the MLflow run's id; None if it does not exist after `timeout_s`."""
        self.start()
        with self._changed:
            self._changed.wait_for(lambda: self.run_id is not None, timeout_s)
            return self.run_id

    def finish(self, status: str, *, end_ms: int | None = None, artifacts: Sequence[Path] = (), reason: str | None = None) -> None:
        """Let the thread deliver the remaining points, set the status, attach the files and end; `wait` blocks until then."""
        self.start()
        with self._changed:
            self._ending = {"status": status, "end_ms": end_ms, "artifacts": artifacts, "reason": reason}
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the thread; return True if every point was delivered and the MLflow run has ended."""
        self._thread.join(timeout_s)
        return self._done

    def _work(self) -> None:
        """Deliver until everything is done; after an error, report it once and try again after a growing pause."""
        pause = FIRST_PAUSE_S
        while not self._done:
            try:
                self._advance()
            except TrackingError as error:
                self._failed(str(error))
            except Exception as error:  # the edge of the thread: artifact stores raise any error of their own clients
                self._failed(f"MLflow at {self.shown_uri}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            else:
                if self.failing:
                    self._notify(f"MLflow at {self.shown_uri} responds again")
                pause, self.failing = FIRST_PAUSE_S, False
                continue
            self._pause(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _failed(self, cause: str) -> None:
        if not self.failing:
            self._notify(f"{cause}; the run continues, and its metrics stay in metrics.jsonl until MLflow responds")
        self.failing = True
        self._mlflow_run = None  # how much arrived is unknown: read it from the server when it responds again

    def _pause(self, seconds: float) -> None:
        """Wait before the next attempt; briefly once `finish` was called, whose caller limits the time."""
        with self._changed:
            if self._ending is None and self._changed.wait_for(lambda: self._ending, seconds):
                return
        time.sleep(min(seconds, FIRST_PAUSE_S))

    def _advance(self) -> None:
        """Connect if needed, wait for points, send the next batch, and end if everything is delivered."""
        if self._mlflow_run is None:
            self._mlflow_run = self._connect()
        with self._changed:
            self._changed.wait_for(lambda: self._journal.end > self._offset or self._ending or self._to_register())
            self._changed.wait_for(lambda: self._ending or self.queued >= MAX_POINTS, GATHER_S)
        end, ending = self._journal.end, self._ending
        deliveries, offset = self._journal.read(self._offset, max_points=MAX_POINTS - 1)
        new = [delivery for delivery in deliveries if delivery.number >= self._mlflow_run.position.get(delivery.source, 0)]
        if new:
            self._journal.sync()  # MLflow must not have a point that the journal could lose in a power cut
            position = {delivery.source: delivery.number + 1 for delivery in new}
            self._mlflow_run.log([point for delivery in new for point in delivery.points], position=position)
        self._delivered = self._mlflow_run.position
        self._passed += sum(len(delivery.points) for delivery in deliveries)
        self._offset = offset
        over = ending is not None and offset >= end
        if ending is not None and over:
            self._mlflow_run.finish(**ending)
        if self._to_register() or (over and self._checkpoints != self._registered):
            checkpoints = self._checkpoints
            self._mlflow_run.register(checkpoints)
            self._registered = checkpoints
        self._done = over

    def _to_register(self) -> bool:
        """True if the registry is out of date; a server, which gets the models themselves, is updated after everything else."""
        return self._target.local and self._checkpoints != self._registered

    def _connect(self) -> MlflowRun:
        """Find or create the MLflow run; if it has fewer points than were delivered, restart the journal from its start."""
        run = MlflowRun(self._target)
        if run.run_id != self.run_id or any(run.position.get(source, 0) < number for source, number in self._delivered.items()):
            self._offset = self._passed = 0
        with self._changed:
            self.run_id = run.run_id
            self._changed.notify_all()
        return run
