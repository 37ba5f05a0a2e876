"""Reads what a replay needs from a run's log: configuration, ledger and versions. Read-only."""

import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from penstock.infra.errors import PenstockError, RunNotFound
from penstock.infra.log import Log, Tail
from penstock.pipeline.config.load import Config, from_json
from penstock.pipeline.learner.ledger_history import LedgerHistory
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.registration.run_registry import Registration, registration
from penstock.pipeline.runtime.topic_reader import drain
from penstock.topics.ledger import Entry
from penstock.topics.runs import RunRecord
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record

POLL_S = 0.5


@dataclass(slots=True)
class Recording:
    """A run's configuration, ledger and versions read so far."""

    log: Log
    run: str
    registration: Registration
    record: RunRecord
    config: Config
    info: dict[str, Any]
    ledger_state: LedgerState
    entries: list[Entry] = field(default_factory=list)
    steps: list[Entry] = field(default_factory=list)
    """The committed steps; step n has index n."""
    _tail: Tail | None = None

    @classmethod
    def open(cls, log: Log, run: str) -> Self:
        """Read up to the current end. Raises `PenstockError` if the run is not registered or its first ledger entries were deleted."""
        registered = registration(log, run)
        record = registered.record
        if record is None:
            raise RunNotFound(run)
        recording = cls(log, run, registered, record, from_json(record.config), json.loads(record.info), LedgerState(run))
        partitions = [(f"{run}.ledger", 0), (f"{run}.weights", 0)]
        for (topic, partition), start in log.beginning_offsets(partitions).items():
            if start:
                raise PenstockError(f"{run} cannot be replayed: offsets 0 to {start - 1} of {topic}/{partition} were deleted")
        recording._tail = log.tail(dict.fromkeys(partitions, "earliest"))
        for ledger_record in drain(recording._tail, log.end_offsets(partitions)):
            recording._apply(ledger_record)
        return recording

    @property
    def past(self) -> LedgerHistory:
        """The ledger history as a restarted trainer reads it. Raises `Unrecoverable`."""
        return LedgerHistory(entries=self.entries, ledger_state=self.ledger_state)

    @property
    def over(self) -> bool:
        """True if the run is closed: no more entries follow."""
        return self.ledger_state.closed is not None

    @property
    def planned_steps(self) -> int:
        """Planned optimizer steps of the run."""
        return int(self.info.get("steps") or len(self.steps))

    def wait(self, timeout_s: float = POLL_S) -> None:
        """Wait up to `timeout_s` for new records, and apply them."""
        assert self._tail is not None
        for record in self._tail.poll(timeout_s):
            self._apply(record)

    def close(self) -> None:
        """Stop reading."""
        if self._tail is not None:
            self._tail.close()

    def _apply(self, record: Record) -> None:
        try:
            entry = self.ledger_state.apply(record)
        except Unusable:
            return  # the run's workers write its dead letter
        if isinstance(entry, Entry):
            self.entries.append(entry)
            if entry.kind == "step" and entry.step == len(self.steps):
                self.steps.append(entry)


def prepare(config: Config) -> None:
    """Set a trainer's environment variables. Call it before torch is imported, which reads them."""
    os.environ["OMP_NUM_THREADS"] = str(config.trainer.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def with_model(config: Config, directory: str | Path) -> Config:
    """The configuration with another model directory."""
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(directory)})})


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges.

    Example:
        ranges([3, 4, 5, 9])  # -> "3-5, 9"
    """
    return ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in _runs(sorted(set(numbers))))


def _runs(ordered: list[int]) -> Iterator[tuple[int, int]]:
    for _, pairs in itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in pairs]
        yield members[0], members[-1]
