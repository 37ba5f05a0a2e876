"""Episodes of an OpenEnv server over a WebSocket, as a text environment."""

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
    """WebSocket URL (ws:// or wss://) with a port."""
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
    """Read the description of the environment that a server at ws://HOST:PORT or wss://HOST:PORT has.

    `options` may name the fields `action` and `observation` to use, and `timeout_s` (25 by default; below `environment.step_timeout_s`).
    Raises `PluginError` if there is no response within `CONNECT_S`, or a field does not exist.
    """
    source = f"openenv:{address}"
    if unknown := sorted(set(options) - {"action", "observation", "timeout_s"}):
        raise PluginError(f"{source}: unknown option {unknown[0]!r}; choose from action, observation, timeout_s")
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
        raise PluginError(f"{source}: the server's actions have no field {action_field!r}; their fields are {', '.join(fields)}")
    shown = options.get("observation")
    if shown is not None and shown not in schema["observation"].get("properties", {}):
        raise PluginError(f"{source}: observations have no field {shown!r}, but {', '.join(schema['observation']['properties'])}")
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
        """Start an episode and return the first observation; retries until `timeout_s` while the server has no free session."""
        await self.close()
        until, pause = time.monotonic() + self._server.timeout_s, 0.1
        while True:
            try:
                self._socket = await connect(self._server.address, max_size=RESPONSE_BYTES, ping_interval=None)
                response = await self._request("reset", {**row, "seed": seed})
            except (OSError, InvalidHandshake, InvalidMessage) as error:
                reason = f"no connection: {error}"
            except ConnectionClosed:
                reason = "the server closed the connection, probably because no session is free"
            else:
                if not _refused(response, FULL):
                    return self._shown(_observation(response, "reset"))[0]
                reason = f"all {response['data'].get('max_sessions', '')} sessions of the server are in use"
            await self.close()
            if (remaining_s := until - time.monotonic()) <= 0:
                raise RuntimeError(f"openenv: reset waited {self._server.timeout_s:g} s for {self._server.address}: {reason}")
            await asyncio.sleep(min(pause, remaining_s))
            pause = min(2 * pause, 2.0)

    async def step(self, action: str) -> tuple[str, Any, bool]:
        """Take an action; return text, reward or None, and True at the end. An action that the server rejects only costs a turn."""
        data = self._action(action)
        if isinstance(data, str):
            return data, 0.0, False
        response = await self._request("step", data)
        if _refused(response, "VALIDATION_ERROR"):
            faults = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in response["data"].get("errors", ()))
            return f"{action.strip()[:40]!r} is not an action: {faults or response['data'].get('message', '')}", 0.0, False
        return self._shown(_observation(response, "step"))

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    async def _request(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message of a kind and return the server's response. Raises `RuntimeError` after `timeout_s`, `ConnectionClosed`."""
        if self._socket is None:
            raise RuntimeError("openenv: the session is closed")
        try:
            async with asyncio.timeout(self._server.timeout_s):
                with suppress(ConnectionClosed):  # messages that the server sent before it closed can still be received
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                response: Mapping[str, Any] = json.loads(await self._socket.recv())
        except TimeoutError:
            await self.close()
            raise RuntimeError(f"openenv: {self._server.address} did not respond to {kind} within {self._server.timeout_s:g} s") from None
        return response

    def _action(self, completion: str) -> dict[str, Any] | str:
        """Convert the policy's text to the fields of an action, or return an error message for the policy."""
        text, field = completion.strip(), self._server.action
        if field is not None:
            kind = self._server.fields[field]
            if kind not in ("integer", "number", "boolean"):
                return {field: text}
            try:
                return {field: json.loads(text)}
            except ValueError:
                return f"{text[:40]!r} is not an action: write {'an' if kind == 'integer' else 'a'} {kind}"
        try:
            data = json.loads(text)
        except ValueError:
            data = None
        return data if isinstance(data, dict) else f"{text[:40]!r} is not an action: write JSON with {', '.join(self._server.fields)}"

    def _shown(self, data: Mapping[str, Any]) -> tuple[str, Any, bool]:
        """Return the text of an observation for the policy, the reward, and True at the end of the episode."""
        observation = data["observation"]
        shown = {name: value for name, value in observation.items() if name not in OWN_KEYS}
        if self._server.observation is not None:
            shown = {self._server.observation: observation.get(self._server.observation, "")}
        texts = [value for value in shown.values() if isinstance(value, str)]
        text = texts[0] if len(texts) == len(shown) == 1 else json.dumps(shown, ensure_ascii=False)
        return text, data.get("reward"), bool(data.get("done"))


def _observation(response: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return the data of a response with an observation. Raises `RuntimeError` with the error in any other response."""
    if response.get("type") != "observation":
        error = response.get("data", {})
        raise RuntimeError(f"openenv: {kind}: {error.get('code', 'error')}: {str(error.get('message', error))[:200]}")
    data: Mapping[str, Any] = response["data"]
    return data


def _refused(response: Mapping[str, Any], code: str) -> bool:
    """True if the response is the error with this code."""
    return response.get("type") == "error" and response.get("data", {}).get("code") == code


def _fetched(source: str, url: str) -> dict[str, Any]:
    """Return the JSON object at a URL, retrying for `CONNECT_S` while there is no server. Raises `PluginError`."""
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
                    f"{source}: no OpenEnv server responds at {url} ({getattr(error, 'reason', error)}); start the server first"
                ) from error
        time.sleep(RETRY_S)
