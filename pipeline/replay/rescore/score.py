"""Scores recorded groups as a live scorer does: in child processes with time limits.

A reward function that fails gives a failed group with a reason, never a reward of zero.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.infra.sandbox.pool import Done, Failed
from penstock.pipeline.config.load import Config, ConfigError, from_table, override, to_json
from penstock.pipeline.replay.rescore.cases import Case, SkippedGroup
from penstock.pipeline.rewards.child import payload_of, reward_pool
from penstock.pipeline.rewards.functions import Score
from penstock.pipeline.rewards.group_outcome import group_outcome
from penstock.pipeline.rewards.pool import RewardPool
from penstock.topics.groups import Group

CHANGEABLE = ("algorithm.truncated", "algorithm.truncated_penalty", "algorithm.filter_zero_variance")
"""Keys besides `reward.…` that affect a group's outcome."""
WINDOW = 32
"""Groups in flight for each child process; results are yielded in order, so a slow group delays later ones."""
POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group with its new outcome."""

    case: Case
    group: Group
    """With the new outcome; without samples if the reward function failed."""


def changed(config: Config, *, functions: Sequence[str] = (), weights: Sequence[float] = (), overrides: Sequence[str] = ()) -> Config:
    """The run's configuration with another reward. Raises `ConfigError` for a key that does not affect the reward of a recorded sample."""
    for text in overrides:
        key = text.partition("=")[0].strip()
        if not key.startswith("reward.") and key not in CHANGEABLE:
            raise ConfigError(f"--set {text}: {key} does not affect a reward; keys that do: reward.*, {', '.join(CHANGEABLE)}")
    table = json.loads(to_json(config))
    if functions:  # keep the weights if their number matches
        recorded = table["reward"]["weights"]
        table["reward"]["weights"] = list(weights) or (recorded if recorded and len(recorded) == len(functions) else None)
        table["reward"]["functions"] = list(functions)
    elif weights:
        table["reward"]["weights"] = list(weights)
    return override(from_table(table), [f"reward.functions={json.dumps(table['reward']['functions'])}", *overrides])


def score_groups(
    recorded: Iterable[Case | SkippedGroup], config: Config, *, steps: int, processes: int
) -> Iterator[ScoredGroup | SkippedGroup]:
    """Score the groups of a run of `steps` steps under `config.reward`, in their order.

    Raises `ChildError` (one line) if a reward function cannot be loaded.
    """
    settings = {"max_steps": steps, "max_completion_length": config.max_completion_tokens, "by_source": config.data.rewards}
    with reward_pool(config.reward, size=processes, **settings) as pool:
        waiting: dict[int, Case | SkippedGroup] = {}
        ended: dict[int, ScoredGroup | SkippedGroup] = {}
        yielded = 0
        for number, case in enumerate(recorded):
            if isinstance(case, SkippedGroup):
                ended[number] = case
            else:
                waiting[number] = case
                per_version = config.schedule.steps_per_version
                payload = payload_of(case.group, case.samples, case.completions, messages=case.messages, steps_per_version=per_version)
                pool.submit(number, payload)
            while len(waiting) + len(ended) >= WINDOW * processes and yielded not in ended:
                _take(pool, waiting, ended, config)
            while yielded in ended:
                yield ended.pop(yielded)
                yielded += 1
        while waiting or ended:
            while yielded not in ended:
                _take(pool, waiting, ended, config)
            yield ended.pop(yielded)
            yielded += 1


def _take(
    pool: RewardPool[int], waiting: dict[int, Case | SkippedGroup], ended: dict[int, ScoredGroup | SkippedGroup], config: Config
) -> None:
    for result in pool.poll(POLL_S):
        case = waiting.pop(result.key)
        assert isinstance(case, Case)
        ended[result.key] = ScoredGroup(case=case, group=scored_group(case, result, config))


def scored_group(case: Case, result: Done[int] | Failed[int], config: Config) -> Group:
    """The group with its new outcome; `failed` without samples, with the reason, if the reward function failed."""
    names = tuple(config.reward.functions)
    same = replace(case.group, reward_names=names, reward_weights=tuple(config.reward.weights or [1.0] * len(names)))
    if isinstance(result, Failed):
        return replace(same, outcome="failed", reason=result.reason, samples=(), metrics=None)
    outcome = group_outcome(case.samples, case.completions, Score.of(result.result), algorithm=config.algorithm)
    return replace(same, outcome=outcome.outcome, reason=outcome.reason, samples=outcome.samples, metrics=outcome.metrics)
