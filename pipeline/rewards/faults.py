"""Counts failures of rewards and stops the run if one is frequent.

The same failure in more than `SHARE` of the groups is an error in the function, and training on the other groups would be biased.
"""

import inspect
import re
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.infra.errors import Unrecoverable
from penstock.infra.sandbox.child import text_of

SHARE = 0.05
FEWEST = 100
"""Minimum denominator of the share: at the start of a run, six equal failures stop it, one does not."""


class RewardError(ValueError):
    """A reward function raised, or returned an invalid reward; one line with its name."""


def broke(name: str, error: BaseException, function: Callable[..., Any] | None = None) -> RewardError:
    """The error of the reward `name` in one line: the exception, the last line in `function`'s file, and the line that raised."""
    if isinstance(error, RewardError):
        return error
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None) if function else None
    own = [frame for frame in frames if code is not None and frame[0] == code.co_filename]
    lines = dict.fromkeys(f"{Path(file).name} line {line}" for file, line in [*own[-1:], *frames[-1:]])
    location = f" ({', raised at '.join(lines)})" if lines else ""
    text = text_of(error, characters=400)
    return RewardError(f"reward {name} broke: {type(error).__name__}{f': {text}' if text else ''}{location}")


class BrokenReward(Unrecoverable):
    """A reward fails so often that the run stops; one line with the failure and the fix."""


@dataclass(slots=True)
class FaultCount:
    """Counts scored groups, and failed ones by failure; a partly failed group counts as the failed share of its samples."""

    on_error: str
    """`stop` or `drop`."""
    groups: int = 0
    faults: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _broken: str | None = None

    def failed(self, reason: str) -> None:
        """Count a group without rewards."""
        self.groups += 1
        self._count(reason, 1.0)

    def partly(self, reasons: Collection[str], samples: int) -> None:
        """Count a group with `samples` samples, of which these failed."""
        self.groups += 1
        for reason in reasons:
            self._count(reason, 1 / samples)

    def _count(self, reason: str, share: float) -> None:
        fault = fault_of(reason)
        self.faults[fault] += share
        count = round(self.faults[fault], 9)
        if self.on_error == "stop" and count > SHARE * max(self.groups, FEWEST):
            self._broken = f"{reason}; it failed for {count:g} of {self.groups} groups: fix the function, or set reward.on_error to 'drop'"

    def check(self) -> None:
        """Raise `BrokenReward` if `on_error` is `stop` and a failure was too frequent."""
        if self._broken is not None:
            raise BrokenReward(self._broken)


def fault_of(reason: str) -> str:
    """The key of a failure: function, exception and line, without the exception's text, which may contain the input.

    Example:
        fault_of("reward f broke: KeyError: 'x7' (f.py line 3)")  # -> "reward f broke: KeyError (f.py line 3)"
    """
    match = re.fullmatch(r"(reward .+? broke: \w+)(?:: .*?)?( \([^()]+ line \d+\))?", reason)
    return f"{match[1]}{match[2] or ''}" if match else re.sub(r"\d+(\.\d+)?", "#", reason)
