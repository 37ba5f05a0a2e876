"""Adapters from the two interfaces of environments to `reset` and `step` in chat messages.

A *text* environment has `reset(*, seed, **row) -> text`, `step(text) -> (text, reward, ended)` as Gymnasium's, and optionally `close()`.
A *tool* environment has TRL's interface: `reset(**row) -> text | messages | None`, public methods with docstrings as tools, and
`get_reward()` unless reward functions alone score its episodes.
Mistakes of the policy (an unknown tool, wrong arguments) and exceptions of tools are returned to it as text; only errors of the environment
are raised.
"""

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Union, get_args, get_origin, get_type_hints

Message = dict[str, Any]
NOT_TOOLS = ("reset", "get_reward", "close")
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", tuple: "array", dict: "object"}


class EnvironmentFault(ValueError):
    """An environment has none of the two interfaces, or returned a wrong type; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an environment returns for a reset or a step."""

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    ended: bool = False


class TextEpisode:
    """One episode of a text environment."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._rewards: list[float | None] = []

    async def reset(self, *, seed: int, row: Mapping[str, Any]) -> Observation:
        text = await _awaited(self._environment.reset(**fitting(self._environment.reset, {**row, "seed": seed})))
        return Observation(messages=_messages(text, "reset"))

    async def step(self, message: Message) -> Observation:
        """Pass the text of the policy's turn to the environment as the action. Raises `EnvironmentFault` for a wrong result."""
        result = await _awaited(self._environment.step(message.get("content") or ""))
        if not isinstance(result, tuple | list) or len(result) != 3:
            raise EnvironmentFault(f"step returned {repr(result)[:80]}, expected (text, reward, ended)")
        text, reward, ended = result
        self._rewards.append(_number(reward, "step"))
        return Observation(messages=_messages(text, "step"), reward=self._rewards[-1], ended=bool(ended))

    async def reward(self) -> float | None:
        """Return 0, which adds nothing to the step rewards; None if there were steps, all of them without a reward."""
        return None if self._rewards and not any(reward is not None for reward in self._rewards) else 0.0

    async def close(self) -> None:
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
        result = await _awaited(self._environment.reset(**fitting(self._environment.reset, {**row, "seed": seed})))
        return Observation(messages=_messages(result, "reset"))

    async def step(self, message: Message) -> Observation:
        """Run the tool calls in the policy's turn and return their results; an exception of a tool becomes its result."""
        calls = message.get("tool_calls") or ()
        results = [await call_tool(self._tools, call) for call in calls]
        return Observation(messages=tuple(results), ended=not calls)

    async def reward(self) -> float | None:
        """Return the episode's reward at its end; None if there is no `get_reward`."""
        get_reward = getattr(self._environment, "get_reward", None)
        return None if get_reward is None else _number(await _awaited(get_reward()), "get_reward")

    async def close(self) -> None:
        """No effect, because every public method of a tool environment is a tool."""


Episode = TextEpisode | ToolEpisode


def episode_of(environment: Any) -> Episode:
    """Return an episode of an environment with either interface. Raises `EnvironmentFault` if it has neither."""
    if not callable(getattr(environment, "reset", None)):
        raise EnvironmentFault(f"environment {type(environment).__name__} has no method reset, which starts an episode")
    if callable(getattr(environment, "step", None)):
        return TextEpisode(environment)
    if callable(getattr(environment, "get_reward", None)) or tools_of(environment):
        return ToolEpisode(environment)
    raise EnvironmentFault(f"{type(environment).__name__} is no environment: it has neither step(text) -> (text, reward, ended) nor tools")


def waits(kind: Any) -> bool:
    """True if an environment's methods are coroutines, so that a process can run many of its episodes concurrently."""
    return any(inspect.iscoroutinefunction(getattr(kind, name, None)) for name in ("reset", "step", "get_reward"))


def fitting(function: Callable[..., Any], items: Mapping[str, Any]) -> dict[str, Any]:
    """Return those items that a function accepts as keyword arguments."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(items)
    return {parameter.name: items[parameter.name] for parameter in parameters if parameter.name in items}


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _messages(result: Any, method: str) -> tuple[Message, ...]:
    """Convert what a method of an environment returned to chat messages. Raises `EnvironmentFault` for another type."""
    if result is None:
        return ()
    if isinstance(result, str):
        return ({"role": "user", "content": result},)
    if isinstance(result, list) and all(isinstance(message, dict) and "role" in message for message in result):
        return tuple(json.loads(json.dumps(result)))
    raise EnvironmentFault(f"{method} returned {repr(result)[:80]}, expected a text, a list of messages or None")


def _number(reward: Any, method: str) -> float | None:
    """Convert a reward (also a numpy number) to a float; None stays None. Raises `EnvironmentFault` for anything else."""
    value = reward.item() if hasattr(reward, "item") else reward
    if value is None:
        return None
    if not isinstance(value, int | float) or not isfinite(value):
        raise EnvironmentFault(f"{method} returned the reward {repr(value)[:80]}, expected a finite number")
    return float(value)


def tools_of(environment: Any) -> dict[str, Callable[..., Any]]:
    """Return name -> tool: the public methods of an environment except those of the interface."""
    names = [name for name in dir(environment) if not name.startswith("_") and name not in NOT_TOOLS]
    return {name: method for name in names if callable(method := getattr(environment, name)) and inspect.isroutine(method)}


def schema_of(name: str, method: Callable[..., Any]) -> dict[str, Any]:
    """Describe a tool for the chat template, in OpenAI's format, from its signature and its Google-style docstring."""
    hints = get_type_hints(method)
    text = inspect.getdoc(method) or ""
    head, *_ = re.split(r"\n\s*(?:Args|Arguments|Parameters|Returns|Raises):", text)
    parameters = inspect.signature(method).parameters
    properties = {
        key: {**_type_of(hints.get(key, str)), **({"description": doc} if (doc := _doc_of(key, text)) else {})} for key in parameters
    }
    required = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
    function = {
        "name": name,
        "description": " ".join(head.split()),
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return {"type": "function", "function": function}


async def call_tool(tools: Mapping[str, Callable[..., Any]], call: Mapping[str, Any]) -> dict[str, Any]:
    """Run one call in OpenAI's format and return the tool's message."""
    function = call.get("function") or {}
    name = str(function.get("name"))
    return {"role": "tool", "tool_call_id": call.get("id") or "", "name": name, "content": await _result(tools, name, function)}


async def _result(tools: Mapping[str, Callable[..., Any]], name: str, function: Mapping[str, Any]) -> str:
    """Call a tool with the arguments in `function` and return its result as text, or an error message for the policy."""
    if name not in tools:
        return f"error: there is no tool {name!r}; there are: {', '.join(tools)}"
    written = function.get("arguments") or {}
    try:
        arguments = json.loads(written) if isinstance(written, str) else dict(written)
        inspect.signature(tools[name]).bind(**arguments)
    except (TypeError, ValueError) as error:
        return f"error: wrong arguments for {name}: {error}"
    try:
        result = await _awaited(tools[name](**arguments))
    # A tool may raise any error: the policy reads it and can try again.
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"
    return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)


def _type_of(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type hint; "string" for an unknown type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _type_of(next((kind for kind in arguments if kind is not type(None)), str))
    kind = _TYPES.get(origin or hint, "string")
    return {"type": kind, "items": _type_of(arguments[0])} if kind == "array" and arguments else {"type": kind}


def _doc_of(parameter: str, text: str) -> str:
    """Return the description of a parameter in a Google-style docstring; "" if there is none."""
    match = re.search(rf"^\s*{parameter}\s*(?:\([^)]*\))?\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return match[1].strip() if match else ""
