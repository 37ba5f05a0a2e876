"""Scores a group by TRL-style functions `f(prompts, completions, **columns) -> list[float | None]`, weighted and added.

Beside columns a function can ask for `completion_ids` and `trainer_state`, as in TRL, and for `completion_lengths` and
`max_completion_length`. The rule: a broken reward is a failure with its reason, never a zero; `None` says that a function does not apply.
Importing this module is cheap: every child process does.
"""

import asyncio
import hashlib
import inspect
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any

from penstock.pipeline.config.plugins import PluginError, is_address, load, nearest, short_name, source_digest, split_options
from penstock.pipeline.envs import builtin_rewards
from penstock.pipeline.envs.builtin_rewards import BUILTINS
from penstock.pipeline.envs.datasets.prompt_order import SOURCE_COLUMN
from penstock.pipeline.envs.reward_faults import RewardError
from penstock.pipeline.envs.reward_service import RewardService
from penstock.topics.samples import GENERATED, Turn, reward_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A group's rewards, in the order of its completions."""

    rewards: tuple[float, ...]
    components: tuple[tuple[float | None, ...], ...]
    """One row per completion, with one value per reward function."""

    @staticmethod
    def of(result: Mapping[str, Any]) -> "Score":
        """Convert a child's answer."""
        return Score(rewards=tuple(result["rewards"]), components=tuple(tuple(row) for row in result["components"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What TRL's `trainer_state` holds, as far as it follows from the record of a group: a reward judged again is the same."""

    global_step: int
    """Optimizer steps behind the oldest weights that drew the group."""
    max_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """The reward functions of a run with their names and weights."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    functions: tuple[Callable[..., Any], ...]
    max_steps: int = 0
    max_completion_length: int = 0
    by_source: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of a mixture: source -> the functions that judge its rows, by their names or whole; a source that is missing has all."""

    def score(self, completions: Sequence[str], **group: Any) -> Score:
        """As `judge`, which it runs to its end."""
        return _loop().run_until_complete(self.judge(completions, **group))

    async def judge(
        self,
        completions: Sequence[str],
        *,
        prompt: str,
        messages: Sequence[Mapping[str, Any]] | None,
        columns: Mapping[str, Any],
        completion_ids: Sequence[Sequence[int]] = (),
        step: int = 0,
        episodes: Sequence[Mapping[str, Any]] | None = None,
    ) -> Score:
        """Score the completions of one prompt; for a conversational one (`messages`), functions get lists of messages, as in TRL.

        `step` is the number of optimizer steps behind the weights that drew them. `episodes`, of trajectories, has what `episode` returns
        for each: a function can ask for `environment_reward` and for `conversations`; completions are what the policy said in them.
        Raises:
            RewardError: a function raised, or returned a wrong length, a wrong type or a number that is not finite; or none applies.
        """
        count = len(completions)
        given = {name: [value] * count for name, value in columns.items()}
        said = [[{"role": "assistant", "content": text}] for text in completions]
        if episodes is not None:
            given.setdefault("environment_reward", [one["reward"] for one in episodes])
            conversations = [json.loads(one["messages"]) for one in episodes]
            given.setdefault("conversations", conversations)
            said = [answers_of(conversation) for conversation in conversations]
        arguments = self._offered(given, completion_ids, step)
        if messages is None:
            arguments |= {"prompts": [prompt] * count, "completions": list(completions)}
        else:
            arguments |= {"prompts": [messages] * count, "completions": said}
        by_function = await self._values(arguments, last=[answers[-1]["content"] for answers in said])
        components = tuple(zip(*by_function, strict=True)) if count else ()
        return Score(rewards=tuple(self._total(row, number) for number, row in enumerate(components)), components=components)

    def check(self, columns: Mapping[str, Any]) -> None:
        """Check that a row has the columns that every function takes. Raises `RewardError` that names the column and the nearest one."""
        for name, function in self._judges(columns.get(SOURCE_COLUMN)):
            _arguments(name, function, {**self._offered(columns, (), 0), "prompts": [], "completions": []})

    def _judges(self, source: Any) -> list[tuple[str, Callable[..., Any]]]:
        """The functions that apply to the rows of a source, with their names."""
        chosen = self.by_source.get(source)
        every = zip(self.names, self.functions, strict=True)
        return [(name, function) for name, function in every if chosen is None or not {name, short_name(name)}.isdisjoint(chosen)]

    def _offered(self, columns: Mapping[str, Any], completion_ids: Sequence[Sequence[int]], step: int) -> dict[str, Any]:
        """The columns, and what functions can ask for beside them unless a column has its name."""
        facts = {
            "completion_ids": [list(ids) for ids in completion_ids],
            "completion_lengths": [len(ids) for ids in completion_ids],
            "max_completion_length": self.max_completion_length,
            "environment_reward": [None for _ in completion_ids],
            "conversations": [None for _ in completion_ids],
            "trainer_state": TrainerState(global_step=step, max_steps=self.max_steps),
        }
        return {**columns, **{name: value for name, value in facts.items() if name not in columns}}

    async def _values(self, offered: Mapping[str, Any], *, last: Sequence[str]) -> list[list[float | None]]:
        """What each function returns; built-in ones score `last`, the texts that the policy generated last."""
        count = len(last)
        returned: list[Any] = []
        judges = dict(self._judges(next(iter(offered.get(SOURCE_COLUMN, ())), None)))
        for name in self.names:
            if (function := judges.get(name)) is None:
                returned.append([None] * count)
                continue
            built_in = split_options(name)[0] in BUILTINS
            arguments = _arguments(name, function, {**offered, "completions": last} if built_in else offered)
            try:
                returned.append(function(**arguments))
            # The boundary to a user's function: its failure is the group's.
            except (Exception, SystemExit) as error:
                raise _broke(name, error) from error
        waiting = [number for number, value in enumerate(returned) if inspect.isawaitable(value)]
        if waiting:
            values = await asyncio.gather(*(returned[number] for number in waiting), return_exceptions=True)
            for number, value in zip(waiting, values, strict=True):
                if isinstance(value, BaseException):
                    raise _broke(self.names[number], value) from value
                returned[number] = value
        return [_checked(name, value, count) for name, value in zip(self.names, returned, strict=True)]

    def _total(self, row: Sequence[float | None], number: int) -> float:
        applying = [weight * value for weight, value in zip(self.weights, row, strict=True) if value is not None]
        if not applying:
            raise RewardError(f"no reward function applies to completion {number}: {', '.join(self.names)} returned None")
        total = sum(applying)
        if not isfinite(total):
            raise RewardError(f"the weighted sum of the rewards of completion {number} is {total}")
        return total


def resolve(
    names: Sequence[str],
    weights: Sequence[float] | None = None,
    *,
    base_dir: str | Path | None = None,
    max_steps: int = 0,
    max_completion_length: int = 0,
    by_source: Mapping[str, Sequence[str]] | None = None,
    timeout_s: float = 30.0,
    concurrency: int = 1,
) -> Rewards:
    """Resolve reward functions by name, plug-in spec or address, with options after a question mark; weights default to 1.

    `max_steps` and `max_completion_length` are the run's, for functions that ask for them; `timeout_s`, which a service has for a group,
    and `concurrency`, the groups that may ask it side by side, are for addresses.

    Raises:
        PluginError: an unknown name, a function that cannot be loaded, or an option that it does not take.
        ValueError: there is not one finite weight for each.
    """
    if not names:
        raise ValueError("no reward function: give at least one")
    if weights is not None and (len(weights) != len(names) or not all(isfinite(weight) for weight in weights)):
        raise ValueError(f"reward weights {list(weights)}: expected {len(names)} finite numbers, one for each of {', '.join(names)}")
    functions = tuple(
        RewardService(name, timeout_s=timeout_s, connections=concurrency).judge if is_address(name) else _find(name, base_dir)
        for name in names
    )
    return Rewards(
        names=tuple(names),
        weights=tuple(map(float, weights or [1.0] * len(names))),
        functions=functions,
        max_steps=max_steps,
        max_completion_length=max_completion_length,
        by_source=by_source or {},
    )


def digests(names: Sequence[str], *, base_dir: str | Path | None = None) -> dict[str, str]:
    """SHA-256 of the source behind each reward, or of a service's address, for the run's record; nothing is imported.

    Raises `PluginError`.
    """

    def source(name: str) -> str:
        plain = split_options(name)[0]
        if is_address(name):
            return hashlib.sha256(name.encode()).hexdigest()
        if plain in BUILTINS:
            return hashlib.sha256(Path(builtin_rewards.__file__).read_bytes()).hexdigest()
        return source_digest(plain, base_dir=base_dir)

    return {name: source(name) for name in names}


def episode(turns: Sequence[Turn], messages: str | None) -> dict[str, Any]:
    """What a trajectory's turns and messages are to reward functions."""
    return {"reward": reward_of(turns), "messages": messages}


def answers_of(conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a trajectory that the policy generated, each with a text; one without text if there are none.

    Example:
        answers_of([{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2", "generated": True}])
        # -> [{"role": "assistant", "content": "2"}]
    """
    answers = [message for message in conversation if message.get(GENERATED)] or [{"role": "assistant"}]
    return [{**{key: message[key] for key in message if key != GENERATED}, "content": message.get("content") or ""} for message in answers]


def episodes_of(samples: Sequence[Any]) -> list[dict[str, Any]] | None:
    """The episodes of samples that are trajectories, `Rollout`s or an engine's; None for single completions."""
    if any(getattr(sample, "turns", None) is None for sample in samples):
        return None
    return [episode(sample.turns, sample.messages) for sample in samples]


def _find(name: str, base_dir: str | Path | None) -> Callable[..., Any]:
    plain, options = split_options(name)
    if plain not in BUILTINS and ":" not in plain:
        builtins = ", ".join(BUILTINS)
        raise PluginError(
            f"{name!r} is no reward: expected {builtins}, package.module:function, file.py:function or http://HOST/PATH"
            f"{nearest(plain, BUILTINS)}"
        )
    function = BUILTINS[plain] if plain in BUILTINS else load(plain, base_dir=base_dir)
    if options:
        try:
            inspect.signature(function).bind_partial(**options)
        except TypeError as error:
            raise PluginError(f"{name!r}: {error}") from error
    return partial(function, **options) if options else function


def _arguments(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The items of `given` that the function takes: everything under `**columns`, else what its signature names."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature gets everything
        return dict(given)
    kinds = inspect.Parameter
    for parameter in parameters.values():
        required = parameter.default is kinds.empty and parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        if required and parameter.name not in given:
            hint = nearest(parameter.name, given)
            raise RewardError(f"reward {name} wants the column {parameter.name!r}, the data has {', '.join(given)}{hint}")
    if any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters.values()):
        return dict(given)
    return {key: value for key, value in given.items() if key in parameters}


def _broke(name: str, error: BaseException) -> RewardError:
    if isinstance(error, RewardError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
    return RewardError(f"reward {name} broke: {type(error).__name__}: {' '.join(str(error).split())[:400]}{where}")


def _checked(name: str, returned: Any, count: int) -> list[float | None]:
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, (list, tuple)):
        raise RewardError(f"reward {name} returned a {type(returned).__name__}, expected a list of {count} numbers")
    if len(values) != count:
        raise RewardError(f"reward {name} returned {len(values)} values for {count} completions")
    checked: list[float | None] = []
    for number, value in enumerate(values):
        reward = value.item() if hasattr(value, "item") else value
        if reward is not None and not isinstance(reward, Real):
            raise RewardError(f"reward {name} returned {reward!r} for completion {number}, expected a number or None")
        if reward is not None and not isfinite(reward):
            raise RewardError(f"reward {name} returned {reward} for completion {number}, which is not finite")
        checked.append(None if reward is None else float(reward))
    return checked


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    # One loop for the life of the process, so that an async function can keep its HTTP session between calls.
    return asyncio.new_event_loop()
