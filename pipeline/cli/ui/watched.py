"""The runs that a browser looks at: each is read once from the beginning, then only what is new, by one thread at a time."""

import contextlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from penstock.infra.log import Log, Tail
from penstock.infra.paths import run_directory
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.status import WATCHED
from penstock.pipeline.runtime.topic_reader import read_to_current_end
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.wire.errors import Unusable

KEPT = 8
AT_ONCE = 2


@dataclass(slots=True)
class Watching:
    """Views of runs, brought up to date when they are asked for."""

    log: Log
    reading: threading.Lock = field(default_factory=threading.Lock)
    questions: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(AT_ONCE))
    _views: "OrderedDict[str, tuple[RunView, Tail]]" = field(default_factory=OrderedDict)

    def view(self, run: str) -> RunView:
        """The run as it is at this moment. Raises `LogError`."""
        if run not in self._views:
            self._views[run] = RunView(run=run), self._tail(run)
            while len(self._views) > KEPT:
                self._views.popitem(last=False)[1][1].close()
        self._views.move_to_end(run)
        view, tail = self._views[run]
        for record in read_to_current_end(self.log, tail):
            with contextlib.suppress(Unusable):  # its owner sets it aside
                view.fold(record)
        return view

    def folder(self, run: str) -> Path:
        """The run's folder on this machine, which may not exist."""
        return run_directory(run)

    def close(self) -> None:
        """Stop reading."""
        for _, tail in self._views.values():
            tail.close()
        self._views.clear()

    def _tail(self, run: str) -> Tail:
        names = [RUNS_TOPIC, f"{run}.run", *(f"{run}.{topic}" for topic in WATCHED)]
        return self.log.tail({(name, number): "earliest" for name in names for number in range(self.log.partitions(name) or 0)})
