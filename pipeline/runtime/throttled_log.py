"""What a worker says of records it sets aside or passes over, however many there are.

The rule: the first few are told one by one, the rest are counted, and a sum of them is said now and then.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

TOLD_AT_FIRST = 5
SUM_EVERY_S = 10.0


@dataclass(slots=True)
class Notices:
    """Lines of many sorts, a few of each at once."""

    say: Callable[[str], None]
    _seen: Counter[str] = field(default_factory=Counter)
    _untold: Counter[str] = field(default_factory=Counter)
    _summed: float = field(default_factory=time.monotonic)

    def note(self, sort: str, text: str) -> None:
        """Say a line, or only count it among those of its sort."""
        self._seen[sort] += 1
        if self._seen[sort] <= TOLD_AT_FIRST:
            self.say(text)
        else:
            self._untold[sort] += 1

    def sum_up(self, *, now: bool = False) -> None:
        """Say how many more there were of each sort, unless that was done a moment ago."""
        if not self._untold or (not now and time.monotonic() - self._summed < SUM_EVERY_S):
            return
        self._summed = time.monotonic()
        for sort, count in sorted(self._untold.items()):
            self.say(f"{count} more: {sort}")
        self._untold.clear()
