"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def until(holds: Callable[[], Found], why: Callable[[], object] | str = "", *, limit_s: float = 120.0, every_s: float = 0.02) -> Found:
    """What holds at last, within `limit_s`; `why` is what a test fails with otherwise."""
    deadline = time.monotonic() + limit_s
    while not (found := holds()):
        assert time.monotonic() < deadline, why() if callable(why) else f"not within {limit_s:g} s: {why}"
        time.sleep(every_s)
    return found
