"""Connects to a run's broker, and restarts the embedded broker when it crashes.

Every command connects here, so nothing of workers or models is imported. A broker that was stopped on purpose stays stopped.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.infra.broker import embedded
from penstock.infra.errors import BrokerError, ConfigError, PenstockError
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.config.security import credentials
from penstock.pipeline.launch import restart_policy
from penstock.pipeline.launch.restart_policy import Rules, WorkerExit
from penstock.pipeline.runtime.exit_status import FAILED

STOP_NOTE_S = 0.2
"""While the embedded broker is being stopped its pid file remains for some milliseconds: it looks crashed."""

Notify = Callable[[str], None]


@dataclass(slots=True)
class BrokerKeeper:
    """Supervises the embedded broker at `bootstrap` and leaves any other broker alone; its owner calls `check` in a loop."""

    bootstrap: str
    rules: Rules
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
        """Restart the broker if it has crashed. Returns the reason once the restart limit is reached."""
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
        if self._down is not None:  # another process has started it
            self.notify(f"the broker at {self.bootstrap} runs again")
            self._down, self._stopped, self._up_s = None, False, now_s
        self._unreachable_s = None

    def _is_gone(self, why: str | None, *, now_s: float) -> None:
        if why is None:
            if not self._stopped:
                self.notify(f"the broker at {self.bootstrap} was stopped; its run waits for it (`penstock broker start`)")
            self._down, self._stopped, self._unreachable_s = "the broker was stopped", True, None
        elif self._unreachable_s is None:
            self._unreachable_s = now_s
        elif now_s - self._unreachable_s >= STOP_NOTE_S:
            self._on_exit(why, now_s=now_s, progress=now_s - self._up_s >= restart_policy.HEALTHY_S)
            self.notify(f"{why}; it is started again")

    def _on_exit(self, why: str, *, now_s: float, progress: bool) -> None:
        self._down, self._stopped, self._unreachable_s = why, False, None
        self.exits.append(WorkerExit(at_s=now_s, status=FAILED, progress=progress))

    def _started(self, *, now_s: float) -> None:
        """Apply the result of the starting thread."""
        if self._refusal is not None:
            self._on_exit(self._refusal, now_s=now_s, progress=False)
            self.notify(f"the broker could not be started again: {self._refusal}")
            return
        self._down, self._up_s = None, now_s
        self.notify(f"the broker at {self.bootstrap} serves again")

    def _start(self) -> None:
        try:
            status = embedded.start()
            self._refusal = None if status.bootstrap == self.bootstrap else f"it is at {status.bootstrap} now, not at {self.bootstrap}"
            if status.risk is not None:
                self.notify(status.risk)
        except (BrokerError, OSError) as error:
            self._refusal = str(error)


def connect(bootstrap: str, security: Mapping[str, str], *, notify: Notify, start: bool = True) -> KafkaLog:
    """Connect to a broker; these client settings override those of the environment.

    `embedded` is this machine's own broker, which is started if it does not run, unless `start` is false.

    Raises:
        ConfigError: the address or a security setting is malformed.
        PenstockError: no broker can be reached or started.
    """
    settings = credentials(security)
    if bootstrap == "embedded":
        status = embedded.start(progress=notify) if start or embedded.status().running else None
        if status is None:
            raise PenstockError("the broker of this machine does not run; start it: `penstock broker start`")
        bootstrap, settings = status.bootstrap, {}
    try:
        return KafkaLog(bootstrap, security=settings, client_id="penstock")
    except ValueError as error:
        raise ConfigError(str(error)) from error
