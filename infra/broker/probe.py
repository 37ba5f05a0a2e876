"""Checks that a Kafka broker serves: it answers a metadata request with itself among the live brokers.

An accepted connection is not enough: the socket is open a second before the broker may be used.
"""

import socket
import struct

_METADATA, _VERSION, _CLIENT = 3, 2, b"penstock-probe"


def cluster_id(host: str, port: int, *, timeout_s: float) -> str | None:
    """Return the cluster id of the broker at this address, or None while none serves there."""
    # Header (api key, version, correlation id, client id), then an empty list of topics; Kafka protocol guide, Metadata version 2.
    request = struct.pack(">hhih", _METADATA, _VERSION, 1, len(_CLIENT)) + _CLIENT + struct.pack(">i", 0)
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(struct.pack(">i", len(request)) + request)
            (size,) = struct.unpack(">i", _exactly(connection, 4))
            if not 8 <= size <= 1 << 20:
                return None
            return _read(_exactly(connection, size))
    except (OSError, struct.error, UnicodeDecodeError):
        return None


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionError
        parts += part
    return parts


def _read(answer: bytes) -> str | None:
    correlation, brokers = struct.unpack_from(">ii", answer)
    if correlation != 1 or brokers < 1:
        return None
    at = 8
    for _ in range(brokers):  # node id, host, port, rack
        _, at = _string(answer, at + 4)
        _, at = _string(answer, at + 4)
    return _string(answer, at)[0]


def _string(answer: bytes, at: int) -> tuple[str | None, int]:
    (size,) = struct.unpack_from(">h", answer, at)
    if size < 0:
        return None, at + 2
    return answer[at + 2 : at + 2 + size].decode(), at + 2 + size
