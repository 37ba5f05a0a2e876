"""Signals of the test process: which its children start with, and how a child sends one to itself."""

import os

from penstock.infra.sandbox.signals import keep_ignored_here

_TESTER = "PENSTOCK_TESTER"


def guard_this_process() -> None:
    """Note that this process runs tests, and start children with the default handlers even if it ignores signals itself."""
    os.environ[_TESTER] = str(os.getpid())
    keep_ignored_here()


def signal_self(number: int) -> None:
    """Send this process a signal. Raises `AssertionError` in a process that runs tests: it would end, and all of its tests with it."""
    assert os.environ[_TESTER] != str(os.getpid()), "a test process must not signal itself"
    os.kill(os.getpid(), number)
