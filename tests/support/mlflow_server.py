"""A real MLflow server on a port of its own that can be killed, stopped in mid-air, and replaced by one that answers 500."""

import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.waiting import until

START_LIMIT_S = 300.0


class MlflowServer:
    """One server process at a time, always at the same address over the same database; leaving the block kills it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.database = directory, directory / "server.db"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self.database}", "--workers", "1"]
        command += ["--artifacts-destination", str(self.directory / "artifacts"), "--host", "127.0.0.1", "--port", str(self.port)]
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # without cached bytecode it starts in a minute
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=self.directory, start_new_session=True
            )
        process, output = self._process, self.directory / "server.log"
        until(lambda: self._answers() or process.poll() is not None, output.read_text, limit_s=START_LIMIT_S, every_s=0.1)
        assert process.poll() is None, output.read_text()

    def signal(self, number: signal.Signals) -> None:
        """Send the server and its children a signal."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    @contextmanager
    def broken(self) -> Iterator[list[str]]:
        """In the place of the dead server one that answers 500; gives the paths it is asked for."""
        asked: list[str] = []

        class Broken(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(500)
                self.send_header("Content-Length", "5")
                self.end_headers()
                self.wfile.write(b"nope\n")

            do_POST = do_PATCH = do_GET

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", self.port), Broken)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield asked
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def __enter__(self) -> "MlflowServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=30.0) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False
