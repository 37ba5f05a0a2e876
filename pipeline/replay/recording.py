"""What a run's log holds for a replay: its configuration, its ledger, its versions, as far as they are committed.

The rule: it reads as a consumer of its own and leaves no trace in the run's topics, groups or files.
"""

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
    """A run's configuration, ledger and versions, as far as they were read."""

    log: Log
    run: str
    found: Registration
    record: RunRecord
    config: Config
    info: dict[str, Any]
    ledger_state: LedgerState
    entries: list[Entry] = field(default_factory=list)
    steps: list[Entry] = field(default_factory=list)
    """The committed steps; step n stands at place n."""
    _tail: Tail | None = None

    @classmethod
    def open(cls, log: Log, run: str) -> Self:
        """Read what is there. Raises `PenstockError` for a run that is not registered or whose ledger has lost its beginning."""
        found = registration(log, run)
        record = found.record
        if record is None:
            raise RunNotFound(run)
        recording = cls(log, run, found, record, from_json(record.config), json.loads(record.info), LedgerState(run))
        places = [(f"{run}.ledger", 0), (f"{run}.weights", 0)]
        for (topic, partition), begin in log.beginning_offsets(places).items():
            if begin:
                raise PenstockError(
                    f"{topic}/{partition} has lost its offsets 0 to {begin - 1}: without them nothing of {run} can be replayed"
                )
        recording._tail = log.tail(dict.fromkeys(places, "earliest"))
        for said in drain(recording._tail, log.end_offsets(places)):
            recording._apply(said)
        return recording

    @property
    def past(self) -> LedgerHistory:
        """The same as a trainer sees it that comes back. Raises `Unrecoverable`."""
        return LedgerHistory(entries=self.entries, ledger_state=self.ledger_state)

    @property
    def over(self) -> bool:
        """True once the run is closed: no more entries follow."""
        return self.ledger_state.closed is not None

    @property
    def planned_steps(self) -> int:
        """Optimizer steps that the run was to take."""
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
            said = self.ledger_state.apply(record)
        except Unusable:
            return  # a dead letter of those who own the topics
        if isinstance(said, Entry):
            self.entries.append(said)
            if said.kind == "step" and said.step == len(self.steps):
                self.steps.append(said)


def prepare(config: Config) -> None:
    """Give this process the environment of a trainer; before torch is imported, which reads it then."""
    os.environ["OMP_NUM_THREADS"] = str(config.trainer.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def with_model(config: Config, directory: str | Path) -> Config:
    """The configuration with another model directory."""
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(directory)})})


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in few words.

    Example:
        ranges([3, 4, 5, 9])  # -> "3-5, 9"
    """
    return ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in _runs(sorted(set(numbers))))


def _runs(ordered: list[int]) -> Iterator[tuple[int, int]]:
    for _, pairs in itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in pairs]
        yield members[0], members[-1]
