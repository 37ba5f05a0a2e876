"""Checks that a Kafka broker serves: it answers a metadata request with itself among the live brokers.

An accepted connection is not enough: the socket is open a second before the broker may be used.
"""

import base64
import hashlib
import hmac
import secrets
import socket
import struct
from types import TracebackType
from typing import Self

from penstock.infra.broker.login import MECHANISM, Login

_SASL_HANDSHAKE, _SASL_AUTHENTICATE = (17, 1), (36, 0)
_CLIENT, _CORRELATION = b"penstock-probe", 1
_LARGEST_RESPONSE, _MOST_ITERATIONS = 1 << 20, 1 << 16
_METADATA, _ALTER_SCRAM_CREDENTIALS = (3, 2), (51, 0)
_SHA_256, _ITERATIONS = 1, 4096
_UNREADABLE = (OSError, struct.error, UnicodeDecodeError, ValueError, KeyError)


class Refused(Exception):
    """The broker does not accept the login."""


class Session:
    """One connection; raises `OSError` or `struct.error` if no Kafka broker responds in time."""

    def __init__(self, host: str, port: int, *, timeout_s: float) -> None:
        self._socket = socket.create_connection((host, port), timeout=timeout_s)
        self._socket.settimeout(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close()

    def request(self, api: tuple[int, int], body: bytes, *, flexible: bool = False) -> bytes:
        """Send a request of (API key, version); returns the body of the response. `flexible`: headers with tagged fields."""
        tags = b"\0" if flexible else b""
        message = struct.pack(">hhih", *api, _CORRELATION, len(_CLIENT)) + _CLIENT + tags + body
        self._socket.sendall(struct.pack(">i", len(message)) + message)
        (size,) = struct.unpack(">i", self._read(4))
        if not 4 <= size <= _LARGEST_RESPONSE:
            raise ConnectionError("the response is not Kafka's")
        response = self._read(size)
        if struct.unpack_from(">i", response)[0] != _CORRELATION:
            raise ConnectionError("the response is of another request")
        return response[4 + len(tags) :]

    def log_in(self, login: Login) -> None:
        """Authenticate by SCRAM. Raises `Refused`."""
        nonce = secrets.token_hex(16)
        bare = f"n={login.user},r={nonce}"
        first = self._authenticate(MECHANISM, f"n,,{bare}".encode()).decode()
        fields = dict(field.split("=", 1) for field in first.split(",") if "=" in field)
        iterations = int(fields["i"])
        if not fields["r"].startswith(nonce) or not 0 < iterations <= _MOST_ITERATIONS:
            raise ConnectionError("the response is not of this exchange")
        salted = hashlib.pbkdf2_hmac("sha256", login.password.encode(), base64.b64decode(fields["s"]), iterations)
        client_key, server_key = _hmac(salted, b"Client Key"), _hmac(salted, b"Server Key")
        final = f"c=biws,r={fields['r']}"
        exchange = f"{bare},{first},{final}".encode()
        proof = bytes(a ^ b for a, b in zip(client_key, _hmac(hashlib.sha256(client_key).digest(), exchange), strict=True))
        verifier = self._continue(f"{final},p={base64.b64encode(proof).decode()}".encode())
        if not hmac.compare_digest(verifier, b"v=" + base64.b64encode(_hmac(server_key, exchange))):
            raise ConnectionError("the program at this port does not have the password")

    def log_in_plainly(self, login: Login) -> None:
        """Authenticate by PLAIN, which sends the password: only to a port that is known to be the broker's. Raises `Refused`."""
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


def read_string(response: bytes, at: int) -> tuple[str | None, int]:
    """The nullable string at this index, and the index after it."""
    (size,) = struct.unpack_from(">h", response, at)
    if size < 0:
        return None, at + 2
    return response[at + 2 : at + 2 + size].decode(), at + 2 + size


def _string(text: bytes) -> bytes:
    return struct.pack(">h", len(text)) + text


def _hmac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")
