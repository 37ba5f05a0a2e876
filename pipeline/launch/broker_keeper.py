"""Connects to a run's broker, restarts the embedded broker when it crashes, and serves one in the foreground.

Every command connects here, so nothing of workers or models is imported. A broker that was stopped on purpose stays stopped.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from penstock.infra.broker import embedded
from penstock.infra.broker.settings import Listener
from penstock.infra.errors import BrokerError, ConfigError, PenstockError
from penstock.infra.kafka.log import KafkaLog, await_broker
from penstock.pipeline.config.schema import RunSection
from penstock.pipeline.config.security import credentials
from penstock.pipeline.launch import restart_policy
from penstock.pipeline.launch.restart_policy import WorkerExit
from penstock.pipeline.launch.shutdown import stop_requested
from penstock.pipeline.runtime.exit_status import FAILED

STOP_NOTE_S = 0.2
"""While the embedded broker is being stopped its pid file remains for some milliseconds: it looks crashed."""
LOOK_EVERY_S = 0.2
"""How often a broker in the foreground is looked at."""

Notify = Callable[[str], None]


@dataclass(slots=True)
class BrokerKeeper:
    """Restarts the embedded broker at `bootstrap` when it crashes, and ignores any other broker; the launcher calls `check` in a loop."""

    bootstrap: str
    rules: RunSection
    notify: Notify
    exits: list[WorkerExit] = field(default_factory=list)
    ours: bool = False
    _down: str | None = None
    """The reason it does not run; None while it runs."""
    _stopped: bool = False
    """True if it was stopped on purpose."""
    _unreachable_s: float | None = None
    _up_s: float = 0.0
    _starting: threading.Thread | None = None
    _refusal: str | None = None
    """The reason the newest start failed."""

    def __post_init__(self) -> None:
        self.ours, self._up_s = embedded.status().bootstrap == self.bootstrap, time.monotonic()

    @property
    def up(self) -> bool:
        """True if the broker runs, as far as this machine can tell."""
        return self._down is None

    def check(self, *, now_s: float) -> str | None:
        """Start to restart the broker if it has crashed; return why it is not restarted once the restart limit is reached, else None."""
        if not self.ours or (self._starting is not None and self._starting.is_alive()):
            return None
        status = embedded.status()
        if self._starting is not None:
            self._starting = None
            self._started(now_s=now_s)
        elif status.running:
            self._runs(now_s=now_s)
        elif self._down is None or self._stopped:  # a start that failed leaves no pid file either: that is no stop
            self._is_gone(status.ended, now_s=now_s)
        if self._down is None or self._stopped:
            return None
        decision = restart_policy.decide(self.exits, now_s=now_s, rules=self.rules)
        if decision == "give-up":
            return f"{self._down} ({restart_policy.failure_cause(self.exits, rules=self.rules)})"
        if decision == "start":
            self._starting = threading.Thread(target=self._start, name="broker-start", daemon=True)
            self._starting.start()
        return None

    def _runs(self, *, now_s: float) -> None:
        """Record that the broker runs, which another process may have started."""
        if self._down is not None:  # another process has started it
            self.notify(f"the broker at {self.bootstrap} is running again")
            self._down, self._stopped, self._up_s = None, False, now_s
        self._unreachable_s = None

    def _is_gone(self, why: str | None, *, now_s: float) -> None:
        """Record and log that the broker does not run: it was stopped if `why` is None, else it has crashed."""
        if why is None:
            if not self._stopped:
                self.notify(f"the broker at {self.bootstrap} was stopped; the run waits for its restart (`penstock broker start`)")
            self._down, self._stopped, self._unreachable_s = "the broker was stopped", True, None
        elif self._unreachable_s is None:
            self._unreachable_s = now_s
        elif now_s - self._unreachable_s >= STOP_NOTE_S:
            self._on_exit(why, now_s=now_s, progress=now_s - self._up_s >= restart_policy.HEALTHY_S)
            self.notify(f"{why}; restarting it")

    def _on_exit(self, why: str, *, now_s: float, progress: bool) -> None:
        self._down, self._stopped, self._unreachable_s = why, False, None
        self.exits.append(WorkerExit(at_s=now_s, status=FAILED, progress=progress))

    def _started(self, *, now_s: float) -> None:
        """Apply the result of the thread that starts the broker."""
        if self._refusal is not None:
            self._on_exit(self._refusal, now_s=now_s, progress=False)
            self.notify(f"the broker could not be restarted: {self._refusal}")
            return
        self._down, self._up_s = None, now_s
        self.notify(f"the broker at {self.bootstrap} was restarted")

    def _start(self) -> None:
        """Start the broker; store the reason in `_refusal` if that fails, or if it has another address. The body of a thread."""
        try:
            status = embedded.start()
            self._refusal = None if status.bootstrap == self.bootstrap else f"its address is {status.bootstrap} now, not {self.bootstrap}"
            if status.risk is not None:
                self.notify(status.risk)
        except (BrokerError, OSError) as error:
            self._refusal = str(error)


def connect(bootstrap: str, security: Mapping[str, str], *, notify: Notify, start: bool = True, wait_s: float = 0.0) -> KafkaLog:
    """Connect to a broker, waiting up to `wait_s` for it; `security` overrides the client settings of the environment.

    `embedded` is this machine's own broker, which is started if it does not run, unless `start` is false. Raises `ConfigError`: the address
    or a security setting is malformed. Raises `PenstockError`: no broker can be reached or started.
    """
    settings = credentials(security)
    if bootstrap == "embedded":
        status = embedded.start(progress=notify) if start or embedded.status().running else None
        if status is None:
            raise PenstockError("the broker of this machine is not running; start it with `penstock broker start`")
        bootstrap, settings = status.bootstrap, {}
    try:
        return await_broker(lambda: KafkaLog(bootstrap, security=settings, client_id="penstock"), wait_s, notify=notify)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def serve(
    listener: Listener, *, home: Path, drain_s: float, stop_file: Path | None, notify: Notify, ready: Callable[[embedded.BrokerInfo], None]
) -> None:
    """Run the broker of `home` until a stop is requested; `ready` receives the broker's address.

    SIGTERM and SIGINT end it once no client is connected, at the latest after `drain_s`: workers that are stopped at the same time still
    write. A second signal ends it at once, in order, and so does `stop_file` as soon as it exists.

    Raises `BrokerError` if it cannot be started, or has ended by itself.
    """
    with stop_requested() as stop:
        status = embedded.start(home=home, listener=listener, progress=notify)
        try:
            ready(status)
            if status.risk is not None:
                notify(status.risk)
            ports = (int(status.bootstrap.rpartition(":")[2]), listener.port)
            _await_stop(home, stop, ports=ports, drain_s=drain_s, stop_file=stop_file, notify=notify)
        except KeyboardInterrupt:
            notify("second signal: stopping the broker at once")
        finally:
            embedded.stop(home)


def _await_stop(
    home: Path, stop: threading.Event, *, ports: Collection[int], drain_s: float, stop_file: Path | None, notify: Notify
) -> None:
    """Return once `stop_file` exists, or after a stop request no client is connected or `drain_s` have passed.

    Raises `BrokerError` if the broker has exited.
    """
    limit_s: float | None = None
    while stop_file is None or not stop_file.exists():
        status = embedded.status(home)
        if status.pid is None:
            raise BrokerError(status.ended or "the broker was stopped by `penstock broker stop`")
        if stop.is_set():
            if limit_s is None:
                limit_s = time.monotonic() + drain_s
                notify(f"stop requested: waiting until no client is connected, at most {drain_s:g} s; a second signal stops it at once")
            if time.monotonic() > limit_s or not _clients(status.pid, ports):
                return
        time.sleep(LOOK_EVERY_S)


def _clients(pid: int, ports: Collection[int]) -> int:
    """Number of connections of other processes to these ports of process `pid`."""
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return 0
    own = {connection.laddr for connection in connections}
    return sum(
        connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port in ports and connection.raddr not in own
        for connection in connections
    )
