"""Checks that a Kafka broker serves: it answers a metadata request with itself among the live brokers.

An accepted connection is not enough: the socket is open a second before the broker may be used.
"""

import hashlib
import secrets
import struct

from penstock.infra.broker.login import Login
from penstock.infra.broker.session import Session, read_string

_METADATA, _ALTER_SCRAM_CREDENTIALS = (3, 2), (51, 0)
_SHA_256, _ITERATIONS = 1, 4096
_UNREADABLE = (OSError, struct.error, UnicodeDecodeError, ValueError, KeyError)


def cluster_id(host: str, port: int, *, timeout_s: float, login: Login | None = None) -> str | None:
    """Return the cluster id of the broker at this address, or None while none serves there. Raises `Refused`."""
    try:
        with Session(host, port, timeout_s=timeout_s) as session:
            if login is not None:
                session.log_in(login)
            return _cluster_id(session.request(_METADATA, struct.pack(">i", 0)))
    except _UNREADABLE:
        return None


def set_password(host: str, port: int, login: Login, *, by: Login, timeout_s: float) -> None:
    """Have the broker accept `login`, as the user `by` that its properties name; no effect while it does not serve. Raises `Refused`."""
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", login.password.encode(), salt, _ITERATIONS)
    # Kafka protocol guide, AlterUserScramCredentials version 0: no deletions, one upsertion, tagged fields empty.
    upsertion = _compact(login.user.encode()) + struct.pack(">bi", _SHA_256, _ITERATIONS) + _compact(salt) + _compact(salted) + b"\0"
    try:
        with Session(host, port, timeout_s=timeout_s) as session:
            session.log_in_plainly(by)
            session.request(_ALTER_SCRAM_CREDENTIALS, b"\1\2" + upsertion + b"\0", flexible=True)
    except _UNREADABLE:
        return


def _compact(text: bytes) -> bytes:
    """A compact string or byte array of less than 127 bytes."""
    return bytes([len(text) + 1]) + text


def _cluster_id(response: bytes) -> str | None:
    (brokers,) = struct.unpack_from(">i", response)
    if brokers < 1:
        return None
    at = 4
    for _ in range(brokers):  # node id, host, port, rack
        _, at = read_string(response, at + 4)
        _, at = read_string(response, at + 4)
    return read_string(response, at)[0]
