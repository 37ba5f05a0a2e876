"""The endpoint that agents take for OpenAI's: chat completions, models, and the reward of a trajectory, on loopback only.

The rule: a key is a trajectory. Without one that is open, nothing is answered.
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
from penstock.pipeline.envs.agents.gateway.chat import BadRequest, events
from penstock.pipeline.envs.agents.gateway.sessions import AgentSession, PolicyGone
from penstock.topics.wire.well_formed import well_formed_json

MAX_BYTES = 64 << 20
"""Of a request's body."""
MODEL = "policy"
"""The name that the model list gives; requests may name any."""


class Gateway:
    """Serves the sessions that are open, each to whoever has its key; made and used in one asyncio loop."""

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
        """What an agent takes as `OPENAI_BASE_URL`."""
        return f"http://127.0.0.1:{self._server.port}/v1"

    def open(self, session: AgentSession) -> str:
        """The key of a session, which nobody can guess."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    def close_session(self, key: str) -> None:
        """Answer no more under a key; one that is closed stays so."""
        if (session := self._sessions.pop(key, None)) is not None:
            session.close()

    async def close(self) -> None:
        """End all sessions and stop serving."""
        for key in list(self._sessions):
            self.close_session(key)
        await self._server.close()

    async def _chat(self, request: Request) -> Response:
        try:
            session = self._session(request)
            body, replaced = await _body(request)
            session.replaced = max(session.replaced, replaced)
            retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            answered = await _unless_gone(request, session.chat(body, retry=retry))
        except BadRequest as error:
            return JSONResponse(error.body(), error.status)
        except PolicyGone as gone:
            # A status that no client tries again.
            return JSONResponse(BadRequest(str(gone), code="trajectory_ended").body(), 403)
        if answered is None:
            return Response(status_code=499)
        asked, whole = answered
        if asked.stream:
            return StreamingResponse(events(asked, whole), media_type="text/event-stream")
        return JSONResponse(whole)

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
    """The request's JSON value, and how many lone surrogates were replaced in it."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BYTES:
            raise BadRequest(f"the body has more than {MAX_BYTES >> 20} MiB", status=413)
    try:
        return well_formed_json(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {str(error)[:200]}") from error


async def _unless_gone(request: Request, work: Any) -> Any:
    """The result of `work`, or None where the client has gone before."""
    answer, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
    finally:
        answer.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
