"""The server of `penstock ui`: pages for one person's browser on this machine.

It listens on loopback by default, serves only paths that start with its token, changes nothing, and allows pages nothing from elsewhere.
"""

import asyncio
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.infra.errors import PenstockError
from penstock.infra.log import Log
from penstock.infra.paths import write_private
from penstock.pipeline.cli.ui import pages
from penstock.pipeline.cli.ui.store import Runs
from penstock.pipeline.inspect.report.summary import finite
from penstock.pipeline.inspect.web.render import render
from penstock.pipeline.runtime.registration.run_registry import resolve

HOST = "127.0.0.1"
TOKEN_LENGTH = 22
EVERY_S = 1.0
POLL_S = 0.1
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
TYPES = {"js": "text/javascript", "css": "text/css"}


def stable_token(path: Path) -> str:
    """The token in this file, made at its first use, so that bookmarks survive a restart."""
    if not path.is_file() or len(token := path.read_text(encoding="utf-8").strip()) < TOKEN_LENGTH:
        write_private(path, token := secrets.token_urlsafe(16))
    return token


class Server:
    """Serves the runs of a log below `address`, until `shutdown`."""

    def __init__(self, log: Log, *, port: int, token: str, host: str = HOST) -> None:
        """Raises `OSError` if the port is taken."""
        self._socket = socket.create_server((host, port), backlog=128)
        self.server_address: tuple[str, int] = self._socket.getsockname()
        self.runs, self.token = Runs(log), token
        self.questions = threading.BoundedSemaphore(pages.AT_ONCE)
        app = Guard(Starlette(routes=self._routes()), self)
        settings = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(settings)

    @property
    def address(self) -> str:
        """The address to open; who knows it may look."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def serve_forever(self) -> None:
        """Serve until `shutdown` or, in the main thread, Ctrl-C."""
        self._server.run(sockets=[self._socket])

    def shutdown(self) -> None:
        self._server.should_exit = True

    def server_close(self) -> None:
        """Stop listening and reading."""
        self._socket.close()
        self.runs.close()

    def _routes(self) -> list[Route]:
        run = "/r/{run}"
        routes = [
            Route("/", self._page(pages.index)),
            Route("/compare", self._page(pages.compare)),
            Route("/static/{name}", static),
            Route(f"{run}/events", self._events),
            Route(f"{run}/sql", self._sql),
            Route(f"{run}/groups", self._data(pages.groups)),
            Route(f"{run}/g/{{group:int}}/data", self._data(pages.detail)),
            Route(f"{run}/columns", self._data(pages.columns)),
            Route(f"{run}/g/{{group:int}}", self._page(pages.group)),
            Route(f"{run}/g/{{group:int}}/trace", self._page(pages.trace)),
            Route(f"{run}/topics/{{topic}}", self._page(pages.topic)),
            *(Route(f"{run}/{name}", self._page(page)) for name, page in pages.PAGES.items()),
        ]
        return [*routes, Route(run, self._page(pages.run))]

    def _base(self) -> str:
        return f"/{self.token}"

    def _page(self, make: Callable[..., Any]) -> Callable[[Request], Any]:
        """A page from its template and facts, or an error in one line."""

        def respond(request: Request) -> Response:
            try:
                if (name := request.path_params.get("run")) is not None and (run := resolve(self.runs.log, name)) != name:
                    rest = request.url.path.removeprefix(f"/r/{name}") + (f"?{request.url.query}" if request.url.query else "")
                    return RedirectResponse(f"{self._base()}/r/{run}{rest}")
                template, facts = make(pages.Address(self.runs, request.query_params, **request.path_params))
                status = 200
            except (PenstockError, ValueError) as error:
                template, facts, status = "problem.html", {"problem": " ".join(str(error).split())}, 400
            return Response(render(template, base=self._base(), **facts), status, media_type="text/html")

        return respond

    def _data(self, make: Callable[..., Any]) -> Callable[[Request], Any]:
        """JSON, or bytes as they are."""

        def respond(request: Request) -> Response:
            try:
                data = make(pages.Address(self.runs, request.query_params, **request.path_params))
            except (PenstockError, ValueError) as error:
                return JSONResponse({"problem": " ".join(str(error).split())}, 400)
            return Response(data) if isinstance(data, bytes) else AsciiJson(data)

        return respond

    async def _sql(self, request: Request) -> Response:
        """A question in SQL and its result, computed until the browser closes the connection."""
        gone = threading.Event()

        async def watch() -> None:
            while not await request.is_disconnected():
                await asyncio.sleep(POLL_S)
            gone.set()

        watching = asyncio.ensure_future(watch())
        try:
            page = self._page(lambda address: pages.sql(address, self.questions, gone.is_set))
            return await run_in_threadpool(page, request)
        finally:
            watching.cancel()

    async def _events(self, request: Request) -> Response:
        """The changing part of the run's page, once a second while it changes."""
        run = resolve(self.runs.log, request.path_params["run"])
        return StreamingResponse(self._stream(run, request), media_type="text/event-stream")

    async def _stream(self, run: str, request: Request) -> AsyncIterator[bytes]:
        last: dict[str, str] = {}
        while not self._server.should_exit and not await request.is_disconnected():
            started = time.monotonic()
            try:
                page = await run_in_threadpool(self.runs[run].page)
            except PenstockError as error:
                yield _event("problem", " ".join(str(error).split()))
                return
            text = await run_in_threadpool(render, "_live.html", base=self._base(), file=False, **page)
            for name, data in (("facts", text.decode()), ("curves", json.dumps(page["curves"]))):
                if last.get(name) != data:
                    last[name] = data
                    yield _event(name, data)
            if not page["live"]:
                yield _event("over", "")
                return
            await asyncio.sleep(max(EVERY_S, 5 * (time.monotonic() - started)))


def _event(name: str, data: str) -> bytes:
    lines = "".join(f"data: {line}\n" for line in data.split("\n"))
    return f"event: {name}\n{lines}\n".encode("utf-8", "replace")


class AsciiJson(JSONResponse):
    """JSON as browsers read it: no NaN, no characters that UTF-8 cannot have, and none that would start markup."""

    def render(self, content: Any) -> bytes:
        """The body of the response."""
        return json.dumps(finite(content), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").encode()


def static(request: Request) -> Response:
    """A script or a style sheet."""
    name = request.path_params["name"]
    path = files("penstock.pipeline.inspect.web") / "static" / name
    if name.rpartition(".")[2] not in TYPES or "/" in name or not path.is_file():
        return Response(status_code=404)
    return Response(path.read_bytes(), media_type=TYPES[name.rpartition(".")[2]])


class Guard:
    """Serves only GET requests with the token in the path and this host's name, and adds the headers that keep a page to itself."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app, self._server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((name.lower().encode(), value.encode()) for name, value in HEADERS.items())]
            await send(message)

        _, token, path = [*scope["path"].split("/", 2), "", ""][:3]
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        # The host name too: another site's name that resolves to this machine is no address of ours.
        ours = {f"{name}:{self._server.server_address[1]}" for name in (HOST, "localhost")}
        if host not in ours or not hmac.compare_digest(token.encode(), self._server.token.encode()):
            await Response(status_code=404)(scope, receive, with_headers)
        elif scope["method"] != "GET":
            await Response(status_code=501)(scope, receive, with_headers)
        else:
            await self._app({**scope, "path": f"/{path}", "raw_path": f"/{path}".encode()}, receive, with_headers)
