"""Fault points: named points at which a process kills itself, so that a test can end it between any two lines."""

import os
import signal
import sys
from dataclasses import dataclass
from functools import cache

VARIABLE = "PENSTOCK_FAULT"
"""Names the point and, after a colon, the pass at which the process kills itself: `ledger.step.after:3`; by default the first."""

POINTS = {
    "ledger.run-opened.before": "the model is loaded, nothing is written",
    "ledger.run-opened.after": "the run is opened, version 0 is not published",
    "chunk.sent": "a chunk of a version is sent and not yet acknowledged",
    "ledger.version.before": "a version's chunks are written, its manifest is not",
    "ledger.version.after": "a version's manifest and its ledger record are written",
    "snapshot.before": "a published version's chunks are written again in full, their manifest is not",
    "snapshot.after": "the manifest of such chunks is written",
    "ledger.step.before": "a step is computed, its entry is not written",
    "ledger.step.after": "a step is committed",
    "ledger.stale.before": "groups are stale, no entry is written",
    "ledger.stale.after": "groups are recorded as stale",
    "transaction.sent": "records of a transaction are acknowledged, the transaction is not committed",
    "checkpoint.before": "a checkpoint is due, nothing of it is written",
    "checkpoint.some": "some files of a checkpoint are written",
    "ledger.checkpoint.before": "all files of a checkpoint are on disk, the ledger has no entry",
    "ledger.checkpoint.after": "the ledger has a checkpoint with its temporary name",
    "checkpoint.renamed": "a checkpoint has its final name, those it replaces still exist",
    "checkpoint.removing": "a deleted checkpoint has lost its name, its files still exist",
    "rank.trained": "a rank of the trainer other than 0 has run a micro-batch backward",
    "recovery.loaded": "a checkpoint is loaded, no step is repeated",
    "recovery.repeated": "a step is repeated from the log",
    "ledger.rebased.before": "repeated steps gave other bits, no entry is written",
    "ledger.rebased.after": "a rebase is recorded, the checkpoint that goes with it is not written",
    "ledger.run-closed.before": "all steps are done, the run is not closed",
    "ledger.run-closed.after": "the ledger is closed, the register of runs is not updated",
}
"""Name -> what has happened before the process kills itself there."""


@dataclass(slots=True)
class Fault:
    """The point at which this process kills itself, and the number of passes until then."""

    name: str
    passes: int


def reach(name: str) -> None:
    """Kill this process by SIGKILL if PENSTOCK_FAULT names this point and pass. Raises `ValueError` if it names no point."""
    fault = _configured()
    if fault is None:
        return
    assert name in POINTS, f"{name} is not among the fault points"
    if name != fault.name:
        return
    fault.passes -= 1
    if not fault.passes:
        sys.stderr.write(f"fault point {name}: killing this process\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


@cache
def _configured() -> Fault | None:
    """Return the fault in the environment, read when the first fault point is reached; None without one."""
    text = os.environ.get(VARIABLE)
    return None if text is None else parse(text)


def parse(text: str) -> Fault:
    """Parse the variable's text.

    Example:
        parse("ledger.step.after:3")  # -> Fault(name="ledger.step.after", passes=3)
    """
    name, _, count = text.partition(":")
    if name not in POINTS:
        raise ValueError(f"{VARIABLE}: unknown fault point {name!r}; choose one of {', '.join(POINTS)}")
    if count and not (count.isdecimal() and int(count)):
        raise ValueError(f"{VARIABLE}: the number after the fault point must be 1 or more, not {count!r}")
    return Fault(name=name, passes=int(count or 1))
