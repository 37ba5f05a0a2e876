"""Decides when a crashed process is restarted, how long the restart waits, and when the restart limit is reached."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.pipeline.config.schema import RunSection
from penstock.pipeline.runtime.exit_status import BROKEN, NO_RETRY

HEALTHY_S = 10.0
"""A process that served for this long while its run advanced has made progress: its earlier exits no longer count."""
LONGEST_PAUSE_S = 30.0
RECENT_S = 600.0
"""How long an exit makes the pauses longer: each restart of one worker halts all others of its role for a rebalance."""
IDLE_SHARE = 0.05
"""CPU seconds per second: the client's own threads take less, work of any kind takes more."""

Decision = Literal["start", "wait", "give-up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """One unexpected exit of a process."""

    at_s: float
    status: int
    """Exit status as `subprocess` gives it: negative for a signal."""
    progress: bool = False
    """True if it had been ready for `HEALTHY_S` and the run had advanced meanwhile: it does not fail on the same record each time."""
    excused: bool = False
    """True if the broker was unreachable: such an exit is not a failure."""


def failures_in_a_row(exits: Sequence[WorkerExit]) -> int:
    """Number of exits since the process last made progress, without excused ones."""
    count = 0
    for exit_ in reversed(exits):
        count += not exit_.excused
        if exit_.progress:
            break
    return count


def pause_s(exits: int) -> float:
    """Pause before a restart after this many recent exits: none after the first, then 1, 2, 4 ... 30 s."""
    return 0.0 if exits <= 1 else min(LONGEST_PAUSE_S, 2.0 ** min(exits - 2, 10))


def recent(exits: Sequence[WorkerExit]) -> int:
    """Number of exits in the ten minutes up to the last, with or without progress between them, without excused ones."""
    return sum(not exit_.excused and exit_.at_s > exits[-1].at_s - RECENT_S for exit_ in exits)


def decide(exits: Sequence[WorkerExit], *, now_s: float, rules: RunSection, reachable: bool = True) -> Decision:
    """Decide about a process whose newest exit is the last of `exits`; `reachable` is False while its broker is unreachable."""
    last = exits[-1]
    if last.status in (NO_RETRY, BROKEN) or rules.restart == "never" or failures_in_a_row(exits) > rules.max_restarts:
        return "give-up"
    return "start" if reachable and now_s - last.at_s >= pause_s(recent(exits)) else "wait"


def is_hung(*, silent_s: float, cpu_share: float | None, stall_s: float) -> bool:
    """True if a worker hangs and must be restarted: it has neither reported for two stall times nor used CPU time in the last one.

    One that computes is left alone, however long it takes: a step of a large model may last longer than any limit.
    """
    return silent_s >= 2 * stall_s and cpu_share is not None and cpu_share < IDLE_SHARE


def how(status: int) -> str:
    """Describe how a process ended."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def failure_cause(exits: Sequence[WorkerExit], *, rules: RunSection) -> str:
    """The reason why a process is not restarted, as the end of a sentence."""
    if exits[-1].status in (NO_RETRY, BROKEN):
        return "not restarted, because the cause would remain"
    if rules.restart == "never":
        return 'run.restart = "never"'
    failures = failures_in_a_row(exits)
    return f"{failures} times in a row, run.max_restarts = {rules.max_restarts}"
