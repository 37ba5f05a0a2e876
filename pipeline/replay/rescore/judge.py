"""Another reward, or a repaired one, over recorded rollouts: judged as a live scorer judges, in child processes with its time limits.

The rule: nothing is written to the run that is read, and a reward that breaks is a group without rewards and a reason, never a zero.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.infra.sandbox.pool import Done, Failed
from penstock.pipeline.config.load import Config, ConfigError, from_table, override, to_json
from penstock.pipeline.envs.group_outcome import group_outcome
from penstock.pipeline.envs.reward_child import payload_of, reward_pool
from penstock.pipeline.envs.rewards import Score
from penstock.pipeline.envs.scoring.reward_pool import RewardPool
from penstock.pipeline.replay.rescore.cases import Case, SkippedGroup
from penstock.topics.groups import Group

CHANGEABLE = ("algorithm.truncated", "algorithm.truncated_penalty", "algorithm.filter_zero_variance")
"""Keys beside `reward.…` that decide how a group of given samples ends."""
WINDOW = 32
"""Groups in hand for each child process: their answers are given in order, and a slow one holds the later ones up."""
POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """A group that was judged again."""

    case: Case
    group: Group
    """With the new outcome; without samples where the reward broke."""


def changed(config: Config, *, functions: Sequence[str] = (), weights: Sequence[float] = (), overrides: Sequence[str] = ()) -> Config:
    """The run's configuration with another reward. Raises `ConfigError` for a key that has no part in judging a recorded sample."""
    for text in overrides:
        key = text.partition("=")[0].strip()
        if not key.startswith("reward.") and key not in CHANGEABLE:
            raise ConfigError(f"--set {text}: {key} has no part in a reward; what can be changed are reward.*, {', '.join(CHANGEABLE)}")
    table = json.loads(to_json(config))
    if functions:  # the weights were those of other functions, unless there are as many and nobody says otherwise
        kept = table["reward"]["weights"]
        table["reward"]["weights"] = list(weights) or (kept if kept and len(kept) == len(functions) else None)
        table["reward"]["functions"] = list(functions)
    elif weights:
        table["reward"]["weights"] = list(weights)
    return override(from_table(table), [f"reward.functions={json.dumps(table['reward']['functions'])}", *overrides])


def rescore(recorded: Iterable[Case | SkippedGroup], config: Config, *, steps: int, processes: int) -> Iterator[Rescored | SkippedGroup]:
    """Judge group after group of a run of so many steps under `config.reward`, in the order given.

    Raises `ChildError` (one line) where a reward function cannot be loaded at all.
    """
    settings = {"max_steps": steps, "max_completion_length": config.max_completion_tokens, "by_source": config.data.rewards}
    with reward_pool(config.reward, size=processes, **settings) as pool:
        waiting: dict[int, Case | SkippedGroup] = {}
        ended: dict[int, Rescored | SkippedGroup] = {}
        given = 0
        for number, case in enumerate(recorded):
            if isinstance(case, SkippedGroup):
                ended[number] = case
            else:
                waiting[number] = case
                per_version = config.schedule.steps_per_version
                asked = payload_of(case.group, case.samples, case.completions, messages=case.messages, steps_per_version=per_version)
                pool.submit(number, asked)
            while len(waiting) + len(ended) >= WINDOW * processes and given not in ended:
                _take(pool, waiting, ended, config)
            while given in ended:
                yield ended.pop(given)
                given += 1
        while waiting or ended:
            while given not in ended:
                _take(pool, waiting, ended, config)
            yield ended.pop(given)
            given += 1


def _take(
    pool: RewardPool[int], waiting: dict[int, Case | SkippedGroup], ended: dict[int, Rescored | SkippedGroup], config: Config
) -> None:
    for result in pool.poll(POLL_S):
        case = waiting.pop(result.key)
        assert isinstance(case, Case)
        ended[result.key] = Rescored(case=case, group=judged(case, result, config))


def judged(case: Case, result: Done[int] | Failed[int], config: Config) -> Group:
    """The group with its new outcome; a broken reward is `failed`, with the reason and without samples."""
    names = tuple(config.reward.functions)
    same = replace(case.group, reward_names=names, reward_weights=tuple(config.reward.weights or [1.0] * len(names)))
    if isinstance(result, Failed):
        return replace(same, outcome="failed", reason=result.reason, samples=(), metrics=None)
    found = group_outcome(case.samples, case.completions, Score.of(result.result), algorithm=config.algorithm)
    return replace(same, outcome=found.outcome, reason=found.reason, samples=found.samples, metrics=found.metrics)
