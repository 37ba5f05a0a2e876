"""The test of a bisect, the search of the step after which it keeps failing, and delta debugging: pure functions of measured results."""

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
"""The only value of a state that a command tests."""
UNTESTED = 125
"""Lowest exit status of a command that did not test the model, as of `git bisect`: 125 by agreement, 126 and above by the shell."""
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
OF_THE_WEIGHTS = ("ess", "weight", "kl", "ratio", "clip", "correct", "rejected", "entropy")
"""Beginnings of names of metrics that compare a step's weights before its update with those that generated its samples."""
_SIGN = "|".join(OPERATORS)
_EXPRESSION = re.compile(rf"\s*[^\s<>=!]+\s*({_SIGN})")
_COMPARISON = re.compile(rf"\s*([^\s<>=!]+)\s*({_SIGN})\s*(\S+)\s*")
Item = TypeVar("Item")
Values = Mapping[str, float]
"""Metric -> value, of a state."""


class OutOfReplays(PenstockError):
    """The bisect has made as many replays with changes as `--replays` allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A metric compared with a number."""

    metric: str
    """Full name: `eval/…` or `train/…`."""
    sign: str
    number: float

    def holds(self, values: Mapping[str, float]) -> bool:
        """Raises `PenstockError` if the state has no such value."""
        if self.metric not in values:
            raise PenstockError(
                f"--test: {self.metric} was not measured in one of the states; the initial model has no metrics of a step: --good 1"
            )
        return OPERATORS[self.sign](values[self.metric], self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """A condition on metrics, or a command: a state that passes is good."""

    text: str
    any_of: tuple[tuple[Comparison, ...], ...] = ()
    """Alternatives, each with the comparisons that must all hold; empty for a command."""

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse `--test`. Raises `ConfigError`.

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
            raise ConfigError(f"--test {text!r}: neither an expression such as 'greedy_accuracy > 0.6' nor a program of this machine")
        return cls(text=text)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Full names of its metrics, in order; `exit_status` for a command."""
        comparisons = [comparison for alternative in self.any_of for comparison in alternative]
        return tuple(dict.fromkeys(comparison.metric for comparison in comparisons)) or (EXIT_STATUS,)

    @property
    def evaluates(self) -> bool:
        """True if it needs evaluations on held-out prompts."""
        return any(metric.startswith("eval/") for metric in self.metrics)

    def passes(self, values: Mapping[str, float]) -> bool:
        """True if a state with these values is good."""
        if not self.any_of:
            return values[EXIT_STATUS] == 0
        return any(all(comparison.holds(values) for comparison in alternative) for alternative in self.any_of)

    def failing(self, good: Mapping[str, float], bad: Mapping[str, float]) -> str | None:
        """The first metric whose comparison holds for `good` and not for `bad`, values of two states; None for a command."""
        comparisons = (comparison for alternative in self.any_of for comparison in alternative)
        return next((one.metric for one in comparisons if one.holds(good) and not one.holds(bad)), None)


def _comparison(part: str, text: str) -> Comparison:
    match = _COMPARISON.fullmatch(part)
    try:
        if match is None:
            raise ValueError
        name, sign, number = match[1], match[2], float(match[3])
    except ValueError:
        raise ConfigError(f"--test {text!r}: {part.strip()!r} is no comparison; write NAME > NUMBER, joined by `and` or `or`") from None
    for metric in (name,) if name.startswith(("eval/", "train/")) else (f"train/{name}", f"eval/{name}"):
        if meaning_of(metric) is not None:
            return Comparison(metric=metric, sign=sign, number=number)
    raise ConfigError(f"--test {text!r}: {name} is no metric of an evaluation or a step{nearest(name, [*EVAL, *TRAIN])}")


def last_transition(
    good: int, bad: int, is_good: Callable[[int], bool], *, measured: Collection[int] = (), cheap: Collection[int] = ()
) -> tuple[int, dict[int, bool]]:
    """The last good state, and every state that was tested: the step after it is the first after which all tested states are bad.

    States are numbers of steps. `measured` ones are tested first, because they cost nothing, and `cheap` ones are preferred. After the
    binary search, states at distances of 2, 4, 8, … are tested on both sides: one that is good afterwards moves the search there.

    Raises `ConfigError` if `good` is bad or `bad` is good.
    """
    points: dict[int, bool] = {}
    for number in (good, bad, *sorted(n for n in measured if good < n < bad)):
        points[number] = is_good(number)
        if number == good and not points[number]:
            raise ConfigError(f"--good {good}: the test fails after {good} steps already; choose an earlier state, or another test")
        if number == bad and points[number]:
            raise ConfigError(f"--bad {bad}: the test passes after {bad} steps; choose another state, or another test")
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
    """A smallest list of `items` that passes: without any one of them it does not (Zeller and Hildebrandt, TSE 28(2), 2002).

    `items` as a whole passes and is not tested. The second value is False if `OutOfReplays` has ended the search before.

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
    """The first 1, 2, 4, … items that pass: a first guess for `ddmin` from a ranking; None if none of these prefixes passes."""
    prefixes = (ranked[: 2**power] for power in range(len(ranked).bit_length()))
    return next((prefix for prefix in prefixes if passes(prefix)), None)


def of_the_weights(metric: str | None) -> bool:
    """True if a metric of a step depends on the weights before its update, and so shows what the steps before it did."""
    return metric is not None and metric.startswith(tuple(f"train/{name}" for name in OF_THE_WEIGHTS))


def share_of_change(metric: str | None, part: tuple[Values, Values], ends: tuple[Values, Values]) -> float | None:
    """The change of a metric between two states as a share of that between the `ends`; None without a metric or such a number."""
    if metric is None or any(metric not in values for values in (*part, *ends)):
        return None
    of_part, total = (before[metric] - after[metric] for before, after in (part, ends))
    return of_part / total if total and math.isfinite(of_part) and math.isfinite(total) else None
