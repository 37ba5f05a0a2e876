"""The server of `penstock ui`: pages for one person's browser on this machine.

It listens on loopback, serves only paths that start with its token, is read-only, and allows pages
neither scripts nor anything from elsewhere; the page of a run brings a policy of its own.
"""

import hmac
import select
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from penstock.infra.errors import PenstockError
from penstock.infra.log import Log
from penstock.pipeline.cli.ui import pages
from penstock.pipeline.cli.ui.markup import POLICY
from penstock.pipeline.cli.ui.pages import Watching

HOST = "127.0.0.1"
IDLE_S = 10.0
OWN_POLICY = frozenset({"page"})
"""Pages that contain their own policy, because they have scripts."""


class Server(ThreadingHTTPServer):
    """Serves the runs of a log below `address`, until `shutdown`."""

    daemon_threads = True

    def __init__(self, log: Log, *, port: int, token: str) -> None:
        # First: a port that is taken closes the server before it is made.
        self.runs, self.token = Watching(log), token
        super().__init__((HOST, port), Handler)

    @property
    def address(self) -> str:
        """The address to open; who knows it may look."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def answer(self, target: str, host: str, gone: Callable[[], bool]) -> tuple[int, bytes, str | None]:
        """Status, page and its policy for the address that a browser asks for under this host name, until it has `gone`."""
        asked = urlsplit(target)
        _, token, name = [*asked.path.split("/", 2), "", ""][:3]
        ours = {f"{name}:{self.server_address[1]}" for name in (HOST, "localhost")}
        # The host name too: another site's name that resolves to this machine is no address of ours.
        if host not in ours or not hmac.compare_digest(token.encode(), self.token.encode()) or name not in pages.PAGES:
            return 404, b"", POLICY
        make = pages.PAGES[name]
        try:
            if make is pages.sql:
                return 200, pages.sql(self.runs, parse_qs(asked.query), gone), POLICY
            with self.runs.reading:
                return 200, make(self.runs, parse_qs(asked.query)), None if name in OWN_POLICY else POLICY
        except (PenstockError, ValueError) as error:
            return 400, pages.problem(error), POLICY

    def server_close(self) -> None:
        """Stop listening and reading."""
        super().server_close()
        self.runs.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of the current exception, unless the browser has closed the connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One request of a browser."""

    timeout = IDLE_S
    server: Server

    def do_GET(self) -> None:
        """Answer with a page."""
        status, page, policy = self.server.answer(self.path, self.headers.get("Host", ""), self._gone)
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        if policy is not None:
            self.send_header("Content-Security-Policy", policy)
        self.end_headers()
        self.wfile.write(page)

    def _gone(self) -> bool:
        """True if the browser has closed the connection."""
        poller = select.poll()
        poller.register(self.connection, select.POLLRDHUP)
        return bool(poller.poll(0))

    def log_message(self, format: str, *args: object) -> None:
        """A request is not worth a line."""
