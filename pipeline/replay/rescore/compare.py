"""What another reward changes, added up group by group: means before and after, by component and by prompt, flips, and changed outcomes.

The rule: a sample is compared only where both rewards are there; a broken reward is listed with its reason and is in no mean.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any

from penstock.pipeline.replay.rescore.cases import SkippedGroup
from penstock.pipeline.replay.rescore.judge import Rescored
from penstock.topics.groups import Group, ScoredSample


@dataclass(slots=True)
class Pair:
    """Rewards before and after, of the samples that have both, and how many differ."""

    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    changed: int = 0

    def add(self, before: float, after: float) -> None:
        """Add a sample."""
        self.before.append(before)
        self.after.append(after)
        self.changed += before != after

    def table(self) -> dict[str, Any]:
        """Counts and means as plain data; means are None without samples."""
        count = len(self.before)
        return {
            "samples": count,
            "changed": self.changed,
            "mean_before": fsum(self.before) / count if count else None,
            "mean_after": fsum(self.after) / count if count else None,
        }


@dataclass(slots=True)
class Prompt:
    """One row of the data: its groups and their rewards."""

    prompt: str
    groups: list[int] = field(default_factory=list)
    rewards: Pair = field(default_factory=Pair)


@dataclass(slots=True)
class Comparison:
    """The report of a re-scoring under way; `threshold` is what a flip crosses."""

    threshold: float
    rewards: Pair = field(default_factory=Pair)
    components: dict[str, Pair] = field(default_factory=dict)
    """Function name -> rewards, of functions that judged before and judge now; the file or module does not matter."""
    prompts: dict[int, Prompt] = field(default_factory=dict)
    """Row of the data -> its groups and rewards."""
    flips: list[dict[str, Any]] = field(default_factory=list)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    changed: list[dict[str, Any]] = field(default_factory=list)
    """Groups that end otherwise."""
    broken: list[dict[str, Any]] = field(default_factory=list)
    left: list[dict[str, Any]] = field(default_factory=list)
    newly: list[float] = field(default_factory=list)
    """Rewards of samples that had none."""
    unscored: int = 0
    """Samples to which no function applies, or whose reward broke."""

    def add(self, found: Rescored | SkippedGroup) -> None:
        """Add a group."""
        if isinstance(found, SkippedGroup):
            self.left.append({"group": found.number, "before": found.before, "why": found.why})
            return
        before, after = found.case.before or "unjudged", found.group.outcome
        number = found.group.group
        self.outcomes[before, after] += 1
        if before != after:
            self.changed.append({"group": number, "before": before, "after": after, "reason": found.group.reason})
        if after == "failed":
            self.broken.append({"group": number, "before": before, "prompt": found.group.prompt, "reason": found.group.reason})
            return
        row = self.prompts.setdefault(found.group.row, Prompt(found.group.prompt))
        row.groups.append(number)
        recorded = {sample.rollout.sample: sample for sample in found.case.group.samples}
        for sample in found.group.samples:
            old = recorded.get(sample.rollout.sample)
            if sample.reward is None:
                self.unscored += 1
            elif old is None or old.reward is None:
                self.newly.append(sample.reward)
            else:
                self._compare(found.case.group, found.group, old, sample, (old.reward, sample.reward))

    def _compare(self, was: Group, now: Group, old: ScoredSample, new: ScoredSample, rewards: tuple[float, float]) -> None:
        before_sum, after_sum = rewards
        self.rewards.add(before_sum, after_sum)
        self.prompts[now.row].rewards.add(before_sum, after_sum)
        earlier = dict(zip(_short(was.reward_names), old.components, strict=False))
        for name, short, value in zip(now.reward_names, _short(now.reward_names), new.components, strict=False):
            before = earlier.get(short)
            if before is not None and value is not None:
                self.components.setdefault(name, Pair()).add(before, value)
        if (before_sum >= self.threshold) != (after_sum >= self.threshold):
            self.flips.append(
                {
                    "group": now.group,
                    "sample": new.rollout.sample,
                    "prompt": now.prompt,
                    "completion": new.completion,
                    "before": before_sum,
                    "after": after_sum,
                }
            )

    def table(self) -> dict[str, Any]:
        """The report as plain data, in the order of group numbers, whatever order the groups came in."""
        rows = [
            {"row": row, "prompt": one.prompt, "groups": sorted(one.groups), **one.rewards.table()}
            for row, one in sorted(self.prompts.items())
        ]
        return {
            "threshold": self.threshold,
            "groups": sum(self.outcomes.values()) + len(self.left),
            "judged": sum(self.outcomes.values()),
            **self.rewards.table(),
            "newly_judged": {"samples": len(self.newly), "mean_after": fsum(self.newly) / len(self.newly) if self.newly else None},
            "no_reward": self.unscored,
            "components": {name: pair.table() for name, pair in self.components.items()},
            "flips": _by_group(self.flips),
            "flips_up": sum(one["after"] >= self.threshold for one in self.flips),
            "flips_down": sum(one["after"] < self.threshold for one in self.flips),
            "outcomes": {f"{before} -> {after}": count for (before, after), count in sorted(self.outcomes.items())},
            "changed_outcomes": _by_group(self.changed),
            "broken": _by_group(self.broken),
            "left_out": _by_group(self.left),
            "prompts": [row for row in rows if row["changed"] or row["samples"] == 0],
        }


def _short(names: Sequence[str]) -> Sequence[str]:
    """The functions' own names, if they tell the functions apart."""
    own = [name.rpartition(":")[2] for name in names]
    return own if len(set(own)) == len(own) else names


def _by_group(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda one: (one["group"], one.get("sample", 0)))
