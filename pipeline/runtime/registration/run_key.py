"""The key of a run, 32 random bytes in a file of its owner, and the records of `<run>.run` that fit it.

Invariant: a record that was made without the key never configures a process that has the key, in any order of records.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from penstock.infra.errors import ConfigError
from penstock.infra.paths import run_directory, state_directory
from penstock.topics.runs import RunRecord
from penstock.topics.wire.secrets import without_passwords

KEY_FILE = "run.key"
"""In the run's folder of the state directory."""
KEY_BYTES = 32
MODES = (0o400, 0o440, 0o600)
"""Permissions of a key that `--run-key` names: no other user may change it or, unless its group is set up for that, read it."""


def key_path(run: str) -> Path:
    """Path of the run's key in this state directory."""
    return run_directory(run) / KEY_FILE


def make_key(run: str) -> bytes:
    """The run's key in the state directory, created if missing. Raises `ConfigError` if the existing file is not a key of this user."""
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
    """The key in `file`, or this user's in the state directory; None if there is none. Raises `ConfigError`."""
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
    parts = (record.run, str(record.revision), str(record.created_ns), record.config, record.info)
    text = b"".join(b"%d:%b" % (len(part), part) for part in (part.encode("utf-8", "surrogatepass") for part in parts))
    return hmac.new(key, b"penstock run/1 " + text, hashlib.sha256).hexdigest()
