"""Environments of OpenEnv servers as text environments, by the WebSocket protocol of OpenEnv 0.10.

An action is what the policy says: the text of the action's only field, or a JSON object of its fields.
The rule: an answer is read by the request it belongs to. After a timeout the connection is closed, because a late answer would be taken
for the next request's.
"""

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage

from penstock.pipeline.config.plugins import PluginError

ANSWER_BYTES = 32 << 20
ASK_S, NEXT_ASK_S = 30.0, 0.5
"""How long a server is waited for when a worker starts, and the pause between two attempts."""
FULL = "CAPACITY_REACHED"
OWN_KEYS = frozenset({"done", "reward", "metadata"})
"""Keys of an observation that say nothing to the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvServer:
    """One server: its address, and what it says of its environment."""

    address: str
    """ws:// or wss://, with a port."""
    version: str
    fields: Mapping[str, str]
    """Field of an action -> its JSON type."""
    action: str | None
    """The field that the policy's text stands for; None: it says a JSON object of all fields."""
    observation: str | None
    """The field of an observation that the policy reads; None: its only text, else all of it as JSON."""
    timeout_s: float
    """Limit of one request, and of waiting for a free session."""


def ask_server(address: str, options: Mapping[str, Any]) -> OpenEnvServer:
    """What a server says of its environment.

    Args:
        address: ws://HOST:PORT or wss://HOST:PORT.
        options: `action`, `observation` (fields to use) and `timeout_s` (25 s if absent, below `environment.step_timeout_s`).

    Raises:
        PluginError: no server answers within 30 s, or it has no such field.
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
    chosen = options.get("action", needed[0] if len(needed) == 1 else None)
    if chosen is not None and chosen not in fields:
        raise PluginError(f"{source}: its actions have no field {chosen!r}; they have {', '.join(fields)}")
    shown = options.get("observation")
    if shown is not None and shown not in schema["observation"].get("properties", {}):
        raise PluginError(f"{source}: its observations have no field {shown!r}; they have {', '.join(schema['observation']['properties'])}")
    return OpenEnvServer(
        address=f"{scheme}://{rest.rstrip('/')}/ws",
        version=str(_fetched(source, f"{http}/metadata").get("version") or "unknown"),
        fields=fields,
        action=chosen,
        observation=shown,
        timeout_s=float(options.get("timeout_s", 25.0)),
    )


class OpenEnvText:
    """One episode at a time on a server; each has a connection of its own, which is a session of the server."""

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._socket: ClientConnection | None = None

    async def reset(self, *, seed: int, **row: Any) -> str:
        """The first observation. A server without a free session is asked again until the limit of a request is over."""
        await self.close()
        until, pause = time.monotonic() + self._server.timeout_s, 0.1
        while True:
            try:
                self._socket = await connect(self._server.address, max_size=ANSWER_BYTES, ping_interval=None)
                answer = await self._asked("reset", {**row, "seed": seed})
            except (OSError, InvalidHandshake, InvalidMessage) as error:
                reason = f"no connection: {error}"
            except ConnectionClosed:
                reason = "it closed the connection, as a server without a free session does"
            else:
                if not _refused(answer, FULL):
                    return self._seen(_sound(answer, "reset"))[0]
                reason = f"all its {answer['data'].get('max_sessions', '')} sessions are taken"
            await self.close()
            if (left := until - time.monotonic()) <= 0:
                raise RuntimeError(f"openenv: reset waited {self._server.timeout_s:g} s for {self._server.address}: {reason}")
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, 2.0)

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Text, reward, ended; an action that the server refuses costs a turn and changes nothing."""
        data = self._action(action)
        if isinstance(data, str):
            return data, 0.0, False
        answer = await self._asked("step", data)
        if _refused(answer, "VALIDATION_ERROR"):
            faults = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in answer["data"].get("errors", ()))
            return f"{action.strip()[:40]!r} is no action: {faults or answer['data'].get('message', '')}", 0.0, False
        return self._seen(_sound(answer, "step"))

    async def close(self) -> None:
        """Give the session back."""
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    async def _asked(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._socket is None:
            raise RuntimeError("openenv: the session is closed")
        try:
            async with asyncio.timeout(self._server.timeout_s):
                with suppress(ConnectionClosed):  # what the server said before it closed can be received still
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                answer: Mapping[str, Any] = json.loads(await self._socket.recv())
        except TimeoutError:
            await self.close()
            raise RuntimeError(f"openenv: {kind} had no answer within {self._server.timeout_s:g} s") from None
        return answer

    def _action(self, said: str) -> dict[str, Any] | str:
        """The action's fields, or what to tell the policy."""
        text, field = said.strip(), self._server.action
        if field is not None:
            kind = self._server.fields[field]
            if kind not in ("integer", "number", "boolean"):
                return {field: text}
            try:
                return {field: json.loads(text)}
            except ValueError:
                return f"{text[:40]!r} is no action: say {'an' if kind == 'integer' else 'a'} {kind}"
        try:
            data = json.loads(text)
        except ValueError:
            data = None
        return data if isinstance(data, dict) else f"{text[:40]!r} is no action: say a JSON object with {', '.join(self._server.fields)}"

    def _seen(self, data: Mapping[str, Any]) -> tuple[str, float, bool]:
        observation = data["observation"]
        shown = {name: value for name, value in observation.items() if name not in OWN_KEYS}
        if self._server.observation is not None:
            shown = {self._server.observation: observation.get(self._server.observation, "")}
        texts = [value for value in shown.values() if isinstance(value, str)]
        text = texts[0] if len(texts) == len(shown) == 1 else json.dumps(shown, ensure_ascii=False)
        return text, float(data.get("reward") or 0.0), bool(data.get("done"))


def _sound(answer: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    if answer.get("type") != "observation":
        said = answer.get("data", {})
        raise RuntimeError(f"openenv: {kind}: {said.get('code', 'error')}: {str(said.get('message', said))[:200]}")
    data: Mapping[str, Any] = answer["data"]
    return data


def _refused(answer: Mapping[str, Any], code: str) -> bool:
    return answer.get("type") == "error" and answer.get("data", {}).get("code") == code


def _fetched(source: str, url: str) -> dict[str, Any]:
    until = time.monotonic() + ASK_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (OSError, ValueError) as error:
            final = isinstance(error, urllib.error.HTTPError | ValueError)
            if final or time.monotonic() > until:
                raise PluginError(
                    f"{source}: {url} gives no answer of an OpenEnv server ({getattr(error, 'reason', error)}); start the server first"
                ) from error
        time.sleep(NEXT_ASK_S)
