"""Serves an ASGI application to programs of this machine, in the running asyncio loop."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the process."""
        yield


class Loopback:
    """A server on 127.0.0.1, on a free port."""

    def __init__(self, app: Any) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        settings = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        self._server = _Server(settings)
        # The socket listens already: a client that connects before the server runs only waits.
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))

    async def close(self) -> None:
        """Stop serving; open requests are cut off within a second."""
        self._server.should_exit = True
        await self._serving
        self._socket.close()
