"""Signals of the test process: which its children start with, and how a child sends one to itself."""

import os
import signal

_TESTER = "PENSTOCK_TESTER"


def guard_this_process() -> None:
    """Note that this process runs tests, and start children with the default handlers even if it ignores signals itself.

    A child inherits a signal that is ignored (`nohup`, `&` in a script), but not a handler: the process ignores it by a handler instead.
    """
    os.environ[_TESTER] = str(os.getpid())
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _ignore)


def signal_self(number: int) -> None:
    """Send this process a signal. Raises `AssertionError` in a process that runs tests: it would end, and all of its tests with it."""
    assert os.environ[_TESTER] != str(os.getpid()), "a test process must not signal itself"
    os.kill(os.getpid(), number)


def _ignore(_number: int, _frame: object) -> None:
    pass
