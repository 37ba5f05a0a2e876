"""Scores groups in child processes, because a user's function may hang: the pool, the child's side, and the outcome of a group.

A completion on which a function hangs, crashes or raises loses only its own reward. After a failed call, each completion of the group is
scored alone. Those that fail alone have no reward; the rest is scored by one more call, so that functions which compare completions see
them together. `timeout_s` is the limit of one completion: the first call for a group has this limit once, later ones have it per
completion if calls turned out to be slow and not hanging. If a function is async or a service, a child scores several groups concurrently.
The same failure in more than `SHARE` of the groups is an error in the function and stops the run: training on the others would be biased.
"""

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.infra.sandbox.timed_pool import ChildPool, Done, Failed
from penstock.pipeline.algorithms.advantages import is_trained, zero_variance
from penstock.pipeline.config.plugins import split_options
from penstock.pipeline.rewards.builtin import WARM_UPS
from penstock.pipeline.rewards.functions import Score, episodes_of, resolve
from penstock.pipeline.rewards.values import BrokenReward
from penstock.topics.groups import Group, Outcome, ScoredSample, version_min
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout, generated

if TYPE_CHECKING:
    from penstock.pipeline.config.schema import AlgorithmSection, RewardSection

Key = TypeVar("Key")
Payload = Mapping[str, Any]
Members = tuple[int, ...]
BY_SAMPLE = ("completions", "completion_ids", "episodes")
"""Items of a payload with one element per completion."""


SHARE = 0.05
FEWEST = 100
"""Minimum denominator of the share: at the start of a run, six equal failures stop it, one does not."""


@dataclass(slots=True)
class FaultCount:
    """Counts groups and failed rewards by cause, to stop a run with too many; a partly failed group counts by its failed share."""

    on_error: str
    """What to do if a reward function fails: `stop` the run or `drop` the group."""
    groups: int = 0
    faults: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _broken: str | None = None

    def failed(self, reason: str) -> None:
        self.partly((reason,), 1)

    def partly(self, reasons: Collection[str], samples: int) -> None:
        """Count a group of `samples` samples, some of which failed for these reasons."""
        self.groups += 1
        for reason in reasons:
            fault = fault_of(reason)
            self.faults[fault] += 1 / samples
            count = round(self.faults[fault], 9)
            if self.on_error == "stop" and count > SHARE * max(self.groups, FEWEST):
                advice = "fix the function, or set reward.on_error = 'drop'"
                self._broken = f"{reason}; it failed for {count:g} of {self.groups} groups: {advice}"

    def check(self) -> None:
        """Raise `BrokenReward` if `on_error` is `stop` and a failure was too frequent."""
        if self._broken is not None:
            raise BrokenReward(self._broken)


NO_FUNCTION = "every reward function returned None"
MOST_CAUSES = 8
"""Number of causes that are counted apart; further ones are counted together."""


@dataclass(slots=True)
class MissingRewards:
    """Counts samples without a reward by cause, each with the first group and its reason, for the run's report."""

    causes: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """Cause -> samples, group, reason."""

    def add(self, group: int, reasons: Iterable[str | None]) -> list[str]:
        """Count samples of a group, one for each reason, None if no function failed; return the reasons that are the first of a cause."""
        first = []
        for failure in reasons:
            cause = fault_of(reason := failure or NO_FUNCTION)
            cause = cause if cause in self.causes or len(self.causes) < MOST_CAUSES else "others"
            first += [] if cause in self.causes else [reason]
            samples, first_group, first_reason = self.causes.get(cause, (0, group, reason))
            self.causes[cause] = (samples + 1, first_group, first_reason)
        return first


def fault_of(reason: str) -> str:
    """Return the text by which equal failures are counted: function, exception and line; the exception's text may vary by input.

    Example:
        fault_of("reward f broke: KeyError: 'x7' (f.py line 3)")  # -> "reward f broke: KeyError (f.py line 3)"
    """
    match = re.fullmatch(r"(reward .+? broke: \w+)(?:: .*?)?( \([^()]+ line \d+\))?", reason)
    return f"{match[1]}{match[2] or ''}" if match else re.sub(r"\d+(\.\d+)?", "#", reason)


@dataclass(slots=True)
class _Group:
    payload: Payload
    count: int
    reason: str = ""
    """Error of the call for the full group; empty if it has not failed."""
    calls: set[Members] = field(default_factory=set)
    """Calls in flight, each with the indices of its completions."""
    alone: dict[int, Any] = field(default_factory=dict)
    """Completion -> result of its own call."""
    broken: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def all_members(self) -> Members:
        return tuple(range(self.count))


class RewardPool(Generic[Key]):
    """Child processes that score groups, with one result per group. Submit what `payload` returns; `Score.of` reads a result."""

    def __init__(self, children: ChildPool[tuple[Key, Members]], *, timeout_s: float) -> None:
        self._calls = children
        self._timeout_s = timeout_s
        self._groups: dict[Key, _Group] = {}
        self._slow = False
        """True once a group exceeded `timeout_s` although no completion hangs."""

    @property
    def pending(self) -> int:
        return len(self._groups)

    @property
    def busy_s(self) -> float:
        return self._calls.busy_s

    def submit(self, key: Key, payload: Payload) -> None:
        self._groups[key] = group = _Group(payload, len(payload["completions"]))
        self._call(key, group, group.all_members, slow=self._slow)

    def cancel(self, keys: set[Key]) -> None:
        self._calls.cancel({(key, members) for key in keys & self._groups.keys() for members in self._groups.pop(key).calls})

    def poll(self, timeout_s: float = 0.0) -> list[Done[Key] | Failed[Key]]:
        """Return the results of groups that have finished; empty if none does within `timeout_s`. Raises `ChildError`."""
        end = monotonic() + timeout_s
        while True:
            calls = self._calls.poll(max(0.0, end - monotonic()))
            ended = [result for call in calls if (result := self._take(call)) is not None]
            if ended or not self._groups or monotonic() >= end:
                return ended

    def close(self) -> None:
        self._calls.close()

    def _call(self, key: Key, group: _Group, members: Members, *, slow: bool) -> None:
        group.calls.add(members)
        payload = group.payload if len(members) == group.count else _part(group.payload, members)
        self._calls.submit((key, members), payload, timeout_s=self._timeout_s * (len(members) if slow else 1))

    def _take(self, call: Done[tuple[Key, Members]] | Failed[tuple[Key, Members]]) -> Done[Key] | Failed[Key] | None:
        """Apply the result of one call; return the result of its group if that was the last call, else None."""
        key, members = call.key
        group = self._groups[key]
        group.calls.remove(members)
        if isinstance(call, Done):
            group.seconds += call.seconds
        if not group.reason:
            if isinstance(call, Done):
                return self._done(key, group, call.result, members)
            group.reason = call.reason
            for number in group.all_members:
                self._call(key, group, (number,), slow=False)
            return None
        if len(group.alone) + len(group.broken) == group.count:  # this was the call for the rest
            if isinstance(call, Failed):
                return self._failed(key, call.reason)
            self._slow = self._slow or not group.broken
            return self._done(key, group, call.result, members)
        (number,) = members
        if isinstance(call, Done):
            group.alone[number] = call.result
        else:
            group.broken[number] = call.reason
        if len(group.alone) + len(group.broken) < group.count:
            return None
        return self._rest(key, group)

    def _rest(self, key: Key, group: _Group) -> Done[Key] | Failed[Key] | None:
        """Submit one call for the completions that did not fail alone; return the group's result if at most one is left, else None."""
        if not group.alone:
            return self._failed(key, group.reason)
        members = tuple(sorted(group.alone))
        if len(members) == 1:
            return self._done(key, group, group.alone[members[0]], members)
        self._call(key, group, members, slow=True)
        return None

    def _failed(self, key: Key, reason: str) -> Failed[Key]:
        del self._groups[key]
        return Failed(key=key, reason=reason)

    def _done(self, key: Key, group: _Group, result: Mapping[str, Any], members: Members) -> Done[Key]:
        del self._groups[key]
        whole = result if len(members) == group.count else _spread(result, members, group)
        return Done(key=key, result=whole, seconds=group.seconds)


def _part(payload: Payload, members: Sequence[int]) -> dict[str, Any]:
    lists = {name: payload.get(name) for name in BY_SAMPLE}
    return {**payload, **{name: [values[number] for number in members] for name, values in lists.items() if values}}


def _spread(result: Mapping[str, Any], members: Members, group: _Group) -> dict[str, Any]:
    """Expand the result for some completions to the full group; the others have no reward."""
    indices, width = {number: index for index, number in enumerate(members)}, len(result["components"][0])

    def whole(values: Sequence[Any], default: Any) -> list[Any]:
        return [values[indices[number]] if number in indices else default for number in group.all_members]

    return {
        **result,
        "rewards": whole(result["rewards"], None),
        "components": whole(result["components"], [None] * width),
        "logged": whole(result["logged"], {}) if result["logged"] else [],
        "broken": dict(group.broken),
    }


CHILD = "penstock.pipeline.rewards.scoring:child"
"""Target of `ChildPool`; its `init` is `spec(...)`, its payloads are `payload(...)`, its results `Score.of(...)`."""


def reward_pool(reward: "RewardSection", *, size: int = 1, **settings: Any) -> RewardPool[Any]:
    """Start `size` child processes with a run's reward functions; `settings` are more arguments of `resolve`, such as `max_steps`."""
    init = spec(reward.functions, reward.weights, timeout_s=reward.timeout_s, concurrency=reward.concurrency, **settings)
    children: ChildPool[Any] = ChildPool(CHILD, init=init, size=size, timeout_s=reward.timeout_s, retries=0, rules=reward.rules())
    return RewardPool(children, timeout_s=reward.timeout_s)


def spec(
    names: Sequence[str],
    weights: Sequence[float] | None = None,
    *,
    base_dir: str | Path | None = None,
    concurrency: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """Return the `init` of a child process that scores groups, as JSON: arguments of `resolve`, to which `settings` are added."""
    return {"names": list(names), "weights": weights, "base_dir": base_dir and str(base_dir), "concurrency": concurrency, **settings}


def payload(completions: Sequence[str], *, completion_ids: Sequence[Sequence[int]] = (), **group: Any) -> dict[str, Any]:
    """Return one group as JSON for a child process; `group` are the other arguments of `Rewards.start_scoring`."""
    return {"completions": list(completions), "completion_ids": [list(map(int, ids)) for ids in completion_ids], **group}


def payload_of(
    record: Prompt | Group, samples: Sequence[Rollout], completions: Sequence[str], *, messages: str | None, steps_per_version: int
) -> dict[str, Any]:
    """Return the payload of recorded samples and their texts. `record` has the prompt and its columns; `messages` is its chat as JSON."""
    return payload(
        completions, prompt=record.prompt, messages=json.loads(messages) if messages else None, columns=json.loads(record.columns),
        completion_ids=[generated(sample).tolist() for sample in samples], step=(version_min(samples) or 0) * steps_per_version,
        episodes=episodes_of(samples),
    )  # fmt: skip


def child(init: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Return the function that a child process calls for each `payload(...)`: it returns the score as JSON. `init` is `spec(...)`."""
    rewards = resolve(**init)
    for name in rewards.names:
        if warm_up := WARM_UPS.get(split_options(name)[0]):
            warm_up()
    if not any(map(inspect.iscoroutinefunction, rewards.functions)):
        return lambda group: asdict(rewards.score(**group))

    def score(group: Mapping[str, Any]) -> Any:
        result = rewards.start_scoring(**group)
        return asdict(result) if isinstance(result, Score) else _plain(result)

    score.at_once = init["concurrency"]  # type: ignore[attr-defined]
    return score


async def _plain(score: Awaitable[Score]) -> dict[str, Any]:
    return asdict(await score)


UNTRAINED = "no sample has a trained token: each is truncated, aborted, empty or masked"
"""Reason of a group that is filtered although its rewards may differ."""


def scored_group(
    group: Group, samples: Sequence[Rollout], completions: Sequence[str], score: Score, *, algorithm: "AlgorithmSection"
) -> Group:
    """Return a group with its samples and outcome by these rewards, after the configured penalty for truncated completions and filters."""
    penalty = algorithm.truncated_penalty if algorithm.truncated == "penalise" else 0.0
    scored = tuple(
        ScoredSample(
            rollout=sample,
            completion=completions[number],
            reward=reward if reward is None or sample.finish != "length" else reward + penalty,
            components=score.components[number],
            reward_error=score.broken.get(number),
            logged=json.dumps(score.logged[number]) if score.logged and score.logged[number] else None,
        )
        for number, (sample, reward) in enumerate(zip(samples, score.rewards, strict=True))
    )
    reason = _filtered(scored, score, algorithm)
    metrics = json.dumps(dict(score.metrics)) if score.metrics else None
    return replace(group, outcome="scored" if reason is None else "filtered", reason=reason, samples=scored, metrics=metrics)


def _filtered(samples: Sequence[ScoredSample], score: Score, algorithm: "AlgorithmSection") -> str | None:
    """Return the reason why a group is filtered, and so not trained on; None if it is not."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if len(rewards) < min(2, len(samples)):
        causes = "; ".join(dict.fromkeys(score.broken.values())) or f"{NO_FUNCTION} for the others"
        return f"{len(rewards)} of {len(samples)} samples have a reward: {causes}"
    if algorithm.filter_zero_variance and zero_variance(rewards) and not (algorithm.combine == "advantages" and _differ(score)):
        return f"every sample {'with a reward ' if len(rewards) < len(samples) else ''}has the reward {rewards[0]:g}"
    if not any(is_trained(sample.rollout, truncated=algorithm.truncated) for sample in samples if sample.reward is not None):
        return UNTRAINED
    return None


def _differ(score: Score) -> bool:
    """True if the values of any reward function differ among the samples that it applies to."""
    columns = [[value for value in column if value is not None] for column in zip(*score.components, strict=True)]
    return any(values and not zero_variance(values) for values in columns)


def group_of(prompt: Prompt, outcome: Outcome, *, reason: str | None, reward: "RewardSection", scored_ns: int) -> Group:
    """Return the record of a group without samples for the topic `groups`, with the fields of its prompt and the configured rewards."""
    return Group(
        group=prompt.group, outcome=outcome, reason=reason, slot=prompt.slot, min_version=prompt.min_version,
        samples_per_prompt=prompt.samples_per_prompt, epoch=prompt.epoch, row=prompt.row, prompt=prompt.prompt, prompt_ids=prompt.token_ids,
        columns=prompt.columns, reward_names=tuple(reward.functions), reward_weights=tuple(reward.weights or [1.0] * len(reward.functions)),
        samples=(), created_ns=prompt.created_ns, scored_ns=scored_ns,
    )  # fmt: skip
