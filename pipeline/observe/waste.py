"""What is drawn and not trained: the share of groups lost to each cause, and what to change.

The rule: pure functions of the headers; a cause is named only where it costs much, so that a healthy run gets no advice.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from penstock.pipeline.observe.run_status import config_of, reward_scale
from penstock.pipeline.observe.run_view import RunView
from penstock.pipeline.observe.run_view_types import GroupFacts
from penstock.pipeline.scheduling.reward_scale import RewardScale

LEAST_GROUPS = 8
"""Groups that must have an outcome before a share means anything."""
RECENT_GROUPS = 1_000
"""Outcomes that the live view and `status` look at."""


class Waste(NamedTuple):
    """One cause: the fate, its share of the groups with an outcome, the cause and what to change, both in words.

    The fate of groups that are filtered because they are truncated is `truncated`.
    """

    fate: str
    share: float
    why: str
    advice: str

    def __str__(self) -> str:
        return f"{self.why}: {self.advice}"


def wastes(view: RunView, *, last: int | None = None) -> list[Waste]:
    """The causes that cost much, the most expensive first; empty for a run without. `last` looks at that many of the newest outcomes."""
    by_fate: dict[str, list[GroupFacts]] = {}
    longest = _longest_masked(view)
    for group in itertools.islice(reversed(view.groups), last):
        facts = view.groups[group]
        cut = facts.outcome == "filtered" and longest is not None and facts.tokens >= facts.samples * longest
        by_fate.setdefault("stale" if group in view.stale else "truncated" if cut else facts.outcome, []).append(facts)
    ended = sum(map(len, by_fate.values()))
    if ended < LEAST_GROUPS:
        return []
    shares = {fate: len(by_fate.get(fate, ())) / ended for fate in LIMITS}
    scale = reward_scale(view)
    found = [Waste(fate, share, *EXPLAINED[fate](share, by_fate[fate], scale)) for fate, share in shares.items() if share >= LIMITS[fate]]
    return sorted(found, key=lambda waste: -waste.share)


def as_json(found: list[Waste]) -> list[dict[str, Any]]:
    """The same as plain data."""
    return [waste._asdict() for waste in found]


def _longest_masked(view: RunView) -> int | None:
    """The tokens of a completion that is truncated, where such are not trained."""
    config = config_of(view)
    masked = config.get("algorithm", {}).get("truncated") == "mask"
    longest: int | None = config.get("sampling", {}).get("max_new_tokens") if masked else None
    return longest


def _truncated(share: float, _: list[GroupFacts], __: RewardScale) -> tuple[str, str]:
    why = "as every sample ran out of tokens, which algorithm.truncated = 'mask' does not train"
    return f"{share:.0%} of the groups are filtered, {why}", "raise sampling.max_new_tokens, or train them"


def _filtered(share: float, groups: list[GroupFacts], scale: RewardScale) -> tuple[str, str]:
    if 2 * sum(facts.lacks_rewards for facts in groups) > len(groups):
        why = "as fewer than two of their samples have a reward"
        return f"{share:.0%} of the groups are filtered, {why}", "the reward functions return None or fail: see `penstock explain`"
    rewards = [facts.reward_mean for facts in groups if facts.reward_mean is not None and not facts.lacks_rewards]
    means = Counter(round(reward, 6) for reward in rewards)
    start = f"{share:.0%} of the groups are filtered, as nothing is learnt from equal rewards"
    if not means:
        return start, "look at one with `penstock explain`"
    mean, count = means.most_common(1)[0]
    return f"{start} ({count:,} of {len(groups):,} have the reward {mean:g})", scale.advice(fmean(rewards))


def _failed(share: float, _: list[GroupFacts], __: RewardScale) -> tuple[str, str]:
    return f"{share:.0%} of the groups failed, as their reward could not be computed", "mend the reward; the dead letters hold its error"


def _stale(share: float, _: list[GroupFacts], __: RewardScale) -> tuple[str, str]:
    return f"{share:.0%} of the groups were too old for their step", "raise schedule.max_lag, or admit fewer groups at a time"


def _abandoned(share: float, _: list[GroupFacts], __: RewardScale) -> tuple[str, str]:
    return (
        f"{share:.0%} of the groups were abandoned, as their samples did not come in time",
        "raise scorer.group_deadline_s, shorten sampling.max_new_tokens or start more rollout workers",
    )


LIMITS: Mapping[str, float] = {"filtered": 0.5, "truncated": 0.2, "failed": 0.05, "stale": 0.2, "abandoned": 0.1}
"""Fate -> the share of groups from which on it is reported."""
EXPLAINED: Mapping[str, Callable[[float, list[GroupFacts], RewardScale], tuple[str, str]]] = {
    "filtered": _filtered,
    "truncated": _truncated,
    "failed": _failed,
    "stale": _stale,
    "abandoned": _abandoned,
}
