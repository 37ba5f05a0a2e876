"""Summary sentences of a report: whether the run learned, what went wrong, what to change next."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from penstock.pipeline.algorithms.advantages import RewardScale
from penstock.pipeline.inspect.report.formats import percent
from penstock.pipeline.inspect.run_status import config_of, reward_scale
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.run_view_types import GroupFacts
from penstock.pipeline.runtime.reporting.log_lines import counted
from penstock.topics.wire.checked import json_object
from penstock.topics.wire.errors import Unusable

TRUNCATED, LOW_ESS = 0.2, 0.5
"""Share of truncated samples above which, and effective sample size below which, a run needs attention."""
LEAST_GROUPS = 8
RECENT_GROUPS, LEAST_RECENT = 1_000, 32
"""Number of newest outcomes that live view and `status` use, and smallest number for which there is advice."""


class Waste(NamedTuple):
    """A cause for which groups were not trained: status (or `truncated`), share of the finished groups, explanation, what to change."""

    status: str
    share: float
    why: str
    advice: str

    def __str__(self) -> str:
        return f"{self.why}: {self.advice}"


def wastes(view: RunView, *, last: int | None = None) -> list[Waste]:
    """Return the causes for which many groups were not trained, the largest share first; over the `last` outcomes if not None."""
    by_status: dict[str, list[GroupFacts]] = {}
    longest = _longest_masked(view)
    for group in itertools.islice(reversed(view.groups), last):
        facts = view.groups[group]
        cut = facts.outcome == "filtered" and longest is not None and facts.tokens >= facts.samples * longest
        by_status.setdefault("stale" if group in view.stale else "truncated" if cut else facts.outcome, []).append(facts)
    ended = sum(map(len, by_status.values()))
    if ended < (LEAST_GROUPS if last is None else LEAST_RECENT):
        return []
    causes = []
    if config_of(view).get("schedule", {}).get("oversample_groups"):
        by_status = {name: facts for name, facts in by_status.items() if name not in ("stale", "abandoned")}  # expected for extra groups
    for status, (limit, text, advice) in CAUSES.items():
        if (share := len(by_status.get(status, ())) / ended) >= limit:
            cause, own_advice = _filtered(by_status[status], reward_scale(view)) if status == "filtered" else ("", advice)
            causes.append(Waste(status, share, f"{share:.0%} of the groups {text}{cause and ', '}{cause}", own_advice))
    return sorted(causes, key=lambda waste: -waste.share)


def _longest_masked(view: RunView) -> int | None:
    """Return the number of tokens of a truncated completion; None if truncated completions are trained."""
    config = config_of(view)
    masked = config.get("algorithm", {}).get("truncated") == "mask"
    longest: int | None = config.get("sampling", {}).get("max_new_tokens") if masked else None
    return longest


def _filtered(groups: list[GroupFacts], scale: RewardScale) -> tuple[str, str]:
    """Return why these groups were filtered, as a clause, and what to change."""
    if 2 * sum(facts.lacks_rewards for facts in groups) > len(groups):
        return "because fewer than two samples have a reward", "reward functions return None or fail: see `penstock explain RUN GROUP`"
    rewards = [facts.reward_mean for facts in groups if facts.reward_mean is not None and not facts.lacks_rewards]
    cause = "because equal rewards give no gradient"
    if not rewards:
        return cause, "inspect one with `penstock explain RUN GROUP`"
    mean, count = Counter(round(reward, 6) for reward in rewards).most_common(1)[0]
    return f"{cause} ({count:,} of {len(groups):,} have the reward {mean:g})", scale.advice(fmean(rewards))


CAUSES: Mapping[str, tuple[float, str, str]] = {
    "filtered": (0.5, "are filtered", ""),
    "truncated": (
        0.2,
        "are filtered, because every sample is truncated, and algorithm.truncated = 'mask' excludes truncated samples",
        "raise sampling.max_new_tokens, or change algorithm.truncated",
    ),
    "failed": (0.05, "failed, because their reward could not be computed", "fix the reward function; its error is in the dead letters"),
    "stale": (0.2, "were stale", "raise schedule.max_lag, or lower rollout.slots"),
    "abandoned": (
        0.1,
        "were abandoned, because their samples were not generated in time",
        "raise scorer.group_deadline_s, shorten sampling.max_new_tokens or start more rollout workers",
    ),
}
"""Group status -> (smallest share of groups that is reported, explanation, what to change); `_filtered` adds to the first."""


NOISE = 2.5
"""Number of standard errors that a change of the reward must exceed to be reported. Noise alone exceeds it in less than 5 % of runs."""
LEAST_POINTS = 8
LEAST_CHANGE = 0.01


def headline(report: Mapping[str, Any]) -> list[str]:
    """Return the summary sentences of a report; the first one is about whether the run learned."""
    names = ", ".join(dict.fromkeys(str(change["what"]) for change in report.get("changed") or ()))
    changed = f"Changed while the run was stopped: {names}. Rewards before and after may not be comparable."
    return [learned(report), *([changed] if names else []), *(f"{step[0].upper()}{step[1:]}." for step in next_steps(report))]


def learned(report: Mapping[str, Any]) -> str:
    """Return a sentence on whether the reward changed by more than the noise of its curve."""
    first, last = report["reward"]["first"], report["reward"]["last"]
    if not report["steps"]:
        return "No optimizer step was made."
    if first is None or last is None:
        return f"{report['steps']:,} steps; no sample has a reward."
    curve = [value for value in report["reward"].get("curve") or () if value is not None]
    advice = ""
    if len(curve) < LEAST_POINTS:
        result = "Too short to tell"
    elif abs(last - first) <= max(LEAST_CHANGE, NOISE * standard_error(curve)):
        result = "No clear change"
    elif last > first:
        result = "It learned"
    else:
        result, advice = "It got worse", "; try a smaller trainer.lr"
    return f"{result}: reward {first:.2f} -> {last:.2f}{_held_out(report.get('eval') or ())}{advice}."


def attention(report: Mapping[str, Any]) -> list[str]:
    """Return a sentence per problem of the samples or a worker, with the configuration key that may solve it."""
    measured = advice(report["practice"]["truncated_last"], report["ess"]["mean"])
    return [*report["failures"], *report["missing_rewards"], *measured]


def advice(truncated: float | None, ess: float | None) -> list[str]:
    """Return what to change for a share of truncated samples or an effective sample size that needs attention."""
    lines = []
    if truncated is not None and truncated > TRUNCATED:
        cut = f"{percent(truncated)} of the last step's samples are truncated, and a cut-off answer counts as wrong"
        lines.append(f"{cut}: raise sampling.max_new_tokens")
    if ess is not None and ess < LOW_ESS:
        lines.append(f"the effective sample size is {ess:.2f}: lower schedule.max_lag or trainer.lr, or set algorithm.correction")
    return lines


def next_steps(report: Mapping[str, Any]) -> list[str]:
    """Return what to change next: to avoid dropped groups if there are many, otherwise to remove the bottleneck."""
    if wastes := report.get("waste", ())[:2]:
        return [f"{waste['why']}: {waste['advice']}" for waste in wastes]
    bottleneck = report.get("bottleneck")
    return [f"{named(bottleneck['who'])}: {bottleneck['advice']}"] if bottleneck and report["steps"] else []


def named(bottleneck: str) -> str:
    """Return a sentence that names a bottleneck, which is a role or "turns", without its reason."""
    return "rollout and trainer take turns" if bottleneck == "turns" else f"{bottleneck} is the bottleneck"


def missing_rewards(view: RunView) -> list[str]:
    """Return a sentence per cause for which samples have no reward, the most frequent first."""
    causes: dict[str, tuple[int, int, str]] = {}
    for text in view.missing_rewards.values():
        for cause, samples, group, reason in _causes(text):
            before = causes.get(cause, (0, group, reason))
            causes[cause] = (before[0] + samples, *min(before[1:], (group, reason)))
    return [
        f"{counted(samples, 'sample')} without a reward, first in group {group}: {reason}"
        for samples, group, reason in sorted(causes.values(), reverse=True)
    ]


def _causes(text: str) -> list[tuple[str, int, int, str]]:
    """Parse a scorer's label: cause, samples, group and reason of each; [] for any other text, which a stranger may write to `metrics`."""
    try:
        causes = json_object(text, "missing_rewards")
        return [(cause, int(samples), int(group), str(reason)) for cause, (samples, group, reason) in causes.items()]
    except (Unusable, ValueError, TypeError, OverflowError):
        return []


def standard_error(curve: list[float]) -> float:
    """Return the standard error of the difference between the means of the curve's first and last tenth, under noise alone."""
    return noise(curve) * math.sqrt(2 / math.ceil(len(curve) / 10))


def noise(curve: list[float]) -> float:
    """Estimate the standard deviation of the noise around a smooth curve from the differences of neighbouring points."""
    steps = [later - earlier for earlier, later in itertools.pairwise(curve)]
    return statistics.pstdev(steps) / 2**0.5 if len(steps) > 1 else 0.0


def _held_out(evals: Sequence[Mapping[str, Any]]) -> str:
    """Return the change of accuracy or reward from the first to the last evaluation, as a clause; "" for fewer than two."""
    solved = [entry["greedy_accuracy"] for entry in evals if entry.get("greedy_accuracy") is not None]
    rewards = [entry["greedy_reward"] for entry in evals if entry.get("greedy_reward") is not None]
    if len(solved) > 1 and any(solved):
        return f", held-out accuracy {percent(solved[0])} -> {percent(solved[-1])}"
    return f", held-out reward {rewards[0]:.2f} -> {rewards[-1]:.2f}" if len(rewards) > 1 else ""
