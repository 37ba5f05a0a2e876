"""The final status of a group: every admitted group ends with exactly one.

The trainer's record takes precedence over the scorer's outcome; a group is unused only if the run has ended.
"""

from collections.abc import Container, Iterable, Mapping

from penstock.pipeline.scheduling.rules import DROPPED, admitted_groups

STATUSES = ("trained", "filtered", "stale", "failed", "abandoned", "unused")
"""Final statuses of a group."""
OPEN = "open"
"""Status of an unfinished group."""
SETTLED = frozenset(STATUSES) - {"unused"}
"""Statuses that the end of the run does not change."""


def group_status(outcome: str | None, *, trained: bool, stale: bool, ended: bool) -> str:
    """Status of a group, final or `OPEN`; `outcome` is None before the group is scored, `ended` is true after the end of the run."""
    if trained:
        return "trained"
    if stale:
        return "stale"
    if outcome in DROPPED:
        return outcome
    return "unused" if ended else OPEN


def group_statuses(
    admitted: Container[int], outcomes: Mapping[int, str], *, trained: Iterable[int], stale: Container[int], ended: bool, since: int = 0
) -> dict[int, str]:
    """Final or open status of each admitted or trained group from number `since` on."""
    members = set(trained)
    groups = [*(numbers := admitted_groups(admitted, since=since)), *sorted(members.difference(numbers))]
    return {group: group_status(outcomes.get(group), trained=group in members, stale=group in stale, ended=ended) for group in groups}
