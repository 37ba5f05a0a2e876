"""Fences a killed broker before its successor starts, by running the controller alone for a moment.

A broker must not start on metadata in which it already leads its partitions. The restarted broker takes over the transactions of its
predecessor, cannot write their commit markers because it is not in service yet, and finds its partitions without a leader while the
controller fences the predecessor. Kafka 4.3.1 takes these partitions for deleted, skips the markers and marks the transaction as complete:
readers wait for ever, and a later transaction may commit aborted records.
"""

import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from penstock.infra.broker import process, settings
from penstock.infra.broker.ports import Ports
from penstock.infra.paths import write_private

LIMIT_S = 30.0
"""A controller that has not fenced the broker by then is ended."""

_PROPERTIES = "fencing.properties"
_PROCESS = "fencing.json"
_POLL_S = 0.03
_ANY_REGISTRATION = re.compile(r"registration for broker|RegisterBroker|BrokerRegistration", re.IGNORECASE)
_RECORD = re.compile(r"Replayed [^\n]*?(?:RegisterBrokerRecord|BrokerRegistrationChangeRecord)\([^\n]*?fenced=(true|false|-?1)\b")


def fence_predecessor(directory: Path, ports: Ports, java: list[str], *, log: Path) -> bool:
    """Run the controller of the broker in `directory` until it has fenced the killed broker; returns False if it did not."""
    text = settings.fencing_properties(controller_port=ports.controller, data="data", password=secrets.token_urlsafe())
    write_private(directory / _PROPERTIES, text)
    since = log.stat().st_size if log.exists() else 0
    command = [*java, "kafka.Kafka", _PROPERTIES]
    process.spawn(command, directory=directory, output=directory / "logs" / "console.log", pid_file=directory / _PROCESS)
    deadline = time.monotonic() + LIMIT_S

    def becomes_true(condition: Callable[[], bool]) -> bool:
        while not condition():
            if process.running(directory / _PROCESS) is None or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    try:
        if not becomes_true(lambda: is_fenced(_after(log, since))):
            return False
        # The controller logs this before it writes the record; records are written in order, and another one follows soon.
        before = _newest(directory)
        return becomes_true(lambda: _newest(directory) > before)
    finally:
        end(directory)


def end(directory: Path) -> None:
    """End the controller, also one left by a killed start; it has no work to finish."""
    process.end(directory / _PROCESS, timeout_s=0.0)


def is_fenced(text: str) -> bool:
    """True if a controller with this log is active and every broker in it is fenced.

    Example:
        is_struck_off("Performing controller activation.\\nReplayed BrokerRegistrationChangeRecord(brokerId=1, fenced=1)")  # -> True
    """
    records = _RECORD.findall(text)
    if "Performing controller activation" not in text or "Replayed " not in text:
        return False
    if not records:  # no broker has ever been in service, or this Kafka logs it in other words
        return _ANY_REGISTRATION.search(text) is None
    return records[-1] in ("true", "1")


def _newest(directory: Path) -> tuple[str, int]:
    """Name and size of the newest segment of the controller's metadata log: it grows, or another one follows."""
    segments = sorted((directory / "data" / "__cluster_metadata-0").glob("*.log"))
    return (segments[-1].name, segments[-1].stat().st_size) if segments else ("", 0)


def _after(log: Path, since: int) -> str:
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(since if since <= size else 0)  # smaller than before: it was rotated
            return file.read().decode(errors="replace")
    except OSError:
        return ""
