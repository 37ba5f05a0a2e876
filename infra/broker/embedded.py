"""Starts, locates and stops the embedded broker of a state directory: at most one, whose data outlive it."""

import contextlib
import errno
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.infra.broker import access, process, settings
from penstock.infra.broker.access import Login
from penstock.infra.broker.process import environment, find_java
from penstock.infra.broker.settings import Listener
from penstock.infra.errors import BrokerError
from penstock.infra.paths import state_directory, state_path, writable, write_private

# A broker is ready within 5 s on an idle machine, within 8 s after kill -9; recovery of a large log after a power failure takes longer.
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
_FORMAT_TIMEOUT_S = 60.0
_POLL_S = 0.03
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LEAST_FREE_BYTES = 1 << 20
_NOT_YET = "(kafka.server.ControllerApis)"
FENCE_TIMEOUT_S = 30.0
"""A controller that has not fenced the broker by then is ended."""

_DEAF = (
    sys.executable, "-I", "-S", "-c",
    "import os, signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execvp(sys.argv[1], sys.argv[1:])",
)  # fmt: skip
"""Start of the command of a program that ignores SIGTERM, as a JVM does that finds it ignored at its start."""
_FENCING = "fencing.properties"
_ANY_REGISTRATION = re.compile(r"registration for broker|RegisterBroker|BrokerRegistration", re.IGNORECASE)
_RECORD = re.compile(r"Replayed [^\n]*?(?:RegisterBrokerRecord|BrokerRegistrationChangeRecord)\([^\n]*?fenced=(true|false|-?1)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerInfo:
    """Address, process and files of the broker of a state directory."""

    bootstrap: str
    """host:port, empty before the first start."""
    pid: int | None
    running: bool
    home: Path
    log_file: Path
    started_s: float | None
    """Seconds from the start until the broker served; 0.0 if it ran already, None from `status`."""
    ended: str | None = None
    """One line on why it ended without being stopped; None otherwise."""
    risk: str | None = None
    """One line on the possible cost of its start; None after a start in order, and from `status`."""


class _Files:
    def __init__(self, home: Path) -> None:
        self.home, self.directory = home, home / "broker"
        self.log, self.console = self.directory / "logs" / "broker.log", self.directory / "logs" / "console.log"
        self.pid_file, self.properties = self.directory / "process.json", self.directory / "server.properties"
        self.fencing = self.directory / "fencing.json"
        """The process that fences a killed broker."""
        self.identity = self.directory / "data" / "meta.properties"
        self.orderly = self.directory / "data" / ".kafka_cleanshutdown"
        """Written by a broker that was stopped, after it left its controller; deleted by the next one."""

    def info(self, *, started_s: float | None = None, risk: str | None = None) -> BrokerInfo:
        pid, last_ports = process.running(self.pid_file), access.remembered_ports(self.directory)
        return BrokerInfo(
            bootstrap=f"{settings.HOST}:{last_ports.client}" if last_ports else "",
            pid=pid, running=pid is not None, home=self.home, log_file=self.log, started_s=started_s,
            ended=_why_it_ended(self), risk=risk,
        )  # fmt: skip


def start(
    *, home: Path | None = None, port: int | None = None, listener: Listener | None = None, progress: Callable[[str], None] = lambda _: None
) -> BrokerInfo:
    """Return the broker of `home` (default: the state directory) once it serves; starts it unless it runs. Raises `BrokerError`.

    With `listener` it also serves other machines, must not run yet, and ignores SIGTERM, which a batch system sends to every process.
    """
    files = _Files(state_directory() if home is None else writable(home.absolute()))
    try:
        return _start(files, port, listener, progress)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise BrokerError(_no_space(files)) from error


def _start(files: _Files, port: int | None, listener: Listener | None, progress: Callable[[str], None]) -> BrokerInfo:
    """Start the broker unless it runs; returns once it accepts connections. Raises `BrokerError` if it runs at another port."""
    start_s = time.monotonic()
    files.log.parent.mkdir(parents=True, exist_ok=True)
    access.started.add(files.directory)
    with process.locked(files.directory / "lock", waiting=lambda: progress("waiting for another start or stop of the broker")):
        if (pid := process.running(files.pid_file)) is not None:
            if listener is not None:
                raise BrokerError(f"a broker for {files.home} already runs as process {pid}: stop it first with `penstock broker stop`")
            last_ports = access.remembered_ports(files.directory)
            if last_ports is None or port not in (None, last_ports.client):
                where = f"at port {last_ports.client}" if last_ports else f"as process {pid}, at an unknown port"
                raise BrokerError(f"a broker for {files.home} already runs {where}: stop it first with `penstock broker stop`")
            if _await_ready(files, last_ports.client):
                return files.info(started_s=0.0)
            progress("the broker that ran has just ended")
        process.end(files.fencing, timeout_s=0.0)  # the temporary broker of a start that was killed
        risk = _launch(files, access.choose_ports(files.directory, port, listener), listener, progress)
        return files.info(started_s=time.monotonic() - start_s, risk=risk)


def stop(home: Path | None = None) -> bool:
    """Stop the broker of `home`; returns False if there was none. After `STOP_TIMEOUT_S` it is killed, which loses no data."""
    files = _Files(state_path() if home is None else home.absolute())
    if not files.directory.is_dir():
        return False
    access.started.discard(files.directory)
    with process.locked(files.directory / "lock", waiting=lambda: None):
        process.end(files.fencing, timeout_s=0.0)  # the temporary broker of a start that was killed
        if process.running(files.pid_file) is None:
            files.pid_file.unlink(missing_ok=True)
            return False
        _end(files, timeout_s=STOP_TIMEOUT_S)
        if process.running(files.pid_file) is not None:
            raise BrokerError(f"the broker (process {process.running(files.pid_file)}) did not exit: end this process with kill -9")
    return True


def status(home: Path | None = None) -> BrokerInfo:
    """Return the state of the broker of `home` without starting or stopping it."""
    return _Files(state_path() if home is None else home.absolute()).info()


def topic_bytes() -> dict[str, int]:
    """Return topic -> bytes of its partitions on this machine's disk; {} if no broker has run. Does not start a broker."""
    data, sizes = _Files(state_path()).directory / "data", dict[str, int]()
    for folder in data.glob("*-*"):
        topic = folder.name.rpartition("-")[0]
        with contextlib.suppress(OSError):  # a segment that is deleted meanwhile
            sizes[topic] = sizes.get(topic, 0) + sum(file.stat().st_blocks * 512 for file in folder.iterdir())
    return sizes


def _why_it_ended(files: _Files) -> str | None:
    """Return in one line why the broker exited; None while it runs, or if it was stopped in order."""
    since = process.log_bytes(files.pid_file)
    if since is None or process.running(files.pid_file) is not None:
        return None
    if _is_full(files, since):
        return _no_space(files)
    output = _errors(files, since) or _text(files.console).strip()
    return f"the broker exited: {_last_lines(output)}; see {files.log}" if output else "the broker was killed: its log contains no error"


def _is_full(files: _Files, since: int) -> bool:
    """Return True if the broker exited for lack of disk space, which a full disk may have prevented it from logging."""
    return bool(re.search(r"No space left on device|Disk quota exceeded", _text(files.log, since=since))) or (
        files.directory.exists() and shutil.disk_usage(files.directory).free < _LEAST_FREE_BYTES
    )


def _no_space(files: _Files) -> str:
    return f"the broker's disk is full ({files.directory}): free some space, then start again. No acknowledged record is lost"


def _end(files: _Files, *, timeout_s: float) -> None:
    process.end(files.pid_file, timeout_s=timeout_s)
    shutil.rmtree(files.directory / "tmp", ignore_errors=True)


def _launch(files: _Files, chosen: access.Ports, listener: Listener | None, progress: Callable[[str], None]) -> str | None:
    """Start the broker and wait until it serves; return a warning about records that may be blocked, or None. Raises `BrokerError`."""
    java, class_path = find_java(), process.class_path(progress=progress)
    shutil.rmtree(files.directory / "tmp", ignore_errors=True)
    (files.directory / "tmp").mkdir()
    (files.directory / "log4j2.properties").write_text(settings.LOG4J)
    deaf = () if listener is None else _DEAF
    run = [*deaf, str(java.program), *settings.JVM, *(settings.JVM_FROM_22 if java.major >= 22 else ()), "-cp", class_path]
    fresh = not files.identity.exists()
    if fresh:
        progress("preparing the broker's storage")
        _format(files, chosen, run)
    _write_properties(files, chosen, data="data", listener=listener)
    progress("starting the broker")
    killed, risk = not fresh and not files.orderly.exists(), None
    if killed and not any(_fence_predecessor(files, chosen, run) for _ in range(2)):
        risk = (
            "the previous broker was killed before its open transactions could be closed: an acknowledged one may lack its commit marker; "
            "`penstock topics unblock RUN` finds and repairs it"
        )
        progress(risk)
    since = _size(files.log)
    if _run(files, chosen, run, since):
        return risk
    if _is_full(files, since):
        raise BrokerError(_no_space(files))
    raise BrokerError(f"the broker exited during startup: {_errors(files, since) or _last_lines(_text(files.console))}; see {files.log}")


def _run(files: _Files, chosen: access.Ports, java: list[str], since: int) -> bool:
    """Start Kafka's process; return True once it serves, False if it exits first."""
    command = [*java, "kafka.Kafka", "server.properties"]
    process.spawn(command, directory=files.directory, output=files.console, pid_file=files.pid_file, log_bytes=since)
    ready = False
    try:
        ready = _await_ready(files, chosen.client)
    finally:
        if not ready:  # also after Ctrl-C: a broker whose start was not reported must not stay behind
            _end(files, timeout_s=2.0)
    return ready


def _fence_predecessor(files: _Files, chosen: access.Ports, java: list[str]) -> bool:
    """Run the controller alone until it has fenced the killed broker; returns False if it did not.

    A broker must not start on metadata in which it already leads its partitions. It takes over the transactions of its predecessor, cannot
    write their commit markers because it is not in service yet, and finds its partitions without a leader while the controller fences the
    predecessor. Kafka 4.3.1 takes these partitions for deleted, skips the markers and marks the transaction as complete: readers wait for
    ever, and a later transaction may commit aborted records.
    """
    text = settings.fencing_properties(controller_port=chosen.controller, data="data", password=secrets.token_urlsafe())
    write_private(files.directory / _FENCING, text)
    since, deadline = _size(files.log), time.monotonic() + FENCE_TIMEOUT_S
    process.spawn([*java, "kafka.Kafka", _FENCING], directory=files.directory, output=files.console, pid_file=files.fencing)

    def becomes_true(condition: Callable[[], bool]) -> bool:
        while not condition():
            if process.running(files.fencing) is None or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    try:
        if not becomes_true(lambda: is_fenced(_text(files.log, since=since))):
            return False
        # The controller logs this before it writes the record; records are written in order, and another one follows soon.
        before = _newest(files.directory)
        return becomes_true(lambda: _newest(files.directory) > before)
    finally:
        process.end(files.fencing, timeout_s=0.0)  # it has no work to finish


def is_fenced(text: str) -> bool:
    """Return True if a controller with this log is active and every broker in it is fenced.

    Example:
        is_fenced("Performing controller activation.\nReplayed BrokerRegistrationChangeRecord(brokerId=1, fenced=1)")  # -> True
    """
    records = _RECORD.findall(text)
    if "Performing controller activation" not in text or "Replayed " not in text:
        return False
    if not records:  # no broker has ever been in service, or this Kafka logs it in other words
        return _ANY_REGISTRATION.search(text) is None
    return records[-1] in ("true", "1")


def _newest(directory: Path) -> tuple[str, int]:
    """Return name and size of the newest segment of the controller's metadata log: it grows, or another one follows."""
    segments = sorted((directory / "data" / "__cluster_metadata-0").glob("*.log"))
    return (segments[-1].name, segments[-1].stat().st_size) if segments else ("", 0)


def _write_properties(files: _Files, chosen: access.Ports, *, data: str, listener: Listener | None = None) -> None:
    text = settings.server_properties(
        port=chosen.client, controller_port=chosen.controller, data=data, password=secrets.token_urlsafe(), listener=listener
    )
    write_private(files.properties, text)


def _format(files: _Files, chosen: access.Ports, java: list[str]) -> None:
    """Create the storage under another name and rename it, so that an interrupted start leaves no incomplete one."""
    data, unfinished = files.directory / "data", files.directory / "data.unfinished"
    if data.exists():
        raise BrokerError(f"{data} is not a broker's storage (no meta.properties): move it away, or set PENSTOCK_HOME to another directory")
    shutil.rmtree(unfinished, ignore_errors=True)
    _write_properties(files, chosen, data=unfinished.name)
    tool = ["kafka.tools.StorageTool", "format", "--standalone", "--config", "server.properties", "--cluster-id", access.new_cluster_id()]
    done = subprocess.run(
        [*java, *tool],
        cwd=files.directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_FORMAT_TIMEOUT_S, check=False, umask=0o077,
        env=environment(),
    )  # fmt: skip
    if done.returncode:
        raise BrokerError(f"cannot format the broker's storage in {data}: {_last_lines(done.stdout + done.stderr)}")
    unfinished.rename(data)


def _await_ready(files: _Files, port: int) -> bool:
    """Return True once the broker responds with this storage's cluster id, False if it exits first."""
    cluster_id = re.search(r"^cluster\.id=(\S+)$", files.identity.read_text(), re.MULTILINE)
    deadline = time.monotonic() + READY_TIMEOUT_S
    while cluster_id is None or _cluster_id(files, port) != cluster_id[1]:
        if process.running(files.pid_file) is None:
            return False
        if time.monotonic() > deadline:
            raise BrokerError(f"the broker does not respond at {settings.HOST}:{port} after {READY_TIMEOUT_S:.0f} s: see {files.log}")
        time.sleep(_POLL_S)
    return True


def _cluster_id(files: _Files, port: int) -> str | None:
    """Return the cluster id of the broker at this port, None while it does not respond; gives its password to a broker without it."""
    own = settings.own_password(_text(files.properties))
    user = access.read_login(files.directory) if own is None else access.ensure_login(files.directory)
    try:
        return access.cluster_id(settings.HOST, port, timeout_s=2.0, login=user)
    except access.Refused:
        if own is None:
            raise BrokerError("the running broker requires no password: stop it with `penstock broker stop`, then start it again") from None
        # Another program at the port must not get this password: the log proves that the port is the running broker's.
        if user is not None and _listens(files, port):
            access.set_password(settings.HOST, port, user, by=Login(settings.OWN_USER, own), timeout_s=2.0)
        return None


def _listens(files: _Files, port: int) -> bool:
    """Return True if the running broker has logged that it listens at this port. Raises `BrokerError` if that line may be deleted."""
    since = process.log_bytes(files.pid_file)
    if since is None:
        return False
    started, changed = files.pid_file.stat().st_mtime, {file: file.stat().st_mtime for file in files.log.parent.glob(f"{files.log.name}.*")}
    rotated = sorted((file for file in changed if changed[file] >= started), key=changed.__getitem__)  # since the start
    for file in (*rotated, files.log):
        if f"connections on {settings.HOST}:{port}" in _text(file, since=since):
            return True
        since = 0
    if rotated:
        raise BrokerError(
            f"the broker rejects the password in {files.directory / access.LOGIN_FILE}, and cannot accept it while it runs, because its "
            "log has been rotated: stop the broker with `penstock broker stop`, then start it again"
        )
    return False


def _errors(files: _Files, since: int) -> str:
    """Return the last two errors and the last exception in the broker's log after byte `since`; empty if there are none."""
    text = _text(files.log, since=since)
    # At most starts a controller gets a request before it is active and logs that as an error.
    errors = [line for line in re.findall(r"^\[[^\]]*\] (?:ERROR|FATAL) (.*)$", text, re.MULTILINE) if _NOT_YET not in line]
    causes = re.findall(r"^(?:Caused by: )?[\w.$]+(?:Exception|Error): .*$", text, re.MULTILINE)
    return _last_lines("\n".join(errors[-2:] + causes[-1:])) if errors else ""


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()][-3:]
    return " | ".join(lines)[-500:] or "without output"


def _text(path: Path, *, since: int = 0) -> str:
    """Return the text of a file from byte `since` on, all of it if it is shorter (rotated), empty if it is missing."""
    try:
        with path.open("rb") as file:
            file.seek(since if since <= _size(path) else 0)  # smaller than before: it was rotated
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
