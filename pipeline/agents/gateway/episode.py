"""One trajectory of an agent: its program runs as a child process and requests turns from an OpenAI-compatible endpoint on loopback.

An API key identifies a trajectory; requests without the key of an open one are refused. A trajectory ends when its program exits. If the
program fails, hangs or sends no request, the sample is aborted with the cause.
"""

import asyncio
import json
import re
import secrets
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.infra.sandbox.program import Loopback, Program, how_it_ended
from penstock.infra.sandbox.spawn import ENVIRONMENT, ChildRules
from penstock.pipeline.agents.driver import BACKOFF_S, EnvironmentBroken, Limits
from penstock.pipeline.agents.environments.sources import AGENT, PYTHON
from penstock.pipeline.agents.gateway.chat import AgentSession, BadRequest, TrajectoryEnded, events
from penstock.pipeline.agents.record import EpisodeRequest, EpisodeState, Generate, Trajectory, trajectory_of
from penstock.pipeline.data.conversation.messages import Template, text_of
from penstock.pipeline.data.conversation.segments import Conversation
from penstock.pipeline.data.references import with_facts
from penstock.topics.wire.visible import well_formed_json

MAX_BYTES = 64 << 20
MODEL = "policy"
"""Name in the model list; requests may name any model."""


class Gateway:
    """The OpenAI-compatible endpoint for agents: finds the session of a request by its API key; used in one asyncio loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/reward", self._reward, methods=["POST"]),
        ]
        self._server = Loopback(Starlette(routes=routes, exception_handlers={BadRequest: _refused, TrajectoryEnded: _refused}))

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}/v1"

    def open(self, session: AgentSession) -> str:
        """Serve a session from now on; return the API key that its requests must carry."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    def close_session(self, key: str) -> None:
        if (session := self._sessions.pop(key, None)) is not None:
            session.close()

    async def close(self) -> None:
        for key in list(self._sessions):
            self.close_session(key)
        await self._server.close()

    async def _chat(self, request: Request) -> Response:
        """Generate the turn for a request, and return its chat completion."""
        session = self._session(request)
        body, replaced = await _body(request)
        session.replaced = max(session.replaced, replaced)
        retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        result = await _unless_disconnected(request, session.chat(body, retry=retry))
        if result is None:
            return Response(status_code=499)
        chat_request, completion = result
        if chat_request.stream:
            return StreamingResponse(events(chat_request, completion), media_type="text/event-stream")
        return JSONResponse(completion)

    async def _models(self, request: Request) -> Response:
        self._session(request)  # refuses a wrong key
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "penstock"}]})

    async def _reward(self, request: Request) -> Response:
        self._session(request).set_reward((await _body(request))[0])
        return JSONResponse({"ok": True})

    def _session(self, request: Request) -> AgentSession:
        """Return the session whose API key a request carries. Raises `BadRequest` for a missing or unknown key."""
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or (session := self._sessions.get(key.strip())) is None:
            raise BadRequest("the API key belongs to no open trajectory: use that in OPENAI_API_KEY", code="invalid_api_key", status=401)
        return session


async def _refused(_: Request, error: Exception) -> Response:
    """Return the response for a request that ended with `BadRequest` or `TrajectoryEnded`."""
    if isinstance(error, BadRequest):
        return JSONResponse(error.body(), error.status)
    return JSONResponse(BadRequest(str(error), code="trajectory_ended").body(), 403)  # no client retries this status


async def _body(request: Request) -> tuple[Any, int]:
    """Return the JSON value in a request, and the number of lone surrogates that were replaced in it. Raises `BadRequest`."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BYTES:
            raise BadRequest(f"the body has more than {MAX_BYTES >> 20} MiB", status=413)
    try:
        return well_formed_json(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {str(error)[:200]}") from error


async def _unless_disconnected(request: Request, work: Any) -> Any:
    """Return the result of `work`; cancel it and return None if the client disconnects first."""
    result, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({result, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        return result.result() if result.done() else None
    finally:
        result.cancel()
        disconnected.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def command_of(source: str, row: Mapping[str, Any]) -> list[str]:
    """Return the program and arguments in `agent:COMMAND`, with each `{column}` replaced by the row's value; no shell is used.

    `python` is the interpreter of this process.
    """

    def value(match: re.Match[str]) -> str:
        column = row.get(match[1], match[0])
        return column if isinstance(column, str) else json.dumps(column)

    program, *arguments = shlex.split(source.removeprefix(AGENT))
    return [PYTHON.get(program, program), *(re.sub(r"\{(\w+)\}", value, word) for word in arguments)]


def version_of(source: str) -> str | None:
    """Return the first 16 digits of the SHA-256 of all files among a command's arguments; None if there are none."""
    words = shlex.split(source.removeprefix(AGENT))
    files = [Path(word) for word in words[1:] if Path(word).is_file()]
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16] if files else None


@dataclass(slots=True, eq=False)
class AgentClock:
    """Measures the time that an agent uses, without the time in which its turns are generated. `now` returns seconds."""

    now: Callable[[], float] = time.monotonic
    spent_s: float = 0.0
    """Up to the last start or end of a turn."""
    requested: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _generating: int = 0
    _since: float = 0.0

    def __post_init__(self) -> None:
        self._since = self.now()

    def note(self, generating: bool) -> None:
        """Record the start (True) or end (False) of a turn's generation."""
        now = self.now()
        if not self._generating:
            self.spent_s += now - self._since
        self._generating += 1 if generating else -1
        self._since, self.requested = now, True
        self.changed.set()

    def remaining_s(self, limits: Limits) -> float | None:
        """Return the seconds until the agent's timeout; None while a turn is generated for it."""
        if self._generating:
            return None
        silent = self.now() - self._since
        timeout_s = limits.step_timeout_s if self.requested else limits.reset_timeout_s
        return max(0.0, min(timeout_s - silent, limits.trajectory_timeout_s - self.spent_s - silent))


@dataclass(slots=True, kw_only=True, eq=False)
class AgentEpisode:
    """One trajectory of an agent program, and its state."""

    request: EpisodeRequest
    sample: int
    seed: int
    source: str
    template: Template
    gateway: Gateway
    programs: asyncio.Semaphore
    """Limits the number of programs that run at a time."""
    limits: Limits
    generate: Generate
    rules: ChildRules = ENVIRONMENT
    on_loss: Callable[[str], None] = lambda _: None
    version: int = 0
    _started_ns: int = field(default_factory=time.time_ns)
    _session: AgentSession | None = None
    _clock: AgentClock | None = None

    async def run(self) -> Trajectory:
        """Run the program to its end; after a failure restart it, up to `limits.retries` times."""
        failures = 0
        while True:
            try:
                async with self.programs:
                    return await self._run_once()
            except EnvironmentBroken as broken:
                failures += 1
                if failures > self.limits.retries:
                    return self.ended("abort", cause=str(broken))
                self.on_loss(f"{broken}; retrying")
            await asyncio.sleep(BACKOFF_S * 2 ** (failures - 1))

    def ended(self, finish: Literal["stop", "length", "abort"], *, cause: str | None = None) -> Trajectory:
        """Return the trajectory so far, to be published as a sample with this `finish`; `cause` is why the agent failed."""
        session = self._session
        messages, generated = session.record() if session else ([], [])
        episode_state = EpisodeState(
            messages=messages,
            generated=generated,
            rewards={session.last_turn: session.reward} if session and generated and session.reward is not None else {},
            environment=self.source,
            version=version_of(self.source),
            seed=self.seed,
            environment_s=self._clock.spent_s if self._clock else 0.0,
            started_ns=self._started_ns,
            ended_ns=time.time_ns(),
            replaced=session.replaced if session else 0,
        )
        segments = session.conversation.segments() if session else ()
        return trajectory_of(
            segments, self.request, self.sample, episode_state=episode_state, finish=finish, cause=cause, version=self.version
        )

    async def _run_once(self) -> Trajectory:
        """Start the program with a new API key, wait for its exit and return its trajectory. Raises `EnvironmentBroken` if it fails."""
        limits = self.limits
        clock = self._clock = AgentClock()
        conversation, bounds = Conversation(self.template, history=limits.history), (limits.turn_tokens, limits.trajectory_tokens)
        session = self._session = AgentSession(conversation, self.generate, limits.max_turns, *bounds, clock.note)
        key = self.gateway.open(session)
        row = self._row()
        program = await Program.start(
            command_of(self.source, row), stdin=json.dumps(row).encode() + b"\n", environment=self._environment(key), rules=self.rules
        )
        try:
            status = await self._watched(program, clock, session)
        finally:
            self.gateway.close_session(key)
            await program.kill()
        if session.aborted:
            return self.ended("abort")
        if status != 0:
            raise EnvironmentBroken("exit", f"the agent exited with {how_it_ended(status, program.output)}")
        if session.last_turn < 0:
            raise EnvironmentBroken("exit", "the agent exited without a request: it must use OPENAI_BASE_URL and OPENAI_API_KEY")
        return self.ended("length" if session.truncated else "stop")

    async def _watched(self, program: Program, clock: AgentClock, session: AgentSession) -> int:
        """Wait for the program; returns its exit status, or -1 if the policy aborted a turn. Raises `EnvironmentBroken` after a timeout."""
        ending = asyncio.create_task(program.wait())
        try:
            while not ending.done():
                if session.aborted:
                    return -1
                clock.changed.clear()
                changed = asyncio.create_task(clock.changed.wait())
                await asyncio.wait({ending, changed}, timeout=clock.remaining_s(self.limits), return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if not ending.done() and clock.remaining_s(self.limits) == 0.0:
                    raise EnvironmentBroken("timeout", f"the agent neither sent a request nor exited within {self._allowed(clock)}")
            return ending.result()
        finally:
            ending.cancel()

    def _allowed(self, clock: AgentClock) -> str:
        """Describe the time limits that apply to the agent now, with their configuration keys."""
        limits = self.limits
        first, later = f"{limits.reset_timeout_s:g} s until its first request", f"{limits.step_timeout_s:g} s after a turn"
        each = f"{later} (environment.step_timeout_s)" if clock.requested else f"{first} (environment.reset_timeout_s)"
        return f"{each}, {limits.trajectory_timeout_s:g} s in all (environment.trajectory_timeout_s)"

    def _row(self) -> dict[str, Any]:
        """Return the program's input: the row's columns, prompt text and messages, seed and sample number."""
        request = self.request
        messages = json.loads(request.messages) if request.messages else [{"role": "user", "content": request.prompt}]
        prompt = text_of(messages[-1]) if request.messages else request.prompt
        return with_facts(request.row, {"prompt": prompt, "messages": messages, "seed": self.seed, "sample": self.sample})

    def _environment(self, key: str) -> dict[str, str]:
        """Return the environment variables that point an agent program at the gateway; `key` identifies its trajectory."""
        url = self.gateway.base_url
        return {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": key,
            "PENSTOCK_REWARD_URL": f"{url}/reward",
            # Bypass any configured proxy, which could not reach this machine's loopback.
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }
