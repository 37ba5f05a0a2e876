"""Decides when a process that died is restarted, when the restart waits, and when it is given up.

The rule: a decision is a pure function of how the process died before and of the time.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.pipeline.runtime.exit_status import BROKEN, NO_RETRY

HEALTHY_S = 10.0
"""A process that served for this long, while its run advanced, has made progress: its earlier deaths no longer count."""
LONGEST_PAUSE_S = 30.0
RECENT_S = 600.0
"""How long a death makes the pauses longer: each restart of one worker halts all others of its role for a rebalance."""
IDLE_SHARE = 0.05
"""CPU seconds per second: the client's own threads take less, work of any kind takes more."""

Decision = Literal["start", "wait", "give-up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """One unexpected end of a process."""

    at_s: float
    status: int
    """Exit status as `subprocess` gives it: negative for a signal."""
    progress: bool = False
    """True if it had been ready for `HEALTHY_S` and the run had advanced meanwhile: it does not fail on the same record each time."""
    excused: bool = False
    """True if the broker was out of reach: such a death does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The run's settings for restarts."""

    restart: Literal["on-failure", "never"] = "on-failure"
    max_restarts: int = 5
    """Restarts of one process in a row."""


def failures_in_a_row(deaths: Sequence[WorkerExit]) -> int:
    """Deaths since the process last made progress; excused ones do not count.

    Example:
        failures_in_a_row([Death(at_s=0, status=1), Death(at_s=60, status=1, progress=True), Death(at_s=61, status=1)])  # -> 2
    """
    count = 0
    for death in reversed(deaths):
        count += not death.excused
        if death.progress:
            break
    return count


def pause_s(deaths: int) -> float:
    """Pause before a restart after this many recent deaths: none after the first, then 1, 2, 4 ... 30 s.

    Example:
        [pause_s(n) for n in range(1, 8)]  # -> [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    """
    return 0.0 if deaths <= 1 else min(LONGEST_PAUSE_S, 2.0 ** min(deaths - 2, 10))


def recent(deaths: Sequence[WorkerExit]) -> int:
    """Deaths in the ten minutes up to the last, whether or not there was progress between them; excused ones do not count."""
    return sum(not death.excused and death.at_s > deaths[-1].at_s - RECENT_S for death in deaths)


def decide(deaths: Sequence[WorkerExit], *, now_s: float, rules: Rules, reachable: bool = True) -> Decision:
    """Decide about a process whose newest death is the last of `deaths`; `reachable` is False while its broker is away."""
    last = deaths[-1]
    if last.status in (NO_RETRY, BROKEN) or rules.restart == "never" or failures_in_a_row(deaths) > rules.max_restarts:
        return "give-up"
    return "start" if reachable and now_s - last.at_s >= pause_s(recent(deaths)) else "wait"


def is_hung(*, silent_s: float, cpu_share: float | None, stall_s: float) -> bool:
    """True if a worker that was ready is to be restarted: it has neither reported for two stalls nor computed during the last one.

    One that computes is left alone, however long it takes: a step of a large model may last longer than any limit.
    """
    return silent_s >= 2 * stall_s and cpu_share is not None and cpu_share < IDLE_SHARE


def how(status: int) -> str:
    """Describe how a process ended.

    Example:
        how(-9)  # -> "was killed by SIGKILL"
    """
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def why_given_up(deaths: Sequence[WorkerExit], *, rules: Rules) -> str:
    """The reason for which `decide` gave up, as the end of a sentence."""
    if deaths[-1].status in (NO_RETRY, BROKEN):
        return "starting it again cannot help"
    if rules.restart == "never":
        return 'run.restart = "never"'
    failures = failures_in_a_row(deaths)
    return f"{failures} times in a row, run.max_restarts = {rules.max_restarts}"
