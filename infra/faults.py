"""Fault points: named points at which a process kills itself, so that a test can end it between any two lines.

The rule: without the environment variable nothing happens, at almost no cost.
"""

import os
import signal
import sys
from dataclasses import dataclass
from functools import cache

VARIABLE = "PENSTOCK_FAULT"
"""Names the point and, after a colon, the pass at which the process dies: `ledger.step.after:3`; the first pass by default."""

POINTS = {
    "ledger.run-opened.before": "the model is loaded, nothing is written",
    "ledger.run-opened.after": "the run is opened, version 0 is not published",
    "chunk.sent": "a chunk of a version is sent and not yet acknowledged",
    "ledger.version.before": "a version's chunks are written, its manifest is not",
    "ledger.version.after": "a version's manifest and its ledger record are written",
    "ledger.step.before": "a step is computed, nothing says so",
    "ledger.step.after": "a step is committed",
    "ledger.stale.before": "groups are too old, nothing says so",
    "ledger.stale.after": "groups are recorded as stale",
    "transaction.sent": "records of a transaction are acknowledged, the transaction is not committed",
    "checkpoint.before": "a checkpoint is due, nothing of it is written",
    "checkpoint.some": "some files of a checkpoint are written",
    "ledger.checkpoint.before": "all files of a checkpoint are on disk, the ledger does not know it",
    "ledger.checkpoint.after": "the ledger knows a checkpoint that still has its temporary name",
    "checkpoint.renamed": "a checkpoint has its name, those it replaces are still there",
    "checkpoint.removing": "a checkpoint that is not kept has lost its name, its files are still there",
    "rank.trained": "a process of the trainer beside the first has run a micro-batch backward",
    "recovery.loaded": "a checkpoint is loaded, no step is repeated",
    "recovery.repeated": "a step is repeated from the log",
    "ledger.rebased.before": "repeated steps gave other bits, nothing says so",
    "ledger.rebased.after": "a rebase is recorded, the checkpoint that goes with it is not written",
    "ledger.run-closed.before": "all steps are done, the run is not closed",
    "ledger.run-closed.after": "the ledger is closed, the register of runs does not say so",
}
"""Name -> what has happened by the time the process dies there."""


@dataclass(slots=True)
class Fault:
    """The point at which this process dies, and the number of passes left."""

    name: str
    left: int


def reach(name: str) -> None:
    """Die here by SIGKILL if the environment asks for it; `ValueError` when it names no point."""
    fault = _chosen()
    if fault is None:
        return
    assert name in POINTS, f"{name} is not among the fault points"
    if name != fault.name:
        return
    fault.left -= 1
    if not fault.left:
        sys.stderr.write(f"fault point {name}: killing this process\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


@cache
def _chosen() -> Fault | None:
    """The fault the environment asked for when the first point was reached."""
    text = os.environ.get(VARIABLE)
    return None if text is None else parse(text)


def parse(text: str) -> Fault:
    """Parse the variable's text.

    Example:
        parse("ledger.step.after:3")  # -> Fault(name="ledger.step.after", left=3)
    """
    name, _, count = text.partition(":")
    if name not in POINTS:
        raise ValueError(f"{VARIABLE} names no fault point: {name!r}; there are {', '.join(POINTS)}")
    if count and not (count.isdecimal() and int(count)):
        raise ValueError(f"{VARIABLE} counts passings from 1, not {count!r}")
    return Fault(name=name, left=int(count or 1))
