"""Scores groups in child processes, because a user's function may hang: the messages, and the child's side.

If a function is async or a service, a child scores several groups concurrently; else one at a time.
"""

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.infra.sandbox.pool import ChildPool
from penstock.pipeline.rewards.builtin import WARM_UPS
from penstock.pipeline.rewards.functions import Score, episodes_of, resolve
from penstock.pipeline.rewards.pool import RewardPool
from penstock.topics.groups import Group, version_min
from penstock.topics.prompts import Prompt
from penstock.topics.samples import Rollout, generated

if TYPE_CHECKING:
    from penstock.pipeline.config.schema import RewardSection

CHILD = "penstock.pipeline.rewards.child:child"
"""Target of `ChildPool`; its `init` is `spec(...)`, its payloads are `payload(...)`, its results `Score.of(...)`."""


def reward_pool(reward: "RewardSection", *, size: int = 1, **settings: Any) -> RewardPool[Any]:
    """Child processes with a run's reward functions; `settings` as in `spec`."""
    init = spec(reward.functions, reward.weights, timeout_s=reward.timeout_s, concurrency=reward.concurrency, **settings)
    children: ChildPool[Any] = ChildPool(CHILD, init=init, size=size, timeout_s=reward.timeout_s, retries=0, rules=reward.rules())
    return RewardPool(children, timeout_s=reward.timeout_s)


def spec(
    names: Sequence[str],
    weights: Sequence[float] | None = None,
    *,
    base_dir: str | Path | None = None,
    by_source: Mapping[str, Sequence[str]] | None = None,
    concurrency: int = 1,
    **settings: float,
) -> dict[str, Any]:
    """The arguments of `resolve` as JSON for a child process."""
    return {
        "names": list(names),
        "weights": None if weights is None else list(weights),
        "base_dir": None if base_dir is None else str(base_dir),
        "by_source": {source: list(functions) for source, functions in (by_source or {}).items()},
        "concurrency": concurrency,
        **settings,
    }


def payload(
    completions: Sequence[str],
    *,
    prompt: str,
    messages: Sequence[Mapping[str, Any]] | None,
    columns: Mapping[str, Any],
    completion_ids: Sequence[Sequence[int]] = (),
    step: int = 0,
    episodes: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """A group as JSON with the keywords of `Rewards.start_scoring`; prompt and columns are sent once per group."""
    return {
        "completions": list(completions),
        "prompt": prompt,
        "messages": messages,
        "columns": dict(columns),
        "completion_ids": [list(map(int, ids)) for ids in completion_ids],
        "step": step,
        "episodes": episodes,
    }


def payload_of(
    record: Prompt | Group, samples: Sequence[Rollout], completions: Sequence[str], *, messages: str | None, steps_per_version: int
) -> dict[str, Any]:
    """The payload of recorded samples and their texts; `record` has the prompt's text and columns, `messages` its chat as JSON."""
    return payload(
        completions,
        prompt=record.prompt,
        messages=json.loads(messages) if messages else None,
        columns=json.loads(record.columns),
        completion_ids=[generated(sample).tolist() for sample in samples],
        step=(version_min(samples) or 0) * steps_per_version,
        episodes=episodes_of(samples),
    )


def child(init: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """The handler of a child process: takes a `payload(...)` and returns its score by the functions of `spec(...)`."""
    rewards = resolve(**init)
    for name in rewards.names:
        if name in WARM_UPS:
            WARM_UPS[name]()
    if not any(map(inspect.iscoroutinefunction, rewards.functions)):
        return lambda group: asdict(rewards.score(**group))

    def score(group: Mapping[str, Any]) -> Any:
        result = rewards.start_scoring(**group)
        return asdict(result) if isinstance(result, Score) else _plain(result)

    score.at_once = init["concurrency"]  # type: ignore[attr-defined]
    return score


async def _plain(score: Awaitable[Score]) -> dict[str, Any]:
    return asdict(await score)
