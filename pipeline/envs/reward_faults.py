"""How often a reward has failed in the same way, and when that stops the run.

The rule: the same failure in more than `SHARE` of the groups is a fault of the function, and training on the other groups would be biased.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

from penstock.infra.errors import Unrecoverable

SHARE = 0.05
FEWEST = 100
"""Fewer groups count as so many: six equal failures stop a run that has just begun, one does not."""


class RewardError(ValueError):
    """A reward function raised or returned an invalid reward; one line with its name."""


class BrokenReward(Unrecoverable):
    """A reward fails so often that the run stops; one line with the failure and what to do."""


@dataclass(slots=True)
class FaultCount:
    """Counts the groups that a worker had judged, and those that failed, by failure."""

    on_error: str
    """`stop` or `drop`."""
    judged: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    _broken: str | None = None

    def passed(self) -> None:
        """A group has its rewards."""
        self.judged += 1

    def failed(self, reason: str) -> None:
        """A group has none."""
        self.judged += 1
        fault = fault_of(reason)
        self.faults[fault] += 1
        count = self.faults[fault]
        if self.on_error == "stop" and count > SHARE * max(self.judged, FEWEST):
            self._broken = f"{reason}; it failed so for {count} of {self.judged} groups: mend it, or set reward.on_error to 'drop'"

    def check(self) -> None:
        """Raise `BrokenReward` if a failure was too frequent and `on_error` is `stop`."""
        if self._broken is not None:
            raise BrokenReward(self._broken)


def fault_of(reason: str) -> str:
    """What equal failures have in common: function, exception and place, without the exception's own text, which may name the input.

    Example:
        fault_of("reward f broke: KeyError: 'x7' (f.py line 3)")  # -> "reward f broke: KeyError (f.py line 3)"
    """
    match = re.fullmatch(r"(reward .+? broke: \w+): .*?( \([^()]+ line \d+\))?", reason)
    return f"{match[1]}{match[2] or ''}" if match else re.sub(r"\d+(\.\d+)?", "#", reason)
