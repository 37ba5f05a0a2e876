"""HTTP endpoint of a worker: `/livez`, `/readyz` and `/metrics` for Prometheus, on a thread of its own, if a port is configured."""

import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import psutil

from penstock.infra.errors import ConfigError
from penstock.infra.paths import state_path
from penstock.pipeline.runtime.reporting.reporter import Reporter
from penstock.topics.metrics import TABLES, entry_of

GAUGES = frozenset({
    "uptime_s", "startup_s", "rss_mib", "peak_rss_mib", "lag", "broker_silent_s", "disk_free_bytes", "version", "admissible", "unfinished",
    "all_out", "slots", "calls_in_hand", "in_flight_groups", "in_flight_lag_STAT", "engine_traced", "engine_swap_stall_last_s",
    "engine_swap_stall_max_s", "engine_occupancy", "engine_kv_cache_usage", "engine_waiting_for_environments", "engine_turns_asked",
    "engine_overhead_ms_pN", "open_groups", "oldest_open_s", "checkpoint_step", "checkpoint_bytes", "checkpoint_s",
    "recovered_from_step", "repeated_steps", "recovery_s",
})  # fmt: skip
"""Metrics of a worker that may fall, or that are ages, versions or results; all others only grow."""
COUNTED_FROM_ZERO = ("dead_letters", "duplicates")
"""Counters of every worker before their first event: Prometheus sees the increase of a counter only from its second value on."""
_UNITS = {"_per_s": ("_per_second", 1.0), "_ms": ("_seconds", 1e-3), "_s": ("_seconds", 1.0), "_mib": ("_bytes", 2.0**20)}
_VARIABLE = re.compile("[_/]p?(STAT|USE|NAME|N)(?![A-Z])")
_PREFIXES = {"system": "", "reward": ""}


def family_of(table: str, key: str) -> tuple[str, str, float]:
    """Name, type, and factor to the base unit for a key of a metrics table.

    Example:
        family_of("system", "time_USE_s")  # -> ("penstock_time_seconds_total", "counter", 1.0)
    """
    name, factor = _VARIABLE.sub("", key), 1.0
    if (end := next((end for end in _UNITS if name.endswith(end)), None)) is not None:
        unit, factor = _UNITS[end]
        name = name.removesuffix(end) + unit
    kind = "counter" if table == "system" and key in TABLES[table] and key not in GAUGES else "gauge"
    return f"penstock_{_PREFIXES.get(table, f'{table}_')}{name}{'_total' if kind == 'counter' else ''}", kind, factor


def families(points: Mapping[str, float], labels: Mapping[str, str]) -> Iterable[Any]:
    """Convert metrics by full name to families of `prometheus_client`; `labels` are added to every sample. An unlisted name is a gauge."""
    from prometheus_client.core import Metric

    by_name: dict[str, Any] = {}
    for point, value in sorted(points.items()):
        entry, more = entry_of(point), dict[str, str]()
        if entry is not None and entry[1] == "SOURCE/NAME":
            more = {"source": entry[2]["source"]}
            entry = entry_of(f"{entry[0]}/{entry[2]['name']}")
        table, key, variable = entry or ("system", re.sub("[^a-zA-Z0-9_]", "_", point.split("/", 2)[-1].replace("/", "_per_")), {})
        name, kind, factor = family_of(table, key)
        family = by_name.setdefault(name, Metric(name.removesuffix("_total"), TABLES[table].get(key, key), kind))
        family.add_sample(name, {**labels, **more, **variable}, value * factor)
    return by_name.values()


HEALTH = "PENSTOCK_HEALTH"
"""The environment variable with [HOST:]PORT; the host is loopback if absent, `*` is every address, of IPv6 too if there is IPv6."""
TURN_S = 120.0
"""A main loop without an iteration for this long hangs if its process uses no CPU; loading and training keep a core busy."""
BUSY_SHARE = 0.05

Response = tuple[str, str, bytes]
"""(HTTP status, content type, body)"""


def address_of(text: str) -> tuple[str, int]:
    """Parse PORT or HOST:PORT. Raises `ConfigError`."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) < 2**16:
        raise ConfigError(f"--health {text}: expected PORT or HOST:PORT")
    if host == "*":
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    return host.strip("[]") or "127.0.0.1", int(port)


@dataclass(slots=True, eq=False)
class Health:
    """Responses of the endpoint about one worker."""

    reporter: Reporter | None
    """None until the worker has joined its run."""
    stopping: threading.Event
    over: bool = False
    """True if its run is over, and the worker stays, idle, until it is stopped."""
    _seen: tuple[float, float, float] = (-1.0, 0.0, 0.0)
    """Last iteration of the loop, and time and CPU seconds at the first probe after it."""

    def response(self, path: str) -> Response:
        """The response to a GET request for `path`: 200 if the worker is alive, or ready, else 503 with the reason."""
        if path == "/livez":
            return _response(self.hangs())
        if path == "/readyz":
            return _response(self.unready())
        if path == "/metrics":
            return "200 OK", "text/plain; version=0.0.4; charset=utf-8", self._metrics()
        return "404 Not Found", "text/plain", b"there are /livez, /readyz and /metrics\n"

    def respond(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """The WSGI application of the endpoint."""
        status, kind, body = self.response(environ["PATH_INFO"])
        start(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [body]

    def hangs(self) -> str | None:
        """The reason to assume that the worker hangs; None if it does not."""
        if self.reporter is None or self.over:
            return None
        now_s, spent_s, turned_s = time.monotonic(), cpu_s(), self.reporter.turned_s
        if turned_s != self._seen[0]:
            self._seen = turned_s, now_s, spent_s
        _, since_s, before_s = self._seen
        silent_s, busy = now_s - turned_s, spent_s - before_s > BUSY_SHARE * (now_s - since_s)
        if silent_s <= TURN_S or now_s - since_s < TURN_S / 2 or busy:
            return None
        return f"the main loop has not run for {silent_s:.0f} s, and the process uses no CPU time"

    def unready(self) -> str | None:
        """The reason why the worker is not ready; None if it is."""
        if self.stopping.is_set():
            return "a stop was requested"
        if self.reporter is None:
            return "waiting for the broker or the run"
        return None if self.over or "startup_s" in self.reporter.values else self.reporter.labels.get("doing", "starting")

    def _metrics(self) -> bytes:
        """The worker's metrics in Prometheus' text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]
        return generate_latest(registry)

    def collect(self) -> Iterable[Any]:
        """Metrics for a scrape: the worker's, its Kafka clients', free disk space, `Reporter.points`; none before the worker joins."""
        reporter, home = self.reporter, state_path()
        if reporter is None:
            return ()
        free = shutil.disk_usage(next(path for path in (home, *home.parents) if path.exists())).free
        values = {**dict.fromkeys(COUNTED_FROM_ZERO, 0.0), **reporter.numbers(), **reporter.log.counts(), "disk_free_bytes": float(free)}
        points = {f"system/{reporter.worker}/{name}": value for name, value in values.items()}
        return families(points | reporter.points, {"run": reporter.run, "role": reporter.role, "worker": reporter.worker})


def cpu_s() -> float:
    """CPU seconds of this process and its descendants so far."""
    spent = 0.0
    for process in (own := psutil.Process(), *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        spent += times.user + times.system
    return spent


def serve(health: Health, text: str | None = None, *, notify: Callable[[str], None] = print) -> WSGIServer | None:
    """Start to serve probes and metrics at `text`, by default at the address in the environment; return the server.

    Without an address nothing is served and None returned. Raises `ConfigError` for a malformed address and for a port in use.
    """
    address = text or os.environ.get(HEALTH)
    if not address:
        return None
    host, port = address_of(address)
    try:
        server = make_server(host, port, health.respond, server_class=_Server, handler_class=_Silent)
    except OSError as error:
        raise ConfigError(f"--health {address}: {error.strerror or error}; choose another port") from error
    threading.Thread(target=server.serve_forever, daemon=True, name="health").start()
    notify(f"health and metrics at http://{f'[{host}]' if ':' in host else host}:{server.server_port}")
    return server


def _response(problem: str | None) -> Response:
    status = "200 OK" if problem is None else "503 Service Unavailable"
    return status, "text/plain; charset=utf-8", f"{problem or 'ok'}\n".encode()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Probes leave no line in the worker's log."""
