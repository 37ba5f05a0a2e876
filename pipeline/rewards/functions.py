"""Scores a group by TRL-style functions `f(prompts, completions, **columns) -> list[float | None]`, weighted and added.

In addition to columns a function can take `completion_ids`, `trainer_state`, `log_extra` and `log_metric`, as in TRL, and
`completion_lengths` and `max_completion_length`; a column with one of these names is under `columns`. Functions are called in the main
thread, outside of a running event loop; awaitables that they return are awaited together. A failed reward is a failure with its reason,
never zero; `None` means that a function does not apply, and a completion to which none applies has no reward.
Every child process imports this module, so its imports are light.
"""

import asyncio
import hashlib
import inspect
import json
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, Final

from penstock.infra.sandbox.child import doing
from penstock.pipeline.config.plugins import PluginError, is_address, load, nearest, short_name, source_digest, split_options
from penstock.pipeline.data.references import FORMS, SOURCE_COLUMN, InvalidReference, accepted, with_facts
from penstock.pipeline.rewards import builtin as builtin_rewards
from penstock.pipeline.rewards.builtin import BUILTINS, NEED_REFERENCE
from penstock.pipeline.rewards.service import LOAD, RewardService
from penstock.pipeline.rewards.values import NAMES, Logged, RewardError, bounded, broke, checked
from penstock.topics.rollouts import GENERATED, reward_of

NOTHING: Final = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Rewards of a group's completions, in their order."""

    rewards: tuple[float | None, ...]
    """None for a completion to which no function applies, or whose reward failed."""
    components: tuple[tuple[float | None, ...], ...]
    """One row per completion, with one value per reward function."""
    broken: Mapping[int, str] = field(default_factory=dict)
    """Completion -> reason of its failed reward, if others succeeded."""
    logged: tuple[Mapping[str, Any], ...] = ()
    """Logged values of each completion; empty if nothing was logged."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    load: Mapping[str, float] = field(default_factory=dict)
    """Load of the process's reward services since its last score."""

    @staticmethod
    def of(result: Mapping[str, Any]) -> "Score":
        """Parse the result of a child process, which is a score as JSON."""
        broken = {int(number): reason for number, reason in result.get("broken", {}).items()}
        return Score(
            rewards=tuple(result["rewards"]), components=tuple(map(tuple, result["components"])), broken=broken,
            logged=tuple(result.get("logged", ())), metrics=result.get("metrics", {}), load=result.get("load", {}),
        )  # fmt: skip

    @property
    def scored(self) -> tuple[float, ...]:
        return tuple(reward for reward in self.rewards if reward is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The fields of TRL's `trainer_state` that a group's record determines, so that rescoring gives the same rewards."""

    global_step: int
    """Optimizer steps of the oldest policy version that generated the group."""
    max_steps: int


class _MissingColumn(RewardError):
    """A row lacks a column that a function requires."""

    def __init__(self, reason: str, *, column: str) -> None:
        super().__init__(reason)
        self.column = column


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """The reward functions of a run with their names and weights."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    functions: tuple[Callable[..., Any], ...]
    max_steps: int = 0
    max_completion_length: int = 0
    by_source: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """In a mixture: source -> the functions for its rows, by short or full name; a missing source has all."""

    def score(self, completions: Sequence[str], **group: Any) -> Score:
        """Score the completions of one prompt; arguments as in `start_scoring`."""
        score = self.start_scoring(completions, **group)
        return score if isinstance(score, Score) else _loop().run_until_complete(score)

    def start_scoring(
        self,
        completions: Sequence[str],
        *,
        prompt: str,
        messages: Sequence[Mapping[str, Any]] | None,
        columns: Mapping[str, Any],
        completion_ids: Sequence[Sequence[int]] = (),
        step: int = 0,
        episodes: Sequence[Mapping[str, Any]] | None = None,
    ) -> Score | Coroutine[Any, Any, Score]:
        """Call the functions for the completions of one prompt; return the score, or a coroutine of it if a function is async.

        For a conversational prompt (`messages`), functions receive lists of messages, as in TRL. `step` is the optimizer step of the policy
        version that generated the completions. `episodes` is the result of `episodes_of`: functions can then take `environment_reward` and
        `conversations`, and completions are the generated messages.

        Each function and each completion gets copies of the arguments, so that a function cannot change what another one receives. Raises
        `RewardError` if a function raises, or returns a wrong length, a wrong type, or a number that is not finite or too large.
        """
        count = len(completions)
        facts = self._facts(count, completion_ids, step)
        generated = [[{"role": "assistant", "content": text}] for text in completions]
        if episodes is not None:
            conversations = [json.loads(episode["messages"]) for episode in episodes]
            facts |= {"environment_reward": [episode["reward"] for episode in episodes], "conversations": conversations}
            generated = [completions_of(conversation) for conversation in conversations]
        if messages is None:
            facts |= {"prompts": [prompt] * count, "completions": list(completions)}
        else:
            facts |= {"prompts": [messages] * count, "completions": generated}
        logged = Logged(count)
        returned = self._called(columns, facts, logged, last=[messages[-1]["content"] for messages in generated])
        score = partial(self._score, logged=logged, count=count)
        return _awaited(self.names, returned, score) if any(map(inspect.isawaitable, returned)) else score(returned)

    def check(self, columns: Mapping[str, Any], *, not_json: Mapping[str, str] | None = None, answer_field: str = "answer") -> None:
        """Raise `RewardError`, naming the column, if a function lacks a column of this row or a built-in cannot read its reference.

        `not_json` has the columns that JSON cannot represent -> type; `answer_field` is the name of the answer column in the data.
        """
        facts = self._facts(0, (), 0)
        for name, function in self._functions_for(columns):
            try:
                _arguments(name, function, with_facts(columns, facts), facts)
            except _MissingColumn as error:
                raise RewardError(f"{error}{_remedy(error.column, not_json or {})}") from error
            if split_options(name)[0] in NEED_REFERENCE:
                try:
                    accepted(columns["answer"])
                except InvalidReference as error:
                    column = f"the answer (column {answer_field or 'answer'!r})"
                    raise RewardError(f"{column} is {error}, which the reward {name} cannot compare: expected {FORMS}") from error

    def facts_named_by(self, columns: Mapping[str, Any]) -> list[str]:
        """Return the columns that have the name of an argument such as `prompts`: functions find their values only under `columns`."""
        return [name for name in self._facts(0, (), 0) if name in columns]

    def _functions_for(self, columns: Mapping[str, Any]) -> list[tuple[str, Callable[..., Any]]]:
        """Return (name, function) of the functions that score this row: in a mixture those that `by_source` has for its source."""
        source = columns.get(SOURCE_COLUMN)
        selected = self.by_source.get(source) if isinstance(source, str) else None
        every = zip(self.names, self.functions, strict=True)
        return [(name, function) for name, function in every if selected is None or not {name, short_name(name)}.isdisjoint(selected)]

    def _facts(self, count: int, completion_ids: Sequence[Sequence[int]], step: int) -> dict[str, Any]:
        """Return the arguments that functions can take in addition to the columns; lists have one item for each of `count` completions."""
        return {
            "prompts": [],
            "completions": [],
            "completion_ids": completion_ids,
            "completion_lengths": [len(ids) for ids in completion_ids],
            "max_completion_length": self.max_completion_length,
            "environment_reward": [None] * count,
            "conversations": [None] * count,
            **dict.fromkeys(NAMES),
            "trainer_state": TrainerState(global_step=step, max_steps=self.max_steps),
        }

    def _called(self, columns: Mapping[str, Any], facts: Mapping[str, Any], logged: Logged, *, last: Sequence[str]) -> list[Any]:
        """Call each function; return what each returned, in the order of `names`, and `NOTHING` for a function not applied to this row.

        Built-in functions score `last`, the last generated text of each completion. Raises `RewardError` if a function raises.
        """
        returned: list[Any] = []
        functions, offered = dict(self._functions_for(columns)), with_facts(columns, facts)
        for name in self.names:
            function = functions.get(name)
            if function is None:
                returned.append(NOTHING)
                continue
            built_in = split_options(name)[0] in BUILTINS
            taken = _arguments(name, function, {**offered, "completions": last} if built_in else offered, facts)
            arguments = {key: copied(value) if key in facts else [copied(value) for _ in last] for key, value in taken.items()}
            arguments |= {key: log for key, log in logged.functions(name).items() if key in arguments}
            doing(f"reward {name}")
            asyncio.set_event_loop(_loop())  # for functions that call get_event_loop()
            try:
                returned.append(_call(function, arguments))
            # The boundary to a user's function: its error fails the group.
            except BaseException as error:
                raise broke(name, error, function) from error
        return returned

    def _score(self, returned: Sequence[Any], *, logged: Logged, count: int) -> Score:
        """Validate the functions' return values, and add them up by weight. Raises `RewardError`."""
        columns: list[list[float | None]] = []
        for name, value in zip(self.names, returned, strict=True):
            numbers, parts = ([None] * count, []) if value is NOTHING else checked(name, value, count)
            logged.parts(name, parts)
            columns.append(numbers)
        components = tuple(zip(*columns, strict=True)) if count else ()
        rewards = tuple(self._total(row, number) for number, row in enumerate(components))
        return Score(rewards=rewards, components=components, logged=logged.rows, metrics=logged.metrics, load=LOAD.taken())

    def _total(self, row: Sequence[float | None], number: int) -> float | None:
        applying = [weight * value for weight, value in zip(self.weights, row, strict=True) if value is not None]
        return bounded(sum(applying), f"the weighted sum of the rewards of completion {number}") if applying else None


async def _awaited(names: Sequence[str], returned: Sequence[Any], score: Callable[[Sequence[Any]], Score]) -> Score:
    """Await the awaitables among the functions' return values concurrently; return `score` of all values. Raises `RewardError`."""

    async def value(name: str, awaitable: Any) -> Any:
        try:
            return await awaitable
        # The boundary to a user's function; only a cancellation by the parent is passed on.
        except BaseException as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return broke(name, error)

    waiting = [number for number, value in enumerate(returned) if inspect.isawaitable(value)]
    doing(f"reward {', '.join(names[number] for number in waiting)}")
    values = await asyncio.gather(*(value(names[number], returned[number]) for number in waiting))
    for result in values:
        if isinstance(result, RewardError):
            raise result
    return score([dict(zip(waiting, values, strict=True)).get(number, value) for number, value in enumerate(returned)])


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
    """Load reward functions by name, plug-in spec or address, with options after a question mark; weights default to 1.

    `max_steps` and `max_completion_length` are passed to functions that take them. `timeout_s` (per group) and `concurrency` (groups at a
    time) apply to reward services. Raises `PluginError` for an unknown name, a function that cannot be loaded, or an option that it does
    not take, `ValueError` unless there is one finite weight per function.
    """
    if not names:
        raise ValueError("reward.functions is empty: name at least one reward function")
    if weights is not None and (len(weights) != len(names) or not all(isfinite(weight) for weight in weights)):
        raise ValueError(f"reward.weights is {list(weights)}, expected {len(names)} finite numbers, one for each of {', '.join(names)}")
    functions = tuple(
        RewardService(name, timeout_s=timeout_s, connections=concurrency).score if is_address(name) else _find(name, base_dir)
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
    """Return name -> SHA-256 (hex) of the source or of a service's address, for the run's record. Imports nothing. Raises `PluginError`."""

    def source(name: str) -> str:
        plain = split_options(name)[0]
        if is_address(name):
            return hashlib.sha256(name.encode()).hexdigest()
        if plain in BUILTINS:
            files = sorted(Path(builtin_rewards.__file__).parent.glob("*.py"))
            return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
        return source_digest(plain, base_dir=base_dir)

    return {name: source(name) for name in names}


def completions_of(conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the generated messages of a trajectory, each with a text as `content`; one empty message if there are none."""
    generated = [message for message in conversation if message.get(GENERATED)] or [{"role": "assistant"}]
    return [
        {**{key: message[key] for key in message if key != GENERATED}, "content": message.get("content") or ""} for message in generated
    ]


def episodes_of(samples: Sequence[Any]) -> list[dict[str, Any]] | None:
    """Return reward and messages (JSON) of each trajectory, for `start_scoring`; None if the samples are single completions."""
    if any(getattr(sample, "turns", None) is None for sample in samples):
        return None
    return [{"reward": reward_of(sample.turns), "messages": sample.messages} for sample in samples]


def _find(name: str, base_dir: str | Path | None) -> Callable[..., Any]:
    """Load one reward function by name or plug-in spec, with its options applied. Raises `PluginError` with the configuration key."""
    plain, options = split_options(name)
    try:
        if plain in BUILTINS:
            function = BUILTINS[plain]
            options = {**(function.__kwdefaults__ or {}), **options}
        elif ":" in plain:
            function = load(plain, base_dir=base_dir)
        else:
            expected = f"expected {', '.join(BUILTINS)}, package.module:function, file.py:function or http://HOST/PATH"
            raise PluginError(f"{name!r} is not a reward function: {expected}{nearest(plain, BUILTINS)}")
    except PluginError as error:
        raise PluginError(f"reward.functions: {error}") from error
    if not options:
        return function
    try:
        inspect.signature(function).bind_partial(**options)
    except TypeError as error:
        raise PluginError(f"reward.functions: {name!r}: {error}") from error
    return partial(function, **options)


def _arguments(name: str, function: Callable[..., Any], offered: Mapping[str, Any], facts: Collection[str]) -> dict[str, Any]:
    """Return those of `offered` that a function takes: all if it has `**columns`, else its parameters. Raises `_MissingColumn`.

    `facts` names the offered values that are no columns of the data.
    """
    offered = {key: value for key, value in offered.items() if key not in getattr(function, "keywords", ())}
    parameters = _parameters(function)
    if parameters is None:
        return offered
    kinds = inspect.Parameter
    for parameter in parameters.values():
        required = parameter.default is kinds.empty and parameter.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        if required and parameter.name not in offered:
            own = [key for key in offered if key not in facts]
            hint = nearest(parameter.name, own) or nearest(parameter.name, facts)
            raise _MissingColumn(
                f"reward {name} needs the column {parameter.name!r}, but the data has {', '.join(own) or 'none'}{hint}",
                column=parameter.name,
            )
    if any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters.values()):
        return offered
    return {key: value for key, value in offered.items() if key in parameters}


def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function by keywords, except for its positional-only parameters."""
    positional = [parameter for parameter in (_parameters(function) or {}).values() if parameter.kind is parameter.POSITIONAL_ONLY]
    by_position = [arguments.pop(parameter.name, parameter.default) for parameter in positional]
    return function(*by_position, **arguments)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a function by name; None for a function in C without a signature, which receives all arguments."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def _remedy(column: str, not_json: Mapping[str, str]) -> str:
    """Return the end of the error message about a missing column: the cause or the fix; empty if neither is known."""
    if column in not_json:
        return f": that column contains {not_json[column]}, which JSON cannot represent; store it as text"
    if column == "answer":
        return '; set data.answer_field to the column of answers, or to "" if no reward function needs answers'
    return ""


def copied(value: Any) -> Any:
    """Return a copy of a JSON value, with copies of the dicts and lists in it."""
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [copied(inner) if isinstance(inner, dict | list | tuple) else inner for inner in value]
    return value


def _loop() -> asyncio.AbstractEventLoop:
    """Return this process's event loop, which calls share so that async functions can keep an HTTP session; a new one if it was closed."""
    loop = _loops[-1] if _loops else None
    if loop is None or loop.is_closed():
        _loops[:] = [loop := asyncio.new_event_loop()]
    return loop


_loops: list[asyncio.AbstractEventLoop] = []
