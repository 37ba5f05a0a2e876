"""When what died is started again: the rules, for every history."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.errors import BackendError, Fenced, LogUnreachable, Unrecoverable
from penstock.pipeline.config.load import ConfigError
from penstock.pipeline.config.plugins import PluginError
from penstock.pipeline.config.schema import RunSection
from penstock.pipeline.data.read_files import DataError
from penstock.pipeline.launch.restart_policy import (
    LONGEST_PAUSE_S,
    WorkerExit,
    decide,
    failures_in_a_row,
    how,
    is_hung,
    pause_s,
)
from penstock.pipeline.runtime.exit_status import BROKEN, NO_RETRY, exit_status

STATUSES = st.sampled_from([1, -9, -15, -11, 137])
ANY_DEATH = st.builds(WorkerExit, at_s=st.floats(0, 1e6), status=STATUSES, progress=st.booleans(), excused=st.booleans())
HISTORIES = st.lists(ANY_DEATH, min_size=1, max_size=12)
RULES = st.builds(RunSection, restart=st.just("on-failure"), max_restarts=st.integers(0, 8))


def in_a_row(count: int, *, status: int = 1) -> list[WorkerExit]:
    return [WorkerExit(at_s=100.0, status=status) for _ in range(count)]


@given(exits=HISTORIES, rules=RULES, waited_s=st.floats(0, 100))
def test_a_decision_only_moves_from_waiting_to_starting_as_time_passes(exits: list[WorkerExit], rules: RunSection, waited_s: float):
    now_s = exits[-1].at_s + waited_s
    decision, later = decide(exits, now_s=now_s, rules=rules), decide(exits, now_s=now_s + LONGEST_PAUSE_S, rules=rules)
    assert later == {"start": "start", "wait": "start", "give-up": "give-up"}[decision]


@given(exits=HISTORIES, rules=RULES)
def test_a_process_is_given_up_exactly_when_it_failed_more_often_in_a_row_than_is_allowed(exits: list[WorkerExit], rules: RunSection):
    given_up = decide(exits, now_s=exits[-1].at_s, rules=rules) == "give-up"
    assert given_up == (failures_in_a_row(exits) > rules.max_restarts)


@given(exits=HISTORIES, rules=RULES)
def test_nothing_is_started_while_what_it_needs_is_away(exits: list[WorkerExit], rules: RunSection):
    assert decide(exits, now_s=1e9, rules=rules, reachable=False) in ("wait", "give-up")


@given(before=st.lists(ANY_DEATH, max_size=12), after=st.lists(ANY_DEATH, max_size=6))
def test_progress_wipes_out_what_was_before_it(before: list[WorkerExit], after: list[WorkerExit]):
    progress = WorkerExit(at_s=0.0, status=1, progress=True)
    assert failures_in_a_row([*before, progress, *after]) == failures_in_a_row([progress, *after])


@given(exits=HISTORIES)
def test_an_excused_death_never_counts(exits: list[WorkerExit]):
    excused = WorkerExit(at_s=0.0, status=1, excused=True)
    assert failures_in_a_row([*exits, excused]) == failures_in_a_row(exits)


def test_the_first_restart_is_at_once_and_the_pauses_double_up_to_half_a_minute():
    assert decide(in_a_row(1, status=-9), now_s=100.0, rules=RunSection()) == "start"
    assert [pause_s(exits) for exits in range(1, 9)] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert decide(in_a_row(3), now_s=101.9, rules=RunSection()) == "wait"
    assert decide(in_a_row(3), now_s=102.0, rules=RunSection()) == "start"


def test_a_worker_that_dies_every_fifteen_seconds_waits_ever_longer_although_the_run_moves_meanwhile():
    exits = [WorkerExit(at_s=15.0 * number, status=1, progress=True) for number in range(40)]
    waits = [
        next(pause for pause in range(60) if decide(exits[:count], now_s=exits[count - 1].at_s + pause, rules=RunSection()) == "start")
        for count in range(1, len(exits) + 1)
    ]
    assert waits == [0, 1, 2, 4, 8, 16, *[30] * 34]


def test_ten_quiet_minutes_and_a_broker_that_was_away_make_no_pause_longer():
    def at(*seconds: float, excused: bool = False) -> list[WorkerExit]:
        return [WorkerExit(at_s=second, status=-9, progress=True, excused=excused) for second in seconds]

    assert decide([*at(0, 1, 2), *at(700)], now_s=700.0, rules=RunSection()) == "start"
    assert decide([*at(1, 2, 3, excused=True), *at(4)], now_s=4.0, rules=RunSection()) == "start"


def test_the_sixth_failure_in_a_row_is_the_last_by_default():
    assert decide(in_a_row(5), now_s=200.0, rules=RunSection()) == "start"
    assert decide(in_a_row(6), now_s=200.0, rules=RunSection()) == "give-up"


def test_nothing_is_started_again_when_that_cannot_help_or_is_not_wanted():
    assert {decide(in_a_row(1, status=status), now_s=1e9, rules=RunSection()) for status in (NO_RETRY, BROKEN)} == {"give-up"}
    assert decide(in_a_row(1), now_s=1e9, rules=RunSection(restart="never")) == "give-up"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("no such key"), 2),
        (PluginError("own.py has no function f"), 2),
        (DataError("train.jsonl:17 has no prompt"), 2),
        (ValueError("operands could not be broadcast together"), 1),
        (Unrecoverable("step 3 repeated gave other bits"), 2),
        (Fenced("another process writes as r.trainer"), 2),
        (LogUnreachable("no broker answers"), 1),
        (BackendError("out of memory"), 1),
        (OSError("No space left on device"), 1),
        (RuntimeError("anything"), 1),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "a file half written"), 1),
    ],
)
def test_a_worker_says_with_its_status_whether_starting_it_again_may_help(error: Exception, status: int):
    assert exit_status(error) == status


@given(silent_s=st.floats(0, 2000), share=st.none() | st.floats(0, 4))
def test_only_who_neither_reports_nor_computes_is_hung(silent_s: float, share: float | None):
    hung = is_hung(silent_s=silent_s, cpu_share=share, stall_s=300.0)
    assert hung == (silent_s >= 600.0 and share is not None and share < 0.05)


def test_a_death_is_told_by_the_signals_name():
    assert how(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert how(1) == "exited with status 1"
    assert how(-64) in ("was killed by SIGRTMAX", "was killed by signal 64")
