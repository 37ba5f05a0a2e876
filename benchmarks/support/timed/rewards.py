"""A reward service's latency: `served` waits beside others, `inline` holds its process."""

import asyncio
import random
import time
from typing import Any


async def served(completions: list[str], *, seconds: float, **_: Any) -> list[float]:
    """Random rewards after `seconds`; the slots of `reward.concurrency` wait at the same time."""
    await asyncio.sleep(seconds)
    return [random.random() for _ in completions]


def inline(completions: list[str], *, seconds: float, **_: Any) -> list[float]:
    """The same, one group after another."""
    time.sleep(seconds)
    return [random.random() for _ in completions]
