"""`penstock replay score`: scores a run's recorded samples again, reports changed rewards, and writes a new run on request.

Only samples with both a recorded and a new reward are compared. Failed reward functions are listed with the reason and are in no mean.
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
"""(recorded reward, new reward) of samples that have both."""


@dataclass(slots=True)
class Comparison:
    """Collects how a re-scoring changes rewards and outcomes."""

    threshold: float
    """A sample flips if its reward crosses this value."""
    rewards: Pairs = field(default_factory=list)
    components: dict[str, Pairs] = field(default_factory=dict)
    """Reward function -> rewards before and after; functions are matched by name, regardless of file or module."""
    prompts: dict[int, tuple[str, list[int], Pairs]] = field(default_factory=dict)
    """Row of the data -> its prompt, groups and rewards."""
    flips: list[dict[str, Any]] = field(default_factory=list)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(recorded outcome, new outcome) -> number of groups."""
    changed: list[dict[str, Any]] = field(default_factory=list)
    broken: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    newly: list[float] = field(default_factory=list)
    """New rewards of samples without a recorded reward."""
    unscored: int = 0
    """Number of samples without a new reward: no function applies to them, or one failed."""

    def add(self, result: ScoredGroup | SkippedGroup) -> None:
        """Add a group's result: compare its outcome and the rewards of its samples with the recorded ones."""
        if isinstance(result, SkippedGroup):
            self.skipped.append({"group": result.number, "before": result.before, "why": result.reason})
            return
        before, after = result.case.before or "unscored", result.group.outcome
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
        """Add a sample that has both rewards, (recorded, new): its function values by name, and whether it crosses the threshold."""
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
        """Return the report as plain data for JSON; lists are sorted by group."""
        rows = [
            {"row": row, "prompt": prompt, "groups": sorted(numbers), **_counts(rewards)}
            for row, (prompt, numbers, rewards) in sorted(self.prompts.items())
        ]
        return {
            "threshold": self.threshold,
            "groups": sum(self.outcomes.values()) + len(self.skipped),
            "scored": sum(self.outcomes.values()),
            **_counts(self.rewards),
            "newly_scored": {"samples": len(self.newly), "mean_after": _mean(self.newly)},
            "no_reward": self.unscored,
            "components": {name: _counts(pairs) for name, pairs in self.components.items()},
            "flips": _by_group(self.flips),
            "flips_up": sum(flip["after"] >= self.threshold for flip in self.flips),
            "flips_down": sum(flip["after"] < self.threshold for flip in self.flips),
            "outcomes": {f"{before} -> {after}": count for (before, after), count in sorted(self.outcomes.items())},
            "changed_outcomes": _by_group(self.changed),
            "broken": _by_group(self.broken),
            "not_scored": _by_group(self.skipped),
            "prompts": [row for row in rows if row["changed"] or row["samples"] == 0],
        }


def _counts(pairs: Pairs) -> dict[str, Any]:
    changed = sum(before != after for before, after in pairs)
    means = {name: _mean([pair[side] for pair in pairs]) for side, name in enumerate(("mean_before", "mean_after"))}
    return {"samples": len(pairs), "changed": changed, **means}


def _mean(rewards: Sequence[float]) -> float | None:
    return fsum(rewards) / len(rewards) if rewards else None


def _names_of(names: Sequence[str]) -> Sequence[str]:
    """Return the names without file or module if these are unique, else the full names."""
    own = [name.rpartition(":")[2] for name in names]
    return own if len(set(own)) == len(own) else names


def _by_group(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["group"], row.get("sample", 0)))


PROGRESS_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RescoreRequest:
    functions: Sequence[str] = ()
    """Names or plug-ins of reward functions; the run's own if empty."""
    weights: Sequence[float] = ()
    overrides: Sequence[str] = ()
    threshold: float = 0.5
    """A sample flips if its reward crosses this value."""
    write: str | None = None
    """Id of the new run to write; None to write none."""
    model: str | None = None
    """Directory of the run's tokenizer; the recorded one if None."""
    processes: int | None = None
    trust: Trust = NO_TRUST
    """Permission to load the run's functions if no key on this machine has signed the run."""


def score_run(
    log: Log,
    run: str,
    request: RescoreRequest,
    *,
    notify: Callable[[str], None],
    only: Callable[[int], bool] = lambda _: True,
    take: Callable[[ScoredGroup | SkippedGroup], None] | None = None,
) -> dict[str, Any]:
    """Score a recorded run's groups with the reward settings of `request`; return the comparison with the recorded rewards, for JSON.

    `only` selects groups by number. `take` is called with each result, unless the request writes a new run.

    Raises `ConfigError` for an invalid request, `ValueError` for an unknown run, `PluginError` or `ChildError` for a reward function that
    cannot be loaded, `LogError` for an unreadable log.
    """
    source = read_run(log, run)
    config = rescored(source.config, functions=request.functions, weights=request.weights, overrides=request.overrides)
    # A new run is signed on this machine with its full configuration, so every part of the configuration has to be trusted.
    keys = [*keys_of(request.overrides), *(["reward.functions"] if request.functions else [])]
    code = user_code(config, sections=() if request.write or take else ("reward",), overridden=keys)
    require_trusted(registration(log, run), trust=request.trust, notify=notify, code=code)
    described = {"before": describe(source.config, sources=source.info.get("reward_sources")), "after": describe(config)}
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
    """Raise `ConfigError` if a reward function is missing. User code is located here, and executed only in child processes."""
    names = config.reward.functions
    try:
        if builtin := [name for name in names if ":" not in split_options(name)[0]]:
            rewards.resolve(builtin)
        rewards.digests(names)
    except PluginError as error:
        raise ConfigError(f"reward.functions: {error}") from error


def describe(config: Config, *, sources: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the reward functions with weights and SHA-256 of their sources; `sources` are recorded digests, computed here if None."""
    reward = config.reward
    with suppress(PluginError):  # a run of another machine may have functions that this machine lacks
        sources = sources or rewards.digests(reward.functions)
    return {"functions": reward.functions, "weights": reward.weights or [1.0] * len(reward.functions), "sources": sources}


SHOWN = 20
SHOWN_TEXT = 60

Plain = Mapping[str, Any]


def as_page(report: Plain) -> str:
    """Format the report for a terminal: the changes in detail, then the summary."""
    return "\n".join([*_details(report), *_summary(report)])


def _details(report: Plain) -> list[str]:
    """Return the lines about single groups, samples and prompts that changed, at most `SHOWN` per list."""
    reasons = [f" ({_short(row['reason'])})" if row["reason"] else "" for row in report["changed_outcomes"]]
    pairs = zip(report["changed_outcomes"], reasons, strict=True)
    changed = [f"group {row['group']}: {row['before']} -> {row['after']}{reason}" for row, reason in pairs]
    prompts = [row["prompt"] for row in report["prompts"]]
    lists = {
        "changed outcomes": changed,
        "samples that flip": [_flip(row, prompts) for row in report["flips"]],
        "prompts whose rewards changed most": [_prompt(row, prompts) for row in _by_change(report["prompts"])],
        "failed rewards": [f"group {row['group']} ({row['before']}): {row['reason']}" for row in report["broken"]],
        "not scored": [f"group {row['group']} ({row['before'] or 'no outcome'}): {row['why']}" for row in report["not_scored"]],
        "deleted": report["gone"],
    }
    return [line for name, rows in lists.items() if rows for line in (name, *_cut(rows), "")]


def _summary(report: Plain) -> list[str]:
    """Return the lines with the totals of the report."""
    reward = report["reward"]
    edited = _edited(reward)
    before, after = (_functions(reward[when], edited) for when in ("before", "after"))
    since = "; the source was edited after the run was created" if edited else ""
    lines = [
        f"run {report['run']}: {report['scored']} of {report['groups']} groups scored again",
        f"  before  {before}",
        f"  after   {after}{since}",
        "",
        f"rewards   {_change(report)}",
    ]
    lines += [f"          {name}: {_change(row)}" for name, row in report["components"].items()]
    new = report["newly_scored"]
    if new["samples"]:
        lines.append(f"          {new['samples']} samples had no reward before: mean {_number(new['mean_after'])}")
    if report.get("no_reward"):
        lines.append(f"          {report['no_reward']} samples have no new reward: every function returned None, or one failed")
    lines.append("groups    " + (", ".join(f"{count} {change}" for change, count in report["outcomes"].items()) or "none"))
    flips = len(report["flips"])
    lines.append(f"flips     {flips} samples cross {report['threshold']:g}: {report['flips_up']} up, {report['flips_down']} down")
    if report["written"]:
        lines.append(f"written as run {report['written']}: `penstock replay train {report['written']}` trains from it")
    return lines


def _edited(reward: Plain) -> set[str]:
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
    """Format the functions with their weights, and edited ones with the first digits of their digest."""
    names = [f"{name} ({reward['sources'][name][:8]})" if name in edited else name for name in reward["functions"]]
    return ", ".join(f"{name} x {weight:g}" for name, weight in zip(names, reward["weights"], strict=True))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= SHOWN_TEXT else f"{shown[:SHOWN_TEXT]}…"
