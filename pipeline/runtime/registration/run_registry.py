"""The register of runs: the compacted topic `penstock.runs` with the status of each, and each run's own `<run>.run` with its record.

A broker address and a run id are all that a worker needs; its configuration comes from the run's own topic, where records signed by the
run's key take precedence, and never from `penstock.runs`.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.infra.errors import ConfigError, RunNotFound
from penstock.infra.log import Log
from penstock.infra.paths import run_directory, state_directory, state_path
from penstock.pipeline.config.plugins import nearest
from penstock.pipeline.runtime.topic_reader import scan
from penstock.topics import runs as topic
from penstock.topics.catalogue import RUNS_TOPIC, check_run_id, topic_name
from penstock.topics.runs import RunRecord
from penstock.topics.wire.errors import NewerSchema, Unusable
from penstock.topics.wire.record import Outgoing
from penstock.topics.wire.secrets import without_passwords

KEY_FILE = "run.key"
"""Name of the key file in the run's folder of the state directory."""
KEY_BYTES = 32
MODES = (0o400, 0o440, 0o600)
"""Permissions of a key that `--run-key` names: no other user may change it or, unless its group is set up for that, read it."""


def key_path(run: str) -> Path:
    """Path of the run's key in this state directory."""
    return run_directory(run) / KEY_FILE


def make_key(run: str) -> bytes:
    """Return the run's key from the state directory, created if missing. Raises `ConfigError` if the existing file is no valid key."""
    state_directory()
    path = key_path(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{KEY_FILE}.{secrets.token_hex(4)}")
    part.touch(mode=0o600)
    part.write_text(secrets.token_hex(KEY_BYTES) + "\n", encoding="ascii")
    with contextlib.suppress(FileExistsError):
        os.link(part, path)  # complete or absent, also if two processes make it
    part.unlink()
    return read_key(path)


def key_of(run: str, file: Path | None = None) -> bytes | None:
    """Return the run's key from `file`, else from this user's file in the state directory; None if there is none. Raises `ConfigError`."""
    if file is not None:
        return read_key(file)
    path = key_path(run)
    try:
        status = path.lstat()
    except OSError:
        return None
    # In a state directory that several users share, a key of another user is not ours.
    return read_key(path) if status.st_uid == os.geteuid() else None


def read_key(file: Path) -> bytes:
    """Read a key file. Raises `ConfigError` if other users may read or change it, or if it does not contain a key."""
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        text = file.read_text(encoding="ascii").strip() if mode in MODES else ""
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot read the run's key: {getattr(error, 'strerror', None) or error}") from error
    if mode not in MODES:
        raise ConfigError(f"{file} has mode {mode:04o}, a run's key needs 0600, 0400 or 0440; chmod 600 it if no other user has read it")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{file} does not contain a run's key ({2 * KEY_BYTES} hexadecimal digits); copy runs/RUN/{KEY_FILE} again")
    return key


def signed(record: RunRecord, key: bytes, *, revision: int) -> RunRecord:
    """Sign a record with the run's key, as revision number `revision`."""
    numbered = replace(record, config=without_passwords(record.config), revision=revision)
    return replace(numbered, mac=_mac(numbered, key))


def fits(record: RunRecord, key: bytes) -> bool:
    """True if the record was signed with the key."""
    return record.mac is not None and record.revision is not None and hmac.compare_digest(record.mac.encode(), _mac(record, key).encode())


def newest(records: Iterable[RunRecord], key: bytes) -> RunRecord | None:
    """The record with the highest revision that the key has signed, independent of their order; None if there is none."""
    return max((record for record in records if fits(record, key)), key=lambda record: (record.revision, record.mac), default=None)


def _mac(record: RunRecord, key: bytes) -> str:
    """HMAC-SHA-256 (hex) of the parts of a record that its signature covers: all but the status."""
    parts = (record.run, str(record.revision), str(record.created_ns), record.config, record.info)
    text = b"".join(b"%d:%b" % (len(part), part) for part in (part.encode("utf-8", "surrogatepass") for part in parts))
    return hmac.new(key, b"penstock run/1 " + text, hashlib.sha256).hexdigest()


LOCK = "launcher.lock"
"""Name of the lock file in the folder of a run, which its launcher holds."""
CLOCK_S = 60.0
"""The clock of a file system or of another machine may be ahead by so much."""


def own_runs() -> list[str]:
    """This user's runs on this machine, the newest last: those whose folder contains the run's key or its launcher's lock.

    Dates in the future are ignored.
    """
    limit_s = time.time() + CLOCK_S
    dates = {folder.name: date_s for folder in (state_path() / "runs").glob("*") if (date_s := _date_s(folder)) is not None}
    return sorted((name for name, date_s in dates.items() if date_s <= limit_s), key=lambda name: dates[name])


def _date_s(folder: Path) -> float | None:
    """Time at which this user created the run, or started it if it has no key; None for any other folder."""
    if folder.is_symlink():
        return None
    for name in (KEY_FILE, LOCK):
        try:
            status = (folder / name).lstat()
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            return status.st_mtime
    return None


WRITE_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A run as the log describes it, and whether the run's key signed that."""

    run: str
    record: RunRecord | None
    """Configuration and newest status; None if the run is not registered."""
    own: bool
    """True if the run's own topic has the configuration."""
    keyed: bool
    """True if the run's key is on this machine."""
    signed: bool
    """True if the run's key, which is on this machine, signed the configuration."""
    ignored: tuple[int, ...] = ()
    """Offsets in the run's own topic of records that do not fit the key."""


def write(log: Log, record: RunRecord) -> None:
    """Write a run's definition, signed if its key is on this machine, and then its status.

    Raises `ConfigError` if others have signed the run and the key is not here.
    """
    _append(log, topic_name(record.run, "run"), _signed(log, record))
    write_status(log, record)


def write_status(log: Log, record: RunRecord) -> None:
    _append(log, RUNS_TOPIC, topic.status_of(record))


def _signed(log: Log, record: RunRecord) -> RunRecord:
    """Sign a record as the next revision; without a key, return it unchanged."""
    key, earlier = key_of(record.run), [made for _, made in _own(log, record.run)]
    if key is not None:
        last = newest(earlier, key)
        return signed(record, key, revision=1 if last is None else (last.revision or 0) + 1)
    if any(made.mac is not None for made in earlier):
        raise ConfigError(
            f"run {record.run}: changing the configuration needs the run's key, missing on this machine: copy runs/{record.run}/{KEY_FILE} "
            "from the machine that created the run, or resume the run there"
        )
    return replace(record, revision=None, mac=None)


def _append(log: Log, name: str, record: RunRecord) -> None:
    """Write a record to the topic with this Kafka name. Raises `LogError` unless it is acknowledged within `WRITE_LIMIT_S`."""
    with contextlib.closing(log.producer()) as producer:
        value = topic.encode(record)
        headers = topic.headers(record).encode(value)
        producer.send(Outgoing(topic=name, partition=0, key=record.run.encode(), headers=headers, value=value)).offset(WRITE_LIMIT_S)


def set_status(log: Log, record: RunRecord, *, status: topic.Status) -> RunRecord:
    """Write a run with another status, and the current time, to the register; return that record."""
    changed = replace(record, status=status, updated_ns=time.time_ns())
    write_status(log, changed)
    return changed


def all_runs(log: Log, *, refused: Callable[[str], None] = lambda _: None) -> list[RunRecord]:
    """Status of every registered run, oldest first; unusable records are skipped, and `refused` receives the reasons."""
    states: dict[str, RunRecord] = {}
    for record in scan(log, RUNS_TOPIC):
        key = (record.key or b"").decode("ascii", "replace")
        if not record.value:  # the run was deleted
            states.pop(key, None)
            continue
        try:
            state = topic.read(record, run=key)[1]
        except (Unusable, NewerSchema) as error:  # of a newer release: another run's, which is no reason to stop
            refused(f"{RUNS_TOPIC}/{record.partition}/{record.offset}: {error}")
            continue
        states[key] = state  # the last one counts, as for compaction: the clocks of machines differ
    return sorted(states.values(), key=lambda run: run.created_ns)


def find(log: Log, run: str) -> RunRecord | None:
    """Record of a run with its newest status, for a process that executes nothing of it; None if the run is not registered."""
    return registration(log, run).record


def registration(log: Log, run: str, *, key_file: Path | None = None) -> Registration:
    """Record of a run, its newest status, and whether the run's key signed it. Raises `ConfigError` for an unusable key.

    `key_file` has the run's key if the state directory has none.
    """
    key, status = key_of(run, key_file), next((state for state in all_runs(log) if state.run == run), None)
    made = [] if status is None else _own(log, run)  # the topics of a run that was deleted may be about to go
    fitting = None if key is None else newest((record for _, record in made), key)
    record = fitting or (made[-1][1] if made else None)
    foreign = [offset for offset, other in made if key is not None and newest([other], key) is None]
    return Registration(
        run=run,
        record=topic.with_status(record, status) if record is not None and status is not None else status,
        own=record is not None,
        keyed=key is not None,
        signed=fitting is not None,
        ignored=tuple(foreign),
    )


def _own(log: Log, run: str) -> list[tuple[int, RunRecord]]:
    """(offset, record) of the usable records in the run's own topic, signed or not."""
    made = []
    for record in scan(log, topic_name(run, "run")):
        with contextlib.suppress(Unusable):
            made.append((record.offset, topic.read(record, run=run)[1]))
    return made


def usable(run: str, source: str = "") -> str:
    """Return the id of a new run. Raises `ConfigError`, which starts with `source`, if no topic can have it as prefix."""
    try:
        return check_run_id(run)
    except ValueError as error:
        raise ConfigError(f"{source}{error}") from error


def resolve(log: Log, text: str, *, executes: bool = False) -> str:
    """Find a run's id by id, unique prefix or `latest`. Raises `ConfigError`.

    `latest` is the newest run on the broker; with `executes`, for a command that executes, changes or deletes something of the run, this
    user's newest run on this machine, so that a run that others have registered is not meant. Dates in the future are ignored.
    """
    runs = all_runs(log)
    names = [record.run for record in runs]
    if not names:
        raise ConfigError("no run is registered on this broker; start one with `penstock run CONFIG`")
    if text == "latest":
        return _latest(runs, executes=executes)
    if text in names:
        return text
    matches = [name for name in names if name.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"run {text!r} is ambiguous: {', '.join(matches[:5])}")
    raise RunNotFound(text, nearest(text, names))


def _latest(runs: list[RunRecord], *, executes: bool) -> str:
    """The run that `latest` means. Raises `ConfigError` if there is none."""
    if not executes:
        limit_ns = time.time_ns() + int(CLOCK_S * 1e9)
        return ([run for run in runs if run.created_ns <= limit_ns] or runs[:1])[-1].run
    names = {record.run for record in runs}
    own = [name for name in own_runs() if name in names]
    if not own:
        raise ConfigError("latest: this user has created no run from this machine on this broker; pass a run id, see `penstock runs`")
    return own[-1]
