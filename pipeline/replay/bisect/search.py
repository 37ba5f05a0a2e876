"""Parses the test of a bisect, searches the step after which the test keeps failing, and minimises lists by delta debugging. No I/O."""

import math
import operator
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from penstock.infra.errors import ConfigError, PenstockError
from penstock.pipeline.config.plugins import nearest
from penstock.topics.metrics import EVAL, TRAIN, meaning_of

EXIT_STATUS = "exit_status"
"""Name of the value that a command yields for a state."""
UNTESTED = 125
"""Lowest exit status of a command that could not test the model. As in `git bisect`, 125 is a convention; the shell sets 126 and above."""
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
OF_THE_WEIGHTS = ("ess", "weight", "kl", "ratio", "clip", "correct", "rejected", "entropy")
"""Prefixes of step metrics that are computed before the update, by comparing the current weights with those that generated the samples."""
_SIGN = "|".join(OPERATORS)
_EXPRESSION = re.compile(rf"\s*[^\s<>=!]+\s*({_SIGN})")
_COMPARISON = re.compile(rf"\s*([^\s<>=!]+)\s*({_SIGN})\s*(\S+)\s*")
Item = TypeVar("Item")
Values = Mapping[str, float]
"""Metric -> value, measured for one state (the weights after a number of steps)."""


class OutOfReplays(PenstockError):
    """The bisect has used all replays that `--replays` allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A comparison of a metric with a number, such as `eval/greedy_accuracy > 0.6`."""

    metric: str
    """Full name: `eval/…` or `train/…`."""
    sign: str
    number: float

    def holds(self, values: Mapping[str, float]) -> bool:
        """True if the measured values satisfy the comparison. Raises `PenstockError` if the metric was not measured."""
        if self.metric not in values:
            raise PenstockError(
                f"--test: {self.metric} was not measured for one of the states. State 0, the initial model, has no train/ metrics: "
                "use --good 1 or later"
            )
        return OPERATORS[self.sign](values[self.metric], self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """The test of a bisect: a condition on metrics, or a shell command. A state that passes is good."""

    text: str
    any_of: tuple[tuple[Comparison, ...], ...] = ()
    """The condition in disjunctive form: a state passes if all comparisons of one inner tuple hold. Empty for a command."""

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse the argument of `--test`. Raises `ConfigError`.

        Example:
            Criterion.of("greedy_accuracy > 0.6 and kl < 1").metrics  # -> ("eval/greedy_accuracy", "train/kl")
        """
        if _EXPRESSION.match(text):
            alternatives = (re.split(r"\sand\s", part) for part in re.split(r"\sor\s", text))
            return cls(text=text, any_of=tuple(tuple(_comparison(part, text) for part in parts) for parts in alternatives))
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"--test {text!r}: {error}") from error
        if not words or shutil.which(words[0]) is None:
            raise ConfigError(f"--test {text!r}: expected a condition such as 'greedy_accuracy > 0.6', or a program on PATH with arguments")
        return cls(text=text)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Full names of the tested metrics, in order; `exit_status` for a command."""
        comparisons = [comparison for alternative in self.any_of for comparison in alternative]
        return tuple(dict.fromkeys(comparison.metric for comparison in comparisons)) or (EXIT_STATUS,)

    @property
    def evaluates(self) -> bool:
        """True if the test uses metrics of evaluations on held-out prompts."""
        return any(metric.startswith("eval/") for metric in self.metrics)

    def passes(self, values: Mapping[str, float]) -> bool:
        """True if a state with these measured values is good."""
        if not self.any_of:
            return values[EXIT_STATUS] == 0
        return any(all(comparison.holds(values) for comparison in alternative) for alternative in self.any_of)

    def failing(self, good: Mapping[str, float], bad: Mapping[str, float]) -> str | None:
        """Return the first metric whose comparison holds for the values `good` and fails for the values `bad`; None for a command."""
        comparisons = (comparison for alternative in self.any_of for comparison in alternative)
        return next((one.metric for one in comparisons if one.holds(good) and not one.holds(bad)), None)


def _comparison(part: str, text: str) -> Comparison:
    """Parse one comparison of the condition `text`; a name without prefix is of a step, else of an evaluation. Raises `ConfigError`."""
    match = _COMPARISON.fullmatch(part)
    try:
        if match is None:
            raise ValueError
        name, sign, number = match[1], match[2], float(match[3])
    except ValueError:
        raise ConfigError(
            f"--test {text!r}: {part.strip()!r} is not a comparison; write NAME > NUMBER, and join several with `and` or `or`"
        ) from None
    for metric in (name,) if name.startswith(("eval/", "train/")) else (f"train/{name}", f"eval/{name}"):
        if meaning_of(metric) is not None:
            return Comparison(metric=metric, sign=sign, number=number)
    raise ConfigError(f"--test {text!r}: {name} is not a metric of an evaluation or a step{nearest(name, [*EVAL, *TRAIN])}")


def last_transition(
    good: int, bad: int, is_good: Callable[[int], bool], *, measured: Collection[int] = (), cheap: Collection[int] = ()
) -> tuple[int, dict[int, bool]]:
    """Return the last good state, after which all tested states are bad, and every tested state -> True if it is good.

    A state is a number of steps. States in `measured` are tested first because they are free; the binary search prefers states in `cheap`.
    Then states at distances 2, 4, 8, … are tested on both sides of the transition; a later good state restarts the search there.

    Raises `ConfigError` if `good` is bad or `bad` is good.
    """
    points: dict[int, bool] = {}
    for number in (good, bad, *sorted(n for n in measured if good < n < bad)):
        points[number] = is_good(number)
        if number == good and not points[number]:
            raise ConfigError(f"--good {good}: the test already fails after {good} steps; choose an earlier state or another test")
        if number == bad and points[number]:
            raise ConfigError(f"--bad {bad}: the test passes after {bad} steps; choose another state or another test")
    while True:
        low = max(number for number, passes in points.items() if passes)
        high = min(number for number in points if number > low)
        if high - low > 1:
            between = [number for number in cheap if low < number < high] or range(low + 1, high)
            following = min(between, key=lambda number: abs(2 * number - low - high))
        else:
            unseen = (number for number in _around(low, good, bad) if number not in points)
            if (first := next(unseen, None)) is None:
                return low, dict(sorted(points.items()))
            following = first
        points[following] = is_good(following)


def _around(low: int, good: int, bad: int) -> Iterator[int]:
    distances = [2**power for power in range(1, (bad - good).bit_length())]
    yield from (low + distance for distance in distances if low + distance < bad)
    yield from (low - distance + 1 for distance in distances if low - distance + 1 > good)


def ddmin(items: Sequence[Item], passes: Callable[[Sequence[Item]], bool]) -> tuple[list[Item], bool]:
    """Return a minimal sublist of `items` that passes, by delta debugging (Zeller and Hildebrandt, TSE 28(2), 2002), and True.

    Minimal means that removing any one item makes it fail. The full list is assumed to pass and is not tested. If `OutOfReplays` ends the
    search early, the smallest list so far and False are returned.

    Example:
        ddmin(range(8), lambda subset: {2, 7} <= set(subset))  # -> ([2, 7], True)
    """
    smallest, parts = list(items), 2
    while len(smallest) > 1:
        size = -(-len(smallest) // parts)
        chunks = [smallest[start : start + size] for start in range(0, len(smallest), size)]
        rests = [[item for item in smallest if item not in chunk] for chunk in chunks] if len(chunks) > 2 else []
        try:
            smaller = next((candidate for candidate in [*chunks, *rests] if passes(candidate)), None)
        except OutOfReplays:
            return smallest, False
        if smaller is not None:
            parts = 2 if smaller in chunks else max(2, parts - 1)
            smallest = smaller
        elif parts >= len(smallest):
            break
        else:
            parts = min(2 * parts, len(smallest))
    return smallest, True


def smallest_prefix(ranked: Sequence[Item], passes: Callable[[Sequence[Item]], bool]) -> Sequence[Item] | None:
    """Return the shortest prefix of 1, 2, 4, … items that passes, as a start for `ddmin`; None if none of these prefixes passes."""
    prefixes = (ranked[: 2**power] for power in range(len(ranked).bit_length()))
    return next((prefix for prefix in prefixes if passes(prefix)), None)


def of_the_weights(metric: str | None) -> bool:
    """True if a step computes this metric before its update, so that a change is due to earlier steps."""
    return metric is not None and metric.startswith(tuple(f"train/{name}" for name in OF_THE_WEIGHTS))


def share_of_change(metric: str | None, part: tuple[Values, Values], ends: tuple[Values, Values]) -> float | None:
    """Return a metric's change between the states `part` over its change between the states `ends`; None if it cannot be computed."""
    if metric is None or any(metric not in values for values in (*part, *ends)):
        return None
    of_part, total = (before[metric] - after[metric] for before, after in (part, ends))
    return of_part / total if total and math.isfinite(of_part) and math.isfinite(total) else None
