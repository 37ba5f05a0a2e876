"""OpenAI-compatible endpoint on loopback: chat completions, models, and the reward of a trajectory.

An API key identifies a trajectory. Requests without the key of an open trajectory are refused.
"""

import asyncio
import json
import secrets
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.infra.sandbox.loopback import Loopback
from penstock.pipeline.agents.gateway.chat import BadRequest, events
from penstock.pipeline.agents.gateway.sessions import AgentSession, TrajectoryEnded
from penstock.topics.wire.well_formed import well_formed_json

MAX_BYTES = 64 << 20
MODEL = "policy"
"""Name in the model list; requests may name any model."""


class Gateway:
    """Serves the open sessions by their keys; used in one asyncio loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/reward", self._reward, methods=["POST"]),
        ]
        self._server = Loopback(Starlette(routes=routes))

    @property
    def base_url(self) -> str:
        """Value of `OPENAI_BASE_URL` for an agent."""
        return f"http://127.0.0.1:{self._server.port}/v1"

    def open(self, session: AgentSession) -> str:
        """Open a session and return its random key."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    def close_session(self, key: str) -> None:
        """Close the session of a key; a second call does nothing."""
        if (session := self._sessions.pop(key, None)) is not None:
            session.close()

    async def close(self) -> None:
        for key in list(self._sessions):
            self.close_session(key)
        await self._server.close()

    async def _chat(self, request: Request) -> Response:
        try:
            session = self._session(request)
            body, replaced = await _body(request)
            session.replaced = max(session.replaced, replaced)
            retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            result = await _unless_disconnected(request, session.chat(body, retry=retry))
        except BadRequest as error:
            return JSONResponse(error.body(), error.status)
        except TrajectoryEnded as ended:
            # No client retries this status.
            return JSONResponse(BadRequest(str(ended), code="trajectory_ended").body(), 403)
        if result is None:
            return Response(status_code=499)
        chat_request, completion = result
        if chat_request.stream:
            return StreamingResponse(events(chat_request, completion), media_type="text/event-stream")
        return JSONResponse(completion)

    async def _models(self, request: Request) -> Response:
        try:
            self._session(request)
        except BadRequest as error:
            return JSONResponse(error.body(), error.status)
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "penstock"}]})

    async def _reward(self, request: Request) -> Response:
        try:
            self._session(request).set_reward((await _body(request))[0])
        except BadRequest as error:
            return JSONResponse(error.body(), error.status)
        return JSONResponse({"ok": True})

    def _session(self, request: Request) -> AgentSession:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or (session := self._sessions.get(key.strip())) is None:
            raise BadRequest("the API key belongs to no open trajectory: take it from OPENAI_API_KEY", code="invalid_api_key", status=401)
        return session


async def _body(request: Request) -> tuple[Any, int]:
    """The request's JSON value and the number of lone surrogates replaced in it."""
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
    """The result of `work`; None if the client disconnects first."""
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
