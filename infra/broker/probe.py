"""Checks that the embedded broker serves, and sets its password, by single requests of Kafka's protocol.

A broker serves if it responds to a metadata request with itself among the live brokers. An accepted connection is not enough: the socket is
open a second before the broker can be used.
"""

import hashlib
import secrets
import socket
import struct
from types import TracebackType
from typing import Self

from penstock.infra.broker.login import MECHANISM, Login

_SASL_HANDSHAKE, _SASL_AUTHENTICATE = (17, 1), (36, 0)
_CLIENT, _CORRELATION = b"penstock-probe", 1
_LARGEST_RESPONSE = 1 << 20
_METADATA, _ALTER_SCRAM_CREDENTIALS = (3, 2), (51, 0)
_SHA_256, _ITERATIONS = 1, 4096
_UNREADABLE = (OSError, struct.error, UnicodeDecodeError, ValueError, KeyError)


class Refused(Exception):
    """The broker does not accept the login."""


class Session:
    """One connection. Raises `OSError` or `struct.error` if no Kafka broker responds in time."""

    def __init__(self, host: str, port: int, *, timeout_s: float) -> None:
        self._socket = socket.create_connection((host, port), timeout=timeout_s)
        self._socket.settimeout(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close()

    def request(self, api: tuple[int, int], body: bytes, *, flexible: bool = False) -> bytes:
        """Send a request of (API key, version) and return the body of the response. `flexible`: headers with tagged fields."""
        tags = b"\0" if flexible else b""
        message = struct.pack(">hhih", *api, _CORRELATION, len(_CLIENT)) + _CLIENT + tags + body
        self._socket.sendall(struct.pack(">i", len(message)) + message)
        (size,) = struct.unpack(">i", self._read(4))
        if not 4 <= size <= _LARGEST_RESPONSE:
            raise ConnectionError("the response is not Kafka's")
        response = self._read(size)
        if struct.unpack_from(">i", response)[0] != _CORRELATION:
            raise ConnectionError("the response belongs to another request")
        return response[4 + len(tags) :]

    def log_in(self, login: Login) -> None:
        """Authenticate by SCRAM (RFC 5802), which never sends the password: another program at the port learns nothing.

        Raises `Refused`, or `ValueError` if the server does not have the password.
        """
        from kafka.net.sasl.scram import ScramClient  # a broker without a password does not need the client library

        client = ScramClient(login.user, login.password, MECHANISM)
        client.process_server_first_message(self._authenticate(MECHANISM, client.first_message()))
        client.process_server_final_message(self._continue(client.final_message()))

    def log_in_plainly(self, login: Login) -> None:
        """Authenticate by PLAIN, which sends the password: only at a port that is certainly the broker's. Raises `Refused`."""
        self._authenticate("PLAIN", f"\0{login.user}\0{login.password}".encode())

    def _authenticate(self, mechanism: str, message: bytes) -> bytes:
        (error,) = struct.unpack_from(">h", self.request(_SASL_HANDSHAKE, _string(mechanism.encode())))
        if error:
            raise Refused
        return self._continue(message)

    def _continue(self, message: bytes) -> bytes:
        response = self.request(_SASL_AUTHENTICATE, struct.pack(">i", len(message)) + message)
        (error,) = struct.unpack_from(">h", response)
        if error:
            raise Refused
        _, at = read_string(response, 2)
        (size,) = struct.unpack_from(">i", response, at)
        return response[at + 4 : at + 4 + size]

    def _read(self, size: int) -> bytes:
        parts = b""
        while len(parts) < size:
            part = self._socket.recv(size - len(parts))
            if not part:
                raise ConnectionError
            parts += part
        return parts


def cluster_id(host: str, port: int, *, timeout_s: float, login: Login | None = None) -> str | None:
    """Return the cluster id of the broker at this address, None while none serves there. Raises `Refused`."""
    try:
        with Session(host, port, timeout_s=timeout_s) as session:
            if login is not None:
                session.log_in(login)
            return _cluster_id(session.request(_METADATA, struct.pack(">i", 0)))
    except _UNREADABLE:
        return None


def set_password(host: str, port: int, login: Login, *, by: Login, timeout_s: float) -> None:
    """Let the broker accept `login`, as its own user `by`; without effect while it does not serve. Raises `Refused`."""
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


def read_string(response: bytes, at: int) -> tuple[str | None, int]:
    """The nullable string at this index, and the index after it."""
    (size,) = struct.unpack_from(">h", response, at)
    if size < 0:
        return None, at + 2
    return response[at + 2 : at + 2 + size].decode(), at + 2 + size


def _string(text: bytes) -> bytes:
    return struct.pack(">h", len(text)) + text
