"""The two interfaces of an environment, seen as one: `reset` and `step` in chat messages.

A *text* environment has `reset(*, seed, **row) -> text` and `step(text) -> (text, reward, ended)`, as Gymnasium's, and may have `close()`.
A *tool* environment has TRL's interface: `reset(**row) -> text | messages | None`, public methods with docstrings as tools,
`get_reward()` unless reward functions alone score its episodes.
The rule: what the policy did wrong is an answer to the policy; only what the environment itself did wrong is raised.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from penstock.pipeline.envs.environments.tools import call_tool, schema_of, tools_of

Message = dict[str, Any]


class EnvironmentFault(ValueError):
    """An environment that has neither interface, or answers in another shape than its interface's; one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an environment says after a reset or a step."""

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    ended: bool = False


class TextEpisode:
    """One episode of a text environment."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    async def reset(self, *, seed: int, row: Mapping[str, Any]) -> Observation:
        """The first observation."""
        text = await _awaited(self._environment.reset(**fitting(self._environment.reset, {**row, "seed": seed})))
        return Observation(messages=_messages(text, "reset"))

    async def step(self, message: Message) -> Observation:
        """The observation after the policy's turn, whose text is the action."""
        answer = await _awaited(self._environment.step(message.get("content") or ""))
        if not isinstance(answer, tuple | list) or len(answer) != 3:
            raise EnvironmentFault(f"step returned {str(answer)[:80]!r}, expected (text, reward, ended)")
        text, reward, ended = answer
        return Observation(messages=_messages(text, "step"), reward=_number(reward, "step"), ended=bool(ended))

    async def reward(self) -> float | None:
        """None: every step has its own."""
        return None

    async def close(self) -> None:
        """Tell the environment that its episode is over, if it has a method `close`."""
        close = getattr(self._environment, "close", None)
        if callable(close):
            await _awaited(close())


class ToolEpisode:
    """One episode of a tool environment; it ends with the policy's first turn without a tool call."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._tools = tools_of(environment)
        self.tools = [schema_of(name, method) for name, method in self._tools.items()]

    async def reset(self, *, seed: int, row: Mapping[str, Any]) -> Observation:
        """What `reset` returns, if anything."""
        return Observation(
            messages=_messages(await _awaited(self._environment.reset(**fitting(self._environment.reset, {**row, "seed": seed}))), "reset")
        )

    async def step(self, message: Message) -> Observation:
        """The results of the tools that the policy's turn calls; the policy gets what a tool raises as its result."""
        calls = message.get("tool_calls") or ()
        results = [await call_tool(self._tools, call) for call in calls]
        return Observation(messages=tuple(results), ended=not calls)

    async def reward(self) -> float | None:
        """The episode's reward, at its end; None without `get_reward`."""
        get_reward = getattr(self._environment, "get_reward", None)
        return None if get_reward is None else _number(await _awaited(get_reward()), "get_reward")

    async def close(self) -> None:
        """Nothing: every public method of such an environment is a tool."""


Episode = TextEpisode | ToolEpisode


def episode_of(environment: Any) -> Episode:
    """An episode of an environment, by the interface that it has. Raises `EnvironmentFault` for one that has neither."""
    if not callable(getattr(environment, "reset", None)):
        raise EnvironmentFault(f"{type(environment).__name__} has no method reset")
    if callable(getattr(environment, "step", None)):
        return TextEpisode(environment)
    if callable(getattr(environment, "get_reward", None)) or tools_of(environment):
        return ToolEpisode(environment)
    raise EnvironmentFault(
        f"{type(environment).__name__} has neither step(text) -> (text, reward, ended) nor public methods as tools: it is no environment"
    )


def waits(kind: Any) -> bool:
    """Whether an environment's methods are coroutines, so that a process can hold many of its episodes that wait."""
    return any(inspect.iscoroutinefunction(getattr(kind, name, None)) for name in ("reset", "step", "get_reward"))


def fitting(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The items of `given` that a function takes by name."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(given)
    return {parameter.name: given[parameter.name] for parameter in parameters if parameter.name in given}


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _messages(said: Any, where: str) -> tuple[Message, ...]:
    if said is None:
        return ()
    if isinstance(said, str):
        return ({"role": "user", "content": said},)
    if isinstance(said, list) and all(isinstance(message, dict) and "role" in message for message in said):
        return tuple(json.loads(json.dumps(said)))
    raise EnvironmentFault(f"{where} returned {str(said)[:80]!r}, expected a text, a list of messages or None")


def _number(reward: Any, where: str) -> float | None:
    value = reward.item() if hasattr(reward, "item") else reward
    if value is None:
        return None
    if not isinstance(value, int | float) or not isfinite(value):
        raise EnvironmentFault(f"{where} gave the reward {value!r}, expected a finite number")
    return float(value)
