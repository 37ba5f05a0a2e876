"""Re-scores a run group by group: reads, scores, compares, and writes a new run on request.

A sample without a reward on either side is not compared; a failed reward is listed with its reason and is in no mean.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from math import fsum
from typing import Any

from penstock.infra.log import Log
from penstock.pipeline.config.load import Config, ConfigError
from penstock.pipeline.config.plugins import PluginError, split_options
from penstock.pipeline.inspect.live.completions import without_template
from penstock.pipeline.inspect.recorded_run import read_run
from penstock.pipeline.replay.overrides import rescored
from penstock.pipeline.replay.rescored_groups import NewRun, ScoredGroup, SkippedGroup, cases, score_groups
from penstock.pipeline.rewards import functions as rewards
from penstock.pipeline.runtime.registration.run_registry import registration
from penstock.pipeline.runtime.registration.trust import NO_TRUST, Trust, keys_of, require_trusted, user_code
from penstock.pipeline.runtime.topic_reader import deleted
from penstock.topics.groups import Group, ScoredSample

Pairs = list[tuple[float, float]]
"""Rewards (before, after) of samples that have both."""


@dataclass(slots=True)
class Comparison:
    """The report of a re-scoring so far; a sample flips if its reward crosses `threshold`."""

    threshold: float
    rewards: Pairs = field(default_factory=list)
    components: dict[str, Pairs] = field(default_factory=dict)
    """Function name -> rewards, for functions on both sides; the file or module does not matter."""
    prompts: dict[int, tuple[str, list[int], Pairs]] = field(default_factory=dict)
    """Row of the data -> its prompt, groups and rewards."""
    flips: list[dict[str, Any]] = field(default_factory=list)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    changed: list[dict[str, Any]] = field(default_factory=list)
    """Groups with another outcome."""
    broken: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    newly: list[float] = field(default_factory=list)
    """Rewards of samples that had none."""
    unscored: int = 0
    """Samples to which no function applies, or whose reward function failed."""

    def add(self, result: ScoredGroup | SkippedGroup) -> None:
        """Add a group."""
        if isinstance(result, SkippedGroup):
            self.skipped.append({"group": result.number, "before": result.before, "why": result.reason})
            return
        before, after = result.case.before or "unjudged", result.group.outcome
        number = result.group.group
        self.outcomes[before, after] += 1
        if before != after:
            self.changed.append({"group": number, "before": before, "after": after, "reason": result.group.reason})
        if after == "failed":
            self.broken.append({"group": number, "before": before, "prompt": result.group.prompt, "reason": result.group.reason})
            return
        self.prompts.setdefault(result.group.row, (result.group.prompt, [], []))[1].append(number)
        recorded = {sample.rollout.sample: sample for sample in result.case.group.samples}
        for sample in result.group.samples:
            old = recorded.get(sample.rollout.sample)
            if sample.reward is None:
                self.unscored += 1
            elif old is None or old.reward is None:
                self.newly.append(sample.reward)
            else:
                self._compare(result.case.group, result.group, old, sample, (old.reward, sample.reward))

    def _compare(self, was: Group, now: Group, old: ScoredSample, new: ScoredSample, rewards: tuple[float, float]) -> None:
        self.rewards.append(rewards)
        self.prompts[now.row][2].append(rewards)
        earlier = dict(zip(_names_of(was.reward_names), old.components, strict=False))
        for name, short, value in zip(now.reward_names, _names_of(now.reward_names), new.components, strict=False):
            before = earlier.get(short)
            if before is not None and value is not None:
                self.components.setdefault(name, []).append((before, value))
        if (rewards[0] >= self.threshold) != (rewards[1] >= self.threshold):
            sample = {"group": now.group, "sample": new.rollout.sample, "prompt": now.prompt, "completion": new.completion}
            self.flips.append({**sample, "before": rewards[0], "after": rewards[1]})

    def table(self) -> dict[str, Any]:
        """The report as plain data, by group number."""
        rows = [
            {"row": row, "prompt": prompt, "groups": sorted(numbers), **_counts(rewards)}
            for row, (prompt, numbers, rewards) in sorted(self.prompts.items())
        ]
        return {
            "threshold": self.threshold,
            "groups": sum(self.outcomes.values()) + len(self.skipped),
            "judged": sum(self.outcomes.values()),
            **_counts(self.rewards),
            "newly_judged": {"samples": len(self.newly), "mean_after": _mean(self.newly)},
            "no_reward": self.unscored,
            "components": {name: _counts(pairs) for name, pairs in self.components.items()},
            "flips": _by_group(self.flips),
            "flips_up": sum(flip["after"] >= self.threshold for flip in self.flips),
            "flips_down": sum(flip["after"] < self.threshold for flip in self.flips),
            "outcomes": {f"{before} -> {after}": count for (before, after), count in sorted(self.outcomes.items())},
            "changed_outcomes": _by_group(self.changed),
            "broken": _by_group(self.broken),
            "left_out": _by_group(self.skipped),
            "prompts": [row for row in rows if row["changed"] or row["samples"] == 0],
        }


def _counts(pairs: Pairs) -> dict[str, Any]:
    changed = sum(before != after for before, after in pairs)
    means = {name: _mean([pair[side] for pair in pairs]) for side, name in enumerate(("mean_before", "mean_after"))}
    return {"samples": len(pairs), "changed": changed, **means}


def _mean(rewards: Sequence[float]) -> float | None:
    return fsum(rewards) / len(rewards) if rewards else None


def _names_of(names: Sequence[str]) -> Sequence[str]:
    """The functions' names without file or module, if these are unique."""
    own = [name.rpartition(":")[2] for name in names]
    return own if len(set(own)) == len(own) else names


def _by_group(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["group"], row.get("sample", 0)))


PROGRESS_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RescoreRequest:
    """Reward functions and settings of a re-scoring."""

    functions: Sequence[str] = ()
    """Names or plug-ins instead of the run's; the run's own if empty."""
    weights: Sequence[float] = ()
    overrides: Sequence[str] = ()
    threshold: float = 0.5
    write: str | None = None
    """Id of a new run."""
    model: str | None = None
    processes: int | None = None
    trust: Trust = NO_TRUST
    """Permission to load functions of the run although no key here has signed it."""


def score_run(
    log: Log,
    run: str,
    request: RescoreRequest,
    *,
    notify: Callable[[str], None],
    only: Callable[[int], bool] = lambda _: True,
    take: Callable[[ScoredGroup | SkippedGroup], None] | None = None,
) -> dict[str, Any]:
    """The report as plain data, ready for JSON; `take` gets each group, of those whose numbers `only` selects.

    Raises `ConfigError` for an invalid request, `ValueError` for an unknown run, `PluginError` and `ChildError` for a reward that
    cannot be loaded, `LogError`.
    """
    source = read_run(log, run)
    config = rescored(source.config, functions=request.functions, weights=request.weights, overrides=request.overrides)
    # A new run has the full configuration, which is signed on this machine: all of it has to be trusted.
    keys = [*keys_of(request.overrides), *(["reward.functions"] if request.functions else [])]
    code = user_code(config, sections=() if request.write or take else ("reward",), overridden=keys)
    require_trusted(registration(log, run), trust=request.trust, notify=notify, code=code)
    described = {"before": describe(source.config, sources=source.reward_sources), "after": describe(config)}
    check(config)
    comparison, shown = Comparison(request.threshold), time.monotonic()
    missing = deleted(log, *(f"{run}.{topic}" for topic in ("prompts", "rollouts", "groups")))
    context = NewRun.create(log, source, request.write, config) if request.write else nullcontext()
    with context as new:
        receive = take if new is None else new.add
        notify(f"scoring the groups of {run}")
        recorded = (case for case in cases(source, model=request.model) if only(case.number))
        processes = request.processes or config.scorer.processes
        for number, result in enumerate(score_groups(recorded, config, steps=source.planned_steps, processes=processes)):
            comparison.add(result)
            if receive is not None:
                receive(result)
            if time.monotonic() - shown > PROGRESS_S:
                shown = time.monotonic()
                notify(f"{number + 1} groups scored, {sum(before != after for before, after in comparison.rewards)} rewards changed")
        if new is not None:
            new.finish(origin={"run": run, "reward": described["after"], "was": described["before"]}, notify=notify)
    return {"run": run, "reward": described, **comparison.table(), "gone": missing, "written": request.write}


def check(config: Config) -> None:
    """Raise `ConfigError` for a missing reward function; user code is located here and only run in child processes."""
    names = config.reward.functions
    try:
        if builtin := [name for name in names if ":" not in split_options(name)[0]]:
            rewards.resolve(builtin)
        rewards.digests(names)
    except PluginError as error:
        raise ConfigError(f"reward.functions: {error}") from error


def describe(config: Config, *, sources: dict[str, str] | None = None) -> dict[str, Any]:
    """The reward functions with weights and SHA-256 of their sources: the recorded ones, or those on this machine."""
    reward = config.reward
    with suppress(PluginError):  # functions of another machine may be missing here
        sources = sources or rewards.digests(reward.functions)
    return {"functions": reward.functions, "weights": reward.weights or [1.0] * len(reward.functions), "sources": sources}


SHOWN = 20
SHOWN_TEXT = 60

Plain = Mapping[str, Any]


def as_page(report: Plain) -> str:
    """The report: the changes in detail, then the summary."""
    return "\n".join([*_details(report), *_summary(report)])


def _details(report: Plain) -> list[str]:
    reasons = [f" ({_short(row['reason'])})" if row["reason"] else "" for row in report["changed_outcomes"]]
    pairs = zip(report["changed_outcomes"], reasons, strict=True)
    changed = [f"group {row['group']}: {row['before']} -> {row['after']}{reason}" for row, reason in pairs]
    prompts = [row["prompt"] for row in report["prompts"]]
    lists = {
        "changed outcomes": changed,
        "samples that flip": [_flip(row, prompts) for row in report["flips"]],
        "prompts whose rewards changed most": [_prompt(row, prompts) for row in _by_change(report["prompts"])],
        "failed rewards": [f"group {row['group']} ({row['before']}): {row['reason']}" for row in report["broken"]],
        "not scored": [f"group {row['group']} ({row['before'] or 'no outcome'}): {row['why']}" for row in report["left_out"]],
        "deleted": report["gone"],
    }
    return [line for name, rows in lists.items() if rows for line in (name, *_cut(rows), "")]


def _summary(report: Plain) -> list[str]:
    reward = report["reward"]
    edited = _edited(reward)
    before, after = (_functions(reward[when], edited) for when in ("before", "after"))
    since = "; edited since the run was created" if edited else ""
    lines = [
        f"run {report['run']}: {report['judged']} of {report['groups']} groups scored again",
        f"  before  {before}",
        f"  after   {after}{since}",
        "",
        f"rewards   {_change(report)}",
    ]
    lines += [f"          {name}: {_change(row)}" for name, row in report["components"].items()]
    new = report["newly_judged"]
    if new["samples"]:
        lines.append(f"          {new['samples']} samples that had no reward: mean {_number(new['mean_after'])}")
    if report.get("no_reward"):
        lines.append(f"          {report['no_reward']} samples have no reward: every function returned None, or one failed")
    lines.append("groups    " + (", ".join(f"{count} {change}" for change, count in report["outcomes"].items()) or "none"))
    flips = len(report["flips"])
    lines.append(f"flips     {flips} samples cross {report['threshold']:g}: {report['flips_up']} up, {report['flips_down']} down")
    if report["written"]:
        lines.append(f"written as run {report['written']}: `penstock replay train {report['written']}` trains from it")
    return lines


def _edited(reward: Plain) -> set[str]:
    """Functions whose source changed since the run was created."""
    before, after = reward["before"]["sources"] or {}, reward["after"]["sources"] or {}
    return {name for name in before if name in after and before[name] != after[name]}


def _change(row: Plain) -> str:
    share = row["changed"] / row["samples"] if row["samples"] else 0.0
    means = f"mean {_number(row['mean_before'])} -> {_number(row['mean_after'])}"
    return f"{row['changed']} of {row['samples']} changed ({share:.1%}); {means}"


def _cut(rows: Sequence[str]) -> list[str]:
    more = [f"  … and {len(rows) - SHOWN} more; --json has all"] if len(rows) > SHOWN else []
    return [*(f"  {row}" for row in rows[:SHOWN]), *more]


def _flip(row: Plain, prompts: list[str]) -> str:
    change = f"{_short(without_template(row['prompt'], prompts))} -> {_short(row['completion'])}"
    return f"group {row['group']} sample {row['sample']}: {_number(row['before'])} -> {_number(row['after'])}  {change}"


def _by_change(prompts: Sequence[Plain]) -> list[Plain]:
    both = [row for row in prompts if row["samples"]]
    return sorted(both, key=lambda row: (-abs(row["mean_after"] - row["mean_before"]), row["row"]))


def _prompt(row: Plain, prompts: list[str]) -> str:
    means = f"{_number(row['mean_before'])} -> {_number(row['mean_after'])}"
    return (
        f"row {row['row']} {_short(without_template(row['prompt'], prompts))}: {row['changed']} of {row['samples']} rewards, mean {means}"
    )


def _functions(reward: Plain, edited: Collection[str]) -> str:
    """The functions with their weights; edited ones with the first digits of their digest."""
    names = [f"{name} ({reward['sources'][name][:8]})" if name in edited else name for name in reward["functions"]]
    return ", ".join(f"{name} x {weight:g}" for name, weight in zip(names, reward["weights"], strict=True))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= SHOWN_TEXT else f"{shown[:SHOWN_TEXT]}…"
