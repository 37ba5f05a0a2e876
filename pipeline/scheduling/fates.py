"""What becomes of a group: exactly one fate.

The rule: what the trainer did comes before what the scorer said; only a run that has ended leaves a group unused.
"""

from collections.abc import Container, Iterable, Mapping

from penstock.pipeline.scheduling.rules import DROPPED, admitted_groups

FATES = ("trained", "filtered", "stale", "failed", "abandoned", "unused")
"""How a group can end."""
OPEN = "open"
"""Instead of a fate while the run goes on."""
SETTLED = frozenset(FATES) - {"unused"}
"""Fates that the end of the run does not change."""


def fate_of(outcome: str | None, *, trained: bool, stale: bool, ended: bool) -> str:
    """A group's fate, or `OPEN`; `outcome` is None before the scorer has given one, `ended` is true once nothing more is to come.

    Example:
        fate_of("scored", trained=False, stale=True, ended=False)  # -> "stale"
    """
    if trained:
        return "trained"
    if stale:
        return "stale"
    if outcome in DROPPED:
        return outcome
    return "unused" if ended else OPEN


def fates(
    admitted: Container[int], outcomes: Mapping[int, str], *, trained: Iterable[int], stale: Container[int], ended: bool, since: int = 0
) -> dict[int, str]:
    """Group -> fate, for every group that was admitted and every one that was trained; from `since` on."""
    members = set(trained)
    groups = [*(numbers := admitted_groups(admitted, since=since)), *sorted(members.difference(numbers))]
    return {group: fate_of(outcomes.get(group), trained=group in members, stale=group in stale, ended=ended) for group in groups}
