"""Servers of one guessing game: one that speaks OpenEnv's protocol itself, and OpenEnv's own, installed apart."""

import asyncio
import contextlib
import json
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from tests.support.paths import ROOT

SESSIONS = 2
BROKEN, SLOW = 666, 777
"""Guesses that break the game, and that it thinks about for `SLOW_S`; until then the session is taken, whoever has left."""
SLOW_S = 5.0
TYPES = {"properties": {"number": {"type": "integer"}, "metadata": {"type": "object"}}, "required": ["number"]}
SCHEMA = {"action": TYPES, "observation": {"properties": {"text": {}, "done": {}, "reward": {}, "metadata": {}}}}

OWN_SERVER = f"""
import random, sys, time
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Guess(Action):
    number: int

class Told(Observation):
    text: str = ""

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, largest=20, **kwargs):
        self.hidden = random.Random(seed).randint(1, largest)
        return Told(text=f"a number from 1 to {{largest}}")

    def step(self, action, timeout_s=None, **kwargs):
        if action.number == {BROKEN}:
            raise RuntimeError("the game broke")
        if action.number == {SLOW}:
            time.sleep({SLOW_S})
        right = action.number == self.hidden
        text = "right" if right else "higher" if action.number < self.hidden else "lower"
        return Told(text=text, reward=float(right), done=right)

    @property
    def state(self):
        return State(step_count=0)

app = create_app(Game, Guess, Told, env_name="guess", max_concurrent_envs={SESSIONS})
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@contextlib.contextmanager
def wire_server() -> Iterator[str]:
    """The address of a server that speaks OpenEnv 0.10's protocol from a thread of this process."""
    started, loop = threading.Event(), asyncio.new_event_loop()
    open_sessions = set[ServerConnection]()
    found: list[Server] = []

    async def play(connection: ServerConnection) -> None:
        if len(open_sessions) >= SESSIONS:
            await connection.send(json.dumps({"type": "error", "data": {"code": "CAPACITY_REACHED", "max_sessions": SESSIONS}}))
            return
        open_sessions.add(connection)
        with contextlib.suppress(ConnectionClosed):  # whose client was killed
            await played(connection)
        open_sessions.discard(connection)

    async def begin() -> None:
        found.append(await serve(play, "127.0.0.1", 0, process_request=pages, close_timeout=1))
        started.set()

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(begin(), loop)
    assert started.wait(120)
    try:
        yield f"ws://127.0.0.1:{next(iter(found[0].sockets)).getsockname()[1]}"
    finally:
        found[0].close()
        asyncio.run_coroutine_threadsafe(found[0].wait_closed(), loop).result(120)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


async def played(connection: ServerConnection) -> None:
    """Answers one session's requests until its client closes it."""
    hidden = 0
    async for text in connection:
        asked = json.loads(text)
        if asked["type"] == "reset":
            largest = asked["data"].get("largest", 20)
            hidden = random.Random(asked["data"]["seed"]).randint(1, largest)
            await connection.send(observation(f"a number from 1 to {largest}", reward=None, done=False))
        else:
            await connection.send(await answered(asked["data"], hidden))


async def answered(action: dict[str, Any], hidden: int) -> str:
    """The answer to a step."""
    number = action.get("number")
    if not isinstance(number, int):
        fault = {"loc": ["number"], "msg": "Input should be a valid integer"}
        return json.dumps({"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "Invalid message", "errors": [fault]}})
    if number == BROKEN:
        return json.dumps({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "the game broke"}})
    if number == SLOW:
        await asyncio.sleep(SLOW_S)
    right = number == hidden
    return observation("right" if right else "higher" if number < hidden else "lower", reward=float(right), done=right)


def observation(text: str, *, reward: float | None, done: bool) -> str:
    """An answer with an observation."""
    return json.dumps({"type": "observation", "data": {"observation": {"text": text}, "reward": reward, "done": done}})


def pages(_: ServerConnection, request: Request) -> Response | None:
    """What the server answers over HTTP; None for the WebSocket."""
    page = {"/schema": SCHEMA, "/metadata": {"name": "Game", "version": "1.0.0"}}.get(request.path)
    if page is None:
        return None
    body = json.dumps(page).encode()
    return Response(HTTPStatus.OK, "OK", Headers({"Content-Type": "application/json", "Content-Length": str(len(body))}), body)


@contextlib.contextmanager
def openenv_server(directory: Path) -> Iterator[str]:
    """The address of OpenEnv's own server; its package does not fit beside ours, so that it is installed into `directory`."""
    uv = shutil.which("uv") or str(ROOT / ".venv" / "bin" / "uv")
    python = directory / "venv" / "bin" / "python"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(directory / "venv")], check=True, timeout=180)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", str(python), "openenv==0.10.0"], check=True, timeout=600)
    (directory / "server.py").write_text(OWN_SERVER, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([str(python), str(directory / "server.py"), str(port)])
    try:
        until = time.monotonic() + 300  # its first start compiles a hundred packages
        while server.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10):
                break
            time.sleep(0.2)
        yield f"ws://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait(30)
