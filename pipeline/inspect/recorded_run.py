"""Reads the small topics of a recorded run up to their current ends: configuration, ledger, versions and dead letters."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.infra.errors import LogError, RunNotFound
from penstock.infra.log import Log
from penstock.pipeline.config.load import Config, ConfigError, from_json
from penstock.pipeline.learner.ledger_history import LedgerHistory, ledger_history_of
from penstock.pipeline.runtime.registration.run_registry import find
from penstock.pipeline.runtime.topic_reader import RunReader, deleted
from penstock.topics.dead_letters import DeadLetter
from penstock.topics.runs import ENDED, RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run as its small topics have it; its samples and groups are read through `reader`."""

    reader: RunReader
    record: RunRecord | None
    """Registration; None if its record was deleted."""
    config: Config
    past: LedgerHistory
    dead_letters: Mapping[int, DeadLetter]
    """Offset -> dead letter, without the payload of the refused record, which may be large."""

    @property
    def run(self) -> str:
        return self.reader.run

    @property
    def info(self) -> dict[str, Any]:
        """Facts determined when the run was created, such as digests of its files; {} if the registration was deleted."""
        info: dict[str, Any] = json.loads(self.record.info) if self.record is not None else {}
        return info

    @property
    def planned_steps(self) -> int:
        """Number of planned optimizer steps; 0 if the registration was deleted."""
        return int(self.info.get("steps") or 0)

    @property
    def ended(self) -> bool:
        return self.past.ledger_state.closed is not None or (self.record is not None and self.record.status in ENDED)


def read_run(log: Log, run: str) -> RecordedRun:
    """Read a run's configuration, ledger and dead letters. Raises `RunNotFound`, or `LogError`, also if ledger entries were deleted."""
    if lost := deleted(log, f"{run}.ledger"):  # without these entries, every group would seem to be waiting
        raise LogError(f"the status of groups of {run} cannot be computed, because ledger entries were deleted: {'; '.join(lost)}")
    record, reader = find(log, run), RunReader(log, run)
    past = ledger_history_of(reader)
    opened = past.ledger_state.opened
    if record is None and opened is None:
        raise RunNotFound(run)
    config = record.config if record is not None else json.dumps(json.loads((opened and opened.details) or "{}").get("config", {}))
    dead_letters = {read.record.offset: replace(read.payload, value=b"") for read in reader.dead_letters() if read.payload is not None}
    return RecordedRun(reader=reader, record=record, config=from_json(config), past=past, dead_letters=dead_letters)


def no_prompt(recorded: RecordedRun, group: int) -> Exception:
    """Return the error for a group without a prompt: `LogError` if prompts were deleted, else `ConfigError`."""
    run = recorded.run
    highest = max((read.headers.group or 0 for read in recorded.reader.prompts(decode=False) if read.headers is not None), default=-1)
    if group <= highest and (lost := deleted(recorded.reader.log, f"{run}.prompts")):
        return LogError(f"the prompt of group {group} was deleted: {'; '.join(lost)}")
    if highest < 0:
        return ConfigError(f"group {group} was never admitted: run {run} has no prompt yet")
    return ConfigError(f"group {group} was never admitted: run {run} has groups 0 to {highest}")
