"""The server of `penstock ui`: pages for one person's browser on this machine.

It listens on loopback by default, serves only paths that start with its token, changes nothing but notes about runs, and these only if it
may, and allows pages nothing from elsewhere.
"""

import asyncio
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.infra.errors import PenstockError
from penstock.infra.log import Log
from penstock.infra.paths import write_private
from penstock.pipeline.cli.ui import pages
from penstock.pipeline.cli.ui.store import Runs
from penstock.pipeline.inspect.records.runs import NOTE_BYTES, Note, write_note
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
    "X-Accel-Buffering": "no",  # a proxy passes events on as they come
}

FOREVER = {"Cache-Control": "private, max-age=31536000, immutable"}
"""Headers of scripts and style sheets, whose addresses contain their digest."""


def stable_token(path: Path) -> str:
    """The secret part of the server's address, stored in this file at its first use, so that bookmarks survive a restart."""
    if not path.is_file() or len(token := path.read_text(encoding="utf-8").strip()) < TOKEN_LENGTH:
        write_private(path, token := secrets.token_urlsafe(16))
    return token


class Server:
    """Serves the runs of a log below `address`, until `shutdown`."""

    def __init__(self, log: Log, *, port: int, token: str, host: str = HOST, writable: bool = False) -> None:
        """`writable`: pages may change the notes of runs. Raises `OSError` if the port is taken."""
        self._socket = socket.create_server((host, port), backlog=128)
        self.server_address: tuple[str, int] = self._socket.getsockname()
        self.runs, self.token, self.writable, self._base = Runs(log), token, writable, f"/{token}"
        self.questions = threading.BoundedSemaphore(pages.AT_ONCE)
        app = Guard(Starlette(routes=self._routes()), self)
        settings = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(settings)

    @property
    def address(self) -> str:
        """The address to open, with the token, which allows reading all runs."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def serve_forever(self) -> None:
        """Serve until `shutdown` or, in the main thread, Ctrl-C."""
        self._server.run(sockets=[self._socket])

    def shutdown(self) -> None:
        self._server.should_exit = True

    def server_close(self) -> None:
        self._socket.close()
        self.runs.close()

    def _routes(self) -> list[BaseRoute]:
        run = "/r/{run}"
        routes: list[BaseRoute] = [
            Route("/", self._page(pages.index)),
            Route("/compare", self._page(pages.compare)),
            Mount("/static", StaticFiles(packages=[("penstock.pipeline.inspect.web", "static")])),
            Route(f"{run}/events", self._events),
            Route(f"{run}/sql", self._until_gone(pages.sql)),
            Route(f"{run}/download.{{ending}}", self._until_gone(pages.download)),
            Route(f"{run}/note", self._note, methods=["POST"]),
            Route(f"{run}/groups/histograms", self._page(pages.histograms)),
            Route(f"{run}/groups", self._page(pages.groups)),
            Route(f"{run}/g/{{group:int}}/data", self._page(pages.detail)),
            Route(f"{run}/columns", self._page(lambda address: address.watched.columns())),
            Route(f"{run}/g/{{group:int}}", self._page(pages.group)),
            Route(f"{run}/g/{{group:int}}/trace", self._page(pages.trace)),
            Route(f"{run}/topics/{{topic}}", self._page(pages.topic)),
            *(Route(f"{run}/{name}", self._page(page)) for name, page in pages.PAGES.items()),
        ]
        return [*routes, Route(run, self._page(pages.run))]

    def _page(self, make: Callable[..., Any]) -> Callable[[Request], Any]:
        """Return the handler for a function of `pages.Address` that returns (template, facts), a response, bytes, or data for JSON.

        An error is returned as one line with status 400, as a page or as JSON. A prefix of a run id is redirected to the full id.
        """

        def respond(request: Request) -> Response:
            try:
                if (name := request.path_params.get("run")) is not None and (run := resolve(self.runs.log, name)) != name:
                    rest = request.url.path.removeprefix(f"/r/{name}") + (f"?{request.url.query}" if request.url.query else "")
                    return RedirectResponse(f"{self._base}/r/{run}{rest}")
                made, status = make(pages.Address(self.runs, request.query_params, **request.path_params, writable=self.writable)), 200
            except (PenstockError, ValueError) as error:
                made, status = {"problem": " ".join(str(error).split())}, 400
                made = ("problem.html", made) if "text/html" in request.headers.get("accept", "") else made
            if isinstance(made, tuple):
                return Response(render(made[0], base=self._base, **made[1]), status, media_type="text/html")
            return made if isinstance(made, Response) else Response(made) if isinstance(made, bytes) else AsciiJson(made, status)

        return respond

    def _until_gone(self, make: Callable[..., Any]) -> Callable[[Request], Any]:
        """Return the handler for a page or file with the result of a query, which ends if the browser closes the connection."""

        async def respond(request: Request) -> Response:
            gone = threading.Event()

            async def watch() -> None:
                while not await request.is_disconnected():
                    await asyncio.sleep(POLL_S)
                gone.set()

            watching = asyncio.ensure_future(watch())
            try:
                page = self._page(lambda address: make(address, self.questions, gone.is_set))
                return await run_in_threadpool(page, request)  # type: ignore[no-any-return]
            finally:
                watching.cancel()

        return respond

    async def _note(self, request: Request) -> Response:
        """Store the name, note and tags of a run from a form."""
        body = b""
        async for part in request.stream():
            if len(body := body + part) > NOTE_BYTES:
                return Response("the note is too long", 413)
        form = parse_qs(body.decode("utf-8", "replace"))
        name, text, tags = (" ".join(form.get(field, ())).strip() for field in ("name", "text", "tags"))

        def save(address: pages.Address) -> Response:
            write_note(address.run, Note(name=name or None, text=text or None, tags=tuple(dict.fromkeys(tags.split()))))
            return RedirectResponse(f"{self._base}/r/{address.run}", 303)

        return await run_in_threadpool(self._page(save), request)  # type: ignore[no-any-return]

    async def _events(self, request: Request) -> Response:
        """Handler of the stream of events that keeps a run's page up to date."""
        run = resolve(self.runs.log, request.path_params["run"])
        return StreamingResponse(self._stream(run, request), media_type="text/event-stream")

    async def _stream(self, run: str, request: Request) -> AsyncIterator[bytes]:
        """Yield server-sent events with the parts of a run's page that have changed, until the run ends or the browser leaves."""
        last: dict[str, str] = {}
        while not self._server.should_exit and not await request.is_disconnected():
            started = time.monotonic()
            try:
                page = await run_in_threadpool(self.runs[run].page)
            except PenstockError as error:
                yield _event("problem", " ".join(str(error).split()))
                return
            text = await run_in_threadpool(render, "_live.html", base=self._base, file=False, **page)
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
        return json.dumps(finite(content), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").encode()


class Guard:
    """Serves requests with the token in the path and this host's name: GET, and forms of own pages; adds headers that keep pages apart."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app, self._server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = HEADERS | (FOREVER if path.startswith("static/") else {})
                message["headers"] = [*message["headers"], *((name.lower().encode(), value.encode()) for name, value in own.items())]
            await send(message)

        _, token, path = [*scope["path"].split("/", 2), "", ""][:3]
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        # Another site's name that resolves to this machine is no address of ours; the port is another one behind `ssh -L`.
        if host.partition(":")[0] not in (HOST, "localhost") or not hmac.compare_digest(token.encode(), self._server.token.encode()):
            await Response(status_code=404)(scope, receive, with_headers)
        elif scope["method"] != "GET" and not (
            self._server.writable and scope["method"] == "POST" and headers.get(b"sec-fetch-site") == b"same-origin"
        ):
            await Response(status_code=501)(scope, receive, with_headers)
        else:
            await self._app({**scope, "path": f"/{path}", "raw_path": f"/{path}".encode()}, receive, with_headers)
