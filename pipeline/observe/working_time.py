"""The time in which a run was worked on: the stretches between signs of life, so that no clock counts a pause.

The rule: moments are seconds since 1970 and may come in any order; between two of them at most `PAUSE_S` apart there was work.
"""

from bisect import bisect_right, insort

PAUSE_S = 60.0
"""Workers report each second, and in long computations somebody still does: a longer silence of all is a pause."""


class WorkingTime:
    """Stretches of work, from the moments at which something was written."""

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def add(self, moment_s: float) -> None:
        """Note a sign of life."""
        place = bisect_right(self._spans, (moment_s, float("inf")))
        if place and moment_s <= self._spans[place - 1][1]:
            return
        low = high = moment_s
        if place < len(self._spans) and self._spans[place][0] - moment_s <= PAUSE_S:
            high = self._spans.pop(place)[1]
        if place and moment_s - self._spans[place - 1][1] <= PAUSE_S:
            low = self._spans.pop(place - 1)[0]
        insort(self._spans, (low, high))

    def between(self, first_s: float | None, last_s: float | None) -> float | None:
        """Seconds of work from one moment to another; None where one is not known.

        Example:
            work.between(0.0, 3600.0)  # -> 90.0, with signs of life at 0, 30, 60, 1000 and 1030
        """
        if first_s is None or last_s is None:
            return None
        return sum(max(0.0, min(high, last_s) - max(low, first_s)) for low, high in self._spans)

    def until(self, now_s: float) -> float:
        """All seconds of work; up to `now_s`, if that is so soon after the last sign of life that there may still be some."""
        last = self._spans[-1][1] if self._spans else now_s
        more = now_s - last if 0.0 < now_s - last <= PAUSE_S else 0.0
        return sum(high - low for low, high in self._spans) + more
