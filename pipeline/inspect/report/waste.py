"""Shares of groups that were sampled and not trained, by cause, and what to change; only costly causes are named."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from penstock.pipeline.inspect.run_status import config_of, reward_scale
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.run_view_types import GroupFacts
from penstock.pipeline.scheduling.reward_scale import RewardScale

LEAST_GROUPS = 8
"""Least number of finished groups for which shares are computed."""
RECENT_GROUPS = 1_000
"""Newest outcomes used by the live view and `status`."""


class Waste(NamedTuple):
    """One cause: the group status, its share of the finished groups, the explanation, and what to change.

    Groups that are filtered because they are truncated have the status `truncated`.
    """

    fate: str
    share: float
    why: str
    advice: str

    def __str__(self) -> str:
        return f"{self.why}: {self.advice}"


def wastes(view: RunView, *, last: int | None = None) -> list[Waste]:
    """The costly causes, most expensive first; `last` limits them to that many of the newest outcomes."""
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
    causes = [Waste(fate, share, *EXPLAINED[fate](share, by_fate[fate], scale)) for fate, share in shares.items() if share >= LIMITS[fate]]
    return sorted(causes, key=lambda waste: -waste.share)


def as_json(causes: list[Waste]) -> list[dict[str, Any]]:
    """The same as plain data."""
    return [waste._asdict() for waste in causes]


def _longest_masked(view: RunView) -> int | None:
    """Tokens of a truncated completion, if truncated completions are not trained."""
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
    start = f"{share:.0%} of the groups are filtered, as equal rewards have no gradient"
    if not means:
        return start, "inspect one with `penstock explain`"
    mean, count = means.most_common(1)[0]
    return f"{start} ({count:,} of {len(groups):,} have the reward {mean:g})", scale.advice(fmean(rewards))


def _failed(share: float, _: list[GroupFacts], __: RewardScale) -> tuple[str, str]:
    return f"{share:.0%} of the groups failed, as their reward could not be computed", "mend the reward; the dead letters have its error"


def _stale(share: float, _: list[GroupFacts], __: RewardScale) -> tuple[str, str]:
    return f"{share:.0%} of the groups were stale", "raise schedule.max_lag, or admit fewer groups at a time"


def _abandoned(share: float, _: list[GroupFacts], __: RewardScale) -> tuple[str, str]:
    return (
        f"{share:.0%} of the groups were abandoned, as their samples did not come in time",
        "raise scorer.group_deadline_s, shorten sampling.max_new_tokens or start more rollout workers",
    )


LIMITS: Mapping[str, float] = {"filtered": 0.5, "truncated": 0.2, "failed": 0.05, "stale": 0.2, "abandoned": 0.1}
"""Group status -> smallest share of groups that is reported."""
EXPLAINED: Mapping[str, Callable[[float, list[GroupFacts], RewardScale], tuple[str, str]]] = {
    "filtered": _filtered,
    "truncated": _truncated,
    "failed": _failed,
    "stale": _stale,
    "abandoned": _abandoned,
}
