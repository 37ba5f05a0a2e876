"""Adapters from the two interfaces of environments to `reset` and `step` in chat messages.

A *text* environment has `reset(*, seed, **row) -> text`, `step(text) -> (text, reward, ended)` as Gymnasium's, and optionally `close()`.
A *tool* environment has TRL's interface: `reset(**row) -> text | messages | None`, public methods with docstrings as tools, and
`get_reward()` unless reward functions alone score its episodes.
Mistakes of the policy (an unknown tool, wrong arguments) and exceptions of tools are returned to it as text; only errors of the environment
are raised.
"""

import asyncio
import inspect
import json
import re
import time
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any, Union, get_args, get_origin, get_type_hints

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage

from penstock.pipeline.config.plugins import PluginError

Message = dict[str, Any]
NOT_TOOLS = ("reset", "get_reward", "close")
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", tuple: "array", dict: "object"}


class EnvironmentFault(ValueError):
    """An environment has neither interface, or returned a wrong type; one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The result of a reset or a step."""

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    ended: bool = False


class TextEpisode:
    """One episode of a text environment."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    async def reset(self, *, seed: int, row: Mapping[str, Any]) -> Observation:
        text = await _awaited(self._environment.reset(**fitting(self._environment.reset, {**row, "seed": seed})))
        return Observation(messages=_messages(text, "reset"))

    async def step(self, message: Message) -> Observation:
        """The observation after the policy's turn, whose text is the action."""
        result = await _awaited(self._environment.step(message.get("content") or ""))
        if not isinstance(result, tuple | list) or len(result) != 3:
            raise EnvironmentFault(f"step returned {str(result)[:80]!r}, expected (text, reward, ended)")
        text, reward, ended = result
        return Observation(messages=_messages(text, "step"), reward=_number(reward, "step"), ended=bool(ended))

    async def reward(self) -> float | None:
        return None

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
        """The results of the policy's tool calls; an exception of a tool is its result."""
        calls = message.get("tool_calls") or ()
        results = [await call_tool(self._tools, call) for call in calls]
        return Observation(messages=tuple(results), ended=not calls)

    async def reward(self) -> float | None:
        """The episode's reward at its end; None if there is no `get_reward`."""
        get_reward = getattr(self._environment, "get_reward", None)
        return None if get_reward is None else _number(await _awaited(get_reward()), "get_reward")

    async def close(self) -> None:
        """Do nothing: all public methods of a tool environment are tools."""


Episode = TextEpisode | ToolEpisode


def episode_of(environment: Any) -> Episode:
    """An episode of an environment with either interface. Raises `EnvironmentFault` if it has neither."""
    if not callable(getattr(environment, "reset", None)):
        raise EnvironmentFault(f"{type(environment).__name__} has no method reset")
    if callable(getattr(environment, "step", None)):
        return TextEpisode(environment)
    if callable(getattr(environment, "get_reward", None)) or tools_of(environment):
        return ToolEpisode(environment)
    raise EnvironmentFault(
        f"{type(environment).__name__} is no environment: it has neither step(text) -> (text, reward, ended) nor public methods as tools"
    )


def waits(kind: Any) -> bool:
    """True if an environment's methods are coroutines, so that a process can run many of its episodes concurrently."""
    return any(inspect.iscoroutinefunction(getattr(kind, name, None)) for name in ("reset", "step", "get_reward"))


def fitting(function: Callable[..., Any], items: Mapping[str, Any]) -> dict[str, Any]:
    """The items that a function takes by name."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(items)
    return {parameter.name: items[parameter.name] for parameter in parameters if parameter.name in items}


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _messages(result: Any, method: str) -> tuple[Message, ...]:
    if result is None:
        return ()
    if isinstance(result, str):
        return ({"role": "user", "content": result},)
    if isinstance(result, list) and all(isinstance(message, dict) and "role" in message for message in result):
        return tuple(json.loads(json.dumps(result)))
    raise EnvironmentFault(f"{method} returned {str(result)[:80]!r}, expected a text, a list of messages or None")


def _number(reward: Any, method: str) -> float | None:
    value = reward.item() if hasattr(reward, "item") else reward
    if value is None:
        return None
    if not isinstance(value, int | float) or not isfinite(value):
        raise EnvironmentFault(f"{method} gave the reward {value!r}, expected a finite number")
    return float(value)


def tools_of(environment: Any) -> dict[str, Callable[..., Any]]:
    """The public methods of an environment by name, except those of the interface."""
    names = [name for name in dir(environment) if not name.startswith("_") and name not in NOT_TOOLS]
    return {name: method for name in names if callable(method := getattr(environment, name)) and inspect.isroutine(method)}


def schema_of(name: str, method: Callable[..., Any]) -> dict[str, Any]:
    """A tool's description for the chat template: docstring, and parameters with types and docs (Google style)."""
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
    if name not in tools:
        return f"error: there is no tool {name!r}; there are: {', '.join(tools)}"
    written = function.get("arguments") or {}
    try:
        arguments = json.loads(written) if isinstance(written, str) else dict(written)
        inspect.signature(tools[name]).bind(**arguments)
    except (TypeError, ValueError) as error:
        return f"error: the arguments do not fit {name}: {error}"
    try:
        result = tools[name](**arguments)
        result = await result if inspect.isawaitable(result) else result
    # A tool may raise any error: the policy reads it and can try again.
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"
    return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)


def _type_of(hint: Any) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _type_of(next((kind for kind in arguments if kind is not type(None)), str))
    kind = _TYPES.get(origin or hint, "string")
    return {"type": kind, "items": _type_of(arguments[0])} if kind == "array" and arguments else {"type": kind}


def _doc_of(parameter: str, text: str) -> str:
    match = re.search(rf"^\s*{parameter}\s*(?:\([^)]*\))?\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return match[1].strip() if match else ""


RESPONSE_BYTES = 32 << 20
CONNECT_S, RETRY_S = 30.0, 0.5
"""Time limit for the first response of a server, and the pause between two attempts."""
FULL = "CAPACITY_REACHED"
OWN_KEYS = frozenset({"done", "reward", "metadata"})
"""Keys of an observation that are not shown to the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvServer:
    """Address of a server and description of its environment."""

    address: str
    """ws:// or wss://, with a port."""
    version: str
    fields: Mapping[str, str]
    """Field of an action -> its JSON type."""
    action: str | None
    """Field with the policy's text; None if the text is a JSON object with all fields."""
    observation: str | None
    """Field of an observation that is shown to the policy; None for its only text, or for all fields as JSON."""
    timeout_s: float
    """Time limit of a request, and of the wait for a free session."""


def open_server(address: str, options: Mapping[str, Any]) -> OpenEnvServer:
    """Read the description of a server's environment.

    Args:
        address: ws://HOST:PORT or wss://HOST:PORT.
        options: `action`, `observation` (fields to use) and `timeout_s` (25 s if absent, below `environment.step_timeout_s`).

    Raises:
        PluginError: there is no response within 30 s, or a field does not exist.
    """
    source = f"openenv:{address}"
    if unknown := sorted(set(options) - {"action", "observation", "timeout_s"}):
        raise PluginError(f"{source}: unknown option {unknown[0]!r}; there are action, observation, timeout_s")
    scheme, _, rest = address.partition("://")
    if scheme not in ("ws", "wss") or not rest:
        raise PluginError(f"{source}: expected an address such as openenv:ws://127.0.0.1:8000")
    http = f"{'https' if scheme == 'wss' else 'http'}://{rest.rstrip('/')}"
    schema = _fetched(source, f"{http}/schema")
    action = schema["action"]
    fields = {name: str(each.get("type", "")) for name, each in action.get("properties", {}).items() if name != "metadata"}
    needed = [name for name in action.get("required", ()) if name in fields] or list(fields)
    action_field = options.get("action", needed[0] if len(needed) == 1 else None)
    if action_field is not None and action_field not in fields:
        raise PluginError(f"{source}: its actions have no field {action_field!r}; they have {', '.join(fields)}")
    shown = options.get("observation")
    if shown is not None and shown not in schema["observation"].get("properties", {}):
        raise PluginError(f"{source}: its observations have no field {shown!r}; they have {', '.join(schema['observation']['properties'])}")
    return OpenEnvServer(
        address=f"{scheme}://{rest.rstrip('/')}/ws",
        version=str(_fetched(source, f"{http}/metadata").get("version") or "unknown"),
        fields=fields,
        action=action_field,
        observation=shown,
        timeout_s=float(options.get("timeout_s", 25.0)),
    )


class OpenEnvText:
    """Episodes on a server, one at a time; each has its own connection, which is a session of the server."""

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._socket: ClientConnection | None = None

    async def reset(self, *, seed: int, **row: Any) -> str:
        """The first observation; retried until `timeout_s` if the server has no free session."""
        await self.close()
        until, pause = time.monotonic() + self._server.timeout_s, 0.1
        while True:
            try:
                self._socket = await connect(self._server.address, max_size=RESPONSE_BYTES, ping_interval=None)
                response = await self._request("reset", {**row, "seed": seed})
            except (OSError, InvalidHandshake, InvalidMessage) as error:
                reason = f"no connection: {error}"
            except ConnectionClosed:
                reason = "it closed the connection, as a server without a free session does"
            else:
                if not _refused(response, FULL):
                    return self._shown(_observation(response, "reset"))[0]
                reason = f"all its {response['data'].get('max_sessions', '')} sessions are taken"
            await self.close()
            if (remaining_s := until - time.monotonic()) <= 0:
                raise RuntimeError(f"openenv: reset waited {self._server.timeout_s:g} s for {self._server.address}: {reason}")
            await asyncio.sleep(min(pause, remaining_s))
            pause = min(2 * pause, 2.0)

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Text, reward, ended; an action that the server refuses costs a turn and changes nothing."""
        data = self._action(action)
        if isinstance(data, str):
            return data, 0.0, False
        response = await self._request("step", data)
        if _refused(response, "VALIDATION_ERROR"):
            faults = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in response["data"].get("errors", ()))
            return f"{action.strip()[:40]!r} is no action: {faults or response['data'].get('message', '')}", 0.0, False
        return self._shown(_observation(response, "step"))

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    async def _request(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._socket is None:
            raise RuntimeError("openenv: the session is closed")
        try:
            async with asyncio.timeout(self._server.timeout_s):
                with suppress(ConnectionClosed):  # messages that the server sent before it closed can still be received
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                response: Mapping[str, Any] = json.loads(await self._socket.recv())
        except TimeoutError:
            await self.close()
            raise RuntimeError(f"openenv: {kind} had no response within {self._server.timeout_s:g} s") from None
        return response

    def _action(self, completion: str) -> dict[str, Any] | str:
        """The action's fields, or an error message for the policy."""
        text, field = completion.strip(), self._server.action
        if field is not None:
            kind = self._server.fields[field]
            if kind not in ("integer", "number", "boolean"):
                return {field: text}
            try:
                return {field: json.loads(text)}
            except ValueError:
                return f"{text[:40]!r} is no action: write {'an' if kind == 'integer' else 'a'} {kind}"
        try:
            data = json.loads(text)
        except ValueError:
            data = None
        return data if isinstance(data, dict) else f"{text[:40]!r} is no action: write a JSON object with {', '.join(self._server.fields)}"

    def _shown(self, data: Mapping[str, Any]) -> tuple[str, float, bool]:
        observation = data["observation"]
        shown = {name: value for name, value in observation.items() if name not in OWN_KEYS}
        if self._server.observation is not None:
            shown = {self._server.observation: observation.get(self._server.observation, "")}
        texts = [value for value in shown.values() if isinstance(value, str)]
        text = texts[0] if len(texts) == len(shown) == 1 else json.dumps(shown, ensure_ascii=False)
        return text, float(data.get("reward") or 0.0), bool(data.get("done"))


def _observation(response: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    if response.get("type") != "observation":
        error = response.get("data", {})
        raise RuntimeError(f"openenv: {kind}: {error.get('code', 'error')}: {str(error.get('message', error))[:200]}")
    data: Mapping[str, Any] = response["data"]
    return data


def _refused(response: Mapping[str, Any], code: str) -> bool:
    return response.get("type") == "error" and response.get("data", {}).get("code") == code


def _fetched(source: str, url: str) -> dict[str, Any]:
    until = time.monotonic() + CONNECT_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                value: dict[str, Any] = json.load(response)
                return value
        except (OSError, ValueError) as error:
            final = isinstance(error, urllib.error.HTTPError | ValueError)
            if final or time.monotonic() > until:
                raise PluginError(
                    f"{source}: {url} is not a response of an OpenEnv server ({getattr(error, 'reason', error)}); start the server first"
                ) from error
        time.sleep(RETRY_S)
