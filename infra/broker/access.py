"""Address and password of the embedded broker, and single requests of Kafka's protocol to it.

Ports and password are files in the broker's folder; the password's has the names of librdkafka's settings, so that other programs can use
it (`kcat -F FILE`). A broker serves if it responds to a metadata request with itself among the live brokers. An accepted connection is not
enough: the socket is open a second before the broker can be used.
"""

import base64
import hashlib
import json
import random
import secrets
import socket
import struct
import uuid
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from penstock.infra.broker.settings import HOST, Listener
from penstock.infra.errors import BrokerError
from penstock.infra.paths import state_path, write_private

# Below the ports of outgoing connections (32768 and up), which could occupy a stored one by chance.
_RANGE = range(20000, 30000)
_TRIES = 200
_PORTS_FILE = "ports.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Ports of the embedded broker: for clients, and for its own controller."""

    client: int
    controller: int
    advertised: str | None = None
    """HOST:PORT of its listener for other machines; None without one."""


def remembered_ports(directory: Path) -> Ports | None:
    """Return the ports that the last start of this directory's broker chose; None without a readable file."""
    try:
        stored = json.loads((directory / _PORTS_FILE).read_text())
        return Ports(client=int(stored["client"]), controller=int(stored["controller"]), advertised=stored.get("advertised"))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def choose_ports(directory: Path, port: int | None, listener: Listener | None = None) -> Ports:
    """Choose the ports for a start of the broker and store them. Raises `BrokerError` if another program uses the client port.

    An occupied controller port is replaced silently, because no client uses it; so is the client port if there is a `listener`.
    """
    before = remembered_ports(directory)
    client = port if port is not None else before.client if before else _free_port(avoid=0)
    if listener is not None and (client == listener.port or not is_free(client)):
        client = _free_port(avoid=listener.port)
    elif not is_free(client):
        which = "remembered from the last start" if port is None else "requested"
        raise BrokerError(
            f"port {client} ({which}) is in use by another program: stop that program, or start the broker with another port "
            f"(`penstock broker start --port N`)"
        )
    controller = before.controller if before and before.controller != client and is_free(before.controller) else _free_port(avoid=client)
    ports = Ports(client=client, controller=controller, advertised=None if listener is None else listener.advertised)
    write_private(directory / _PORTS_FILE, json.dumps(asdict(ports)))
    return ports


def is_free(port: int) -> bool:
    """True if a server could listen on this loopback port now. Raises `BrokerError` for an invalid port."""
    if not 1 <= port <= 65535:
        raise BrokerError(f"port {port} cannot be used: choose one between 1024 and 65535")
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Kafka does: closed connections in TIME_WAIT do not count
        try:
            server.bind((HOST, port))
        except OSError:
            return False
    return True


def new_cluster_id() -> str:
    """Return a random cluster id in Kafka's format: a UUID in URL-safe base64 that does not look like an option."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not text.startswith("-"):
            return text


def _free_port(*, avoid: int) -> int:
    for port in random.SystemRandom().sample(_RANGE, _TRIES):
        if port != avoid and is_free(port):
            return port
    raise BrokerError(f"no port between {_RANGE.start} and {_RANGE.stop} is free: choose another one with `penstock broker start --port N`")


LOGIN_FILE, USER, MECHANISM, PROTOCOL = "client.properties", "penstock", "SCRAM-SHA-256", "SASL_PLAINTEXT"
_PASSWORD_BYTES = 32

started: set[Path] = set()
"""Directories of brokers in other state directories that this process has started."""


@dataclass(frozen=True, slots=True)
class Login:
    """A user of the broker with its password."""

    user: str
    password: str = field(repr=False)

    def security(self) -> dict[str, str]:
        """Settings of a client, by the names of `kafka.security`."""
        return {
            "security_protocol": PROTOCOL,
            "sasl_mechanism": MECHANISM,
            "sasl_plain_username": self.user,
            "sasl_plain_password": self.password,
        }


def login_at(bootstrap: str) -> Login | None:
    """Return the login of the embedded broker at this address, None if the address is not this user's broker. Raises `BrokerError`."""
    addresses = {bootstrap.strip(), bootstrap.strip().replace("localhost:", f"{HOST}:")}
    for directory in (state_path() / "broker", *started):
        last_ports = remembered_ports(directory)
        if last_ports is not None and addresses & {f"{HOST}:{last_ports.client}", last_ports.advertised}:
            return read_login(directory)
    return None


def read_login(directory: Path) -> Login | None:
    """Return the login stored in a broker's directory; None if the broker was last started without one. Raises `BrokerError`."""
    file = directory / LOGIN_FILE
    try:
        settings = dict(line.split("=", 1) for line in file.read_text(encoding="ascii").splitlines() if "=" in line)
        return Login(settings["sasl.username"], settings["sasl.password"])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BrokerError(f"cannot read the broker's password from {file} ({error.strerror}): another user started this broker") from None
    except (KeyError, ValueError):
        raise BrokerError(f"{file} has no user and password: remove it, then `penstock broker stop` and `penstock broker start`") from None


def ensure_login(directory: Path) -> Login:
    """Return the login stored in a broker's directory, created if missing. Raises `BrokerError`."""
    if (login := read_login(directory)) is None:
        write_login(directory, login := Login(USER, secrets.token_urlsafe(_PASSWORD_BYTES)))
    return login


def write_login(directory: Path, login: Login) -> None:
    """Store a login for the next start of this directory's broker; a running broker receives the password by `set_password`."""
    lines = {"security.protocol": PROTOCOL, "sasl.mechanism": MECHANISM, "sasl.username": login.user, "sasl.password": login.password}
    write_private(directory / LOGIN_FILE, "".join(f"{name}={value}\n" for name, value in lines.items()))


_SASL_HANDSHAKE, _SASL_AUTHENTICATE = (17, 1), (36, 0)
_CLIENT, _CORRELATION = b"penstock-probe", 1
_LARGEST_RESPONSE = 1 << 20
_METADATA, _ALTER_SCRAM_CREDENTIALS = (3, 2), (51, 0)
_SHA_256, _ITERATIONS = 1, 4096
_UNREADABLE = (OSError, struct.error, UnicodeDecodeError, ValueError, KeyError)


class Refused(Exception):
    """The broker does not accept the login."""


class Session:
    """One connection to the broker. Raises `OSError` or `struct.error` if no Kafka broker responds in time."""

    def __init__(self, host: str, port: int, *, timeout_s: float) -> None:
        self._socket = socket.create_connection((host, port), timeout=timeout_s)
        self._stream = self._socket.makefile("rb")

    def close(self) -> None:
        self._stream.close()
        self._socket.close()

    def request(self, api: tuple[int, int], body: bytes, *, flexible: bool = False) -> bytes:
        """Send a request of (API key, version) and return the body of the response. `flexible`: headers with tagged fields."""
        tags = b"\0" if flexible else b""
        message = struct.pack(">hhih", *api, _CORRELATION, len(_CLIENT)) + _CLIENT + tags + body
        self._socket.sendall(struct.pack(">i", len(message)) + message)
        (size,) = struct.unpack(">i", self._read(4))
        if not 4 <= size <= _LARGEST_RESPONSE:
            raise ConnectionError("the response does not follow the Kafka protocol")
        response = self._read(size)
        if struct.unpack_from(">i", response)[0] != _CORRELATION:
            raise ConnectionError("the response has the correlation id of another request")
        return response[4 + len(tags) :]

    def log_in(self, login: Login) -> None:
        """Authenticate by SCRAM (RFC 5802), which never sends the password: another program at the port does not receive it.

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
        (error,) = struct.unpack_from(">h", self.request(_SASL_HANDSHAKE, struct.pack(">h", len(mechanism)) + mechanism.encode()))
        if error:
            raise Refused
        return self._continue(message)

    def _continue(self, message: bytes) -> bytes:
        """Send a SASL message and return the server's. Raises `Refused`."""
        response = self.request(_SASL_AUTHENTICATE, struct.pack(">i", len(message)) + message)
        (error,) = struct.unpack_from(">h", response)
        if error:
            raise Refused
        _, at = read_string(response, 2)
        (size,) = struct.unpack_from(">i", response, at)
        return response[at + 4 : at + 4 + size]

    def _read(self, size: int) -> bytes:
        """Receive exactly `size` bytes. Raises `ConnectionError` at the end of the connection."""
        data = self._stream.read(size)
        if len(data) < size:
            raise ConnectionError
        return data


def cluster_id(host: str, port: int, *, timeout_s: float, login: Login | None = None) -> str | None:
    """Return the cluster id of the broker at this address; None while no broker serves there. Raises `Refused`."""
    try:
        with closing(Session(host, port, timeout_s=timeout_s)) as session:
            if login is not None:
                session.log_in(login)
            return _cluster_id(session.request(_METADATA, struct.pack(">i", 0)))
    except _UNREADABLE:
        return None


def set_password(host: str, port: int, login: Login, *, by: Login, timeout_s: float) -> None:
    """Let the broker accept `login`, requested as its own user `by`; no effect if no broker responds. Raises `Refused`."""
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", login.password.encode(), salt, _ITERATIONS)
    # Kafka protocol guide, AlterUserScramCredentials version 0: no deletions, one upsertion, tagged fields empty.
    upsertion = _compact(login.user.encode()) + struct.pack(">bi", _SHA_256, _ITERATIONS) + _compact(salt) + _compact(salted) + b"\0"
    try:
        with closing(Session(host, port, timeout_s=timeout_s)) as session:
            session.log_in_plainly(by)
            session.request(_ALTER_SCRAM_CREDENTIALS, b"\1\2" + upsertion + b"\0", flexible=True)
    except _UNREADABLE:
        return


def _compact(text: bytes) -> bytes:
    """Encode a string or byte array of less than 127 bytes as Kafka's compact type."""
    return bytes([len(text) + 1]) + text


def _cluster_id(response: bytes) -> str | None:
    """Return the cluster id in a metadata response; None unless it lists a live broker, as it does once the broker serves."""
    (brokers,) = struct.unpack_from(">i", response)
    if brokers < 1:
        return None
    at = 4
    for _ in range(brokers):  # node id, host, port, rack
        _, at = read_string(response, at + 4)
        _, at = read_string(response, at + 4)
    return read_string(response, at)[0]


def read_string(response: bytes, at: int) -> tuple[str | None, int]:
    """Return the nullable string at this index of a response, and the index after it."""
    (size,) = struct.unpack_from(">h", response, at)
    if size < 0:
        return None, at + 2
    return response[at + 2 : at + 2 + size].decode(), at + 2 + size
