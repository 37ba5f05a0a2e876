"""All settings of all Kafka clients, each with its reason."""

import base64
import json
import shlex
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kafka.net.sasl.oauth import AbstractTokenProvider

from penstock.infra.broker import access
from penstock.infra.errors import LogError

TOKEN_FILE, TOKEN_COMMAND = "sasl_oauth_token_file", "sasl_oauth_token_command"
TOKEN_COMMAND_S = 20.0
TOKEN_REUSE_S = 30.0
"""Reuse time of a command's token: a worker opens many connections at once."""
UNDATED_TOKEN_S = 300.0
"""Assumed lifetime of a token without `exp`."""

MAX_RECORD_BYTES = 18 << 20
"""The largest record of any topic (a dead letter around a 16 MiB record)."""

FETCH_BYTES = 32 << 20
"""[bytes] Limit of one response of the broker: the largest record, or thousands of small ones."""

_LIBRDKAFKA_SECURITY = {
    "security_protocol": "security.protocol",
    "sasl_mechanism": "sasl.mechanism",
    "sasl_plain_username": "sasl.username",
    "sasl_plain_password": "sasl.password",
    "ssl_cafile": "ssl.ca.location",
    "ssl_certfile": "ssl.certificate.location",
    "ssl_keyfile": "ssl.key.location",
    "ssl_password": "ssl.key.password",
}
"""kafka-python's name of a security setting -> librdkafka's."""
SECURITY_KEYS = frozenset({*_LIBRDKAFKA_SECURITY, "ssl_check_hostname", TOKEN_FILE, TOKEN_COMMAND})

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
"""Supported by both clients; librdkafka's wheels are built without GSSAPI."""

_SWITCHES = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Broker address and credentials of all clients. Raises `ValueError` for a bad address or security setting."""

    bootstrap: str
    client_id: str
    security: Mapping[str, Any] = field(default_factory=dict, repr=False)
    unreachable_after_s: float = 10.0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.security) - SECURITY_KEYS)
        if unknown:
            raise ValueError(f"kafka security setting {unknown[0]!r} is unknown; supported are {', '.join(sorted(SECURITY_KEYS))}")
        for host, port in self.servers():
            if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
                raise ValueError(f"kafka.bootstrap is {self.bootstrap!r}, expected HOST:PORT[,HOST:PORT...]")
        mechanism = self.security.get("sasl_mechanism", "PLAIN")
        if str(mechanism).upper() not in MECHANISMS:
            raise ValueError(f"kafka security setting sasl_mechanism={mechanism!r} is not supported; choose {', '.join(MECHANISMS)}")
        if str(mechanism).upper() == "OAUTHBEARER" and not _has_token(self.security):
            raise ValueError(f"kafka security setting sasl_mechanism=OAUTHBEARER needs {TOKEN_FILE} or {TOKEN_COMMAND}")
        if "ssl_check_hostname" in self.security:
            # Strings come from the command line and TOML, and a client takes "false" for true.
            check_hostname = str(self.security["ssl_check_hostname"])
            if check_hostname.strip().lower() not in _SWITCHES:
                raise ValueError(f"kafka security setting ssl_check_hostname={check_hostname!r} is neither true nor false")
            object.__setattr__(self, "security", {**self.security, "ssl_check_hostname": _SWITCHES[check_hostname.strip().lower()]})

    def credentials(self) -> Mapping[str, Any]:
        """Return the login of this user's embedded broker if `bootstrap` is its address, otherwise `security`. Raises `BrokerError`."""
        own = access.login_at(self.bootstrap)
        return self.security if own is None else own.security()

    def servers(self) -> list[tuple[str, str]]:
        """Host and port of each bootstrap server, IPv6 addresses without brackets."""
        pairs = [server.strip().rpartition(":") for server in self.bootstrap.split(",")]
        return [(host.strip("[]"), port) for host, _, port in pairs]


def librdkafka(connection: Connection) -> dict[str, Any]:
    """Settings that librdkafka's consumer and producer share."""
    settings = {"bootstrap.servers": connection.bootstrap, "client.id": connection.client_id, "log_level": 0}
    security = connection.credentials()
    settings |= {_LIBRDKAFKA_SECURITY[name]: value for name, value in security.items() if name in _LIBRDKAFKA_SECURITY}
    if "ssl_check_hostname" in security:
        settings["ssl.endpoint.identification.algorithm"] = "https" if security["ssl_check_hostname"] else "none"
    if _has_token(security):
        settings["oauth_cb"] = Tokens(security).for_librdkafka
    return settings


def _has_token(security: Mapping[str, Any]) -> bool:
    return TOKEN_FILE in security or TOKEN_COMMAND in security


def common(connection: Connection) -> dict[str, Any]:
    """Settings of every kafka-python client: addresses, credentials, and limits of reconnections and requests."""
    security = connection.credentials()
    return {
        "bootstrap_servers": [server.strip() for server in connection.bootstrap.split(",")],
        "client_id": connection.client_id,
        # With the default of 30 s a client is silent for 90 s after three restarts of a broker.
        "reconnect_backoff_max_ms": 1000,
        # Timeout for a frozen broker or a half-open connection, which is then tried again.
        "request_timeout_ms": 15_000,
        # A wrong address, password or certificate only ever gives "Unable to bootstrap": report it soon.
        "bootstrap_timeout_ms": int(connection.unreachable_after_s * 1000),
        **{name: value for name, value in security.items() if name not in (TOKEN_FILE, TOKEN_COMMAND)},
        **({"sasl_oauth_token_provider": Tokens(security)} if _has_token(security) else {}),
    }


# A frozen broker's queue of new connections fills up, and the system retries ever more seldom: after a minute only every 30 s.
# A new attempt every 5 s connects within seconds of the broker's return.
CONNECTING = {"socket_connection_setup_timeout_ms": 5000, "socket_connection_setup_timeout_max_ms": 5000}
"""Settings of every client's network part that the client's constructor does not take."""


def consumer(connection: Connection, *, group: str | None) -> dict[str, Any]:
    """Settings for reading: named partitions if `group` is None or only stores offsets, as a group member together with `membership`."""
    return {
        **common(connection),
        "group_id": group,
        "metrics_enabled": False,  # they cost CPU on every fetch and are never read
        "isolation_level": "read_committed",  # kafka-python's default is read_uncommitted
        # A tail seeks to its start. A deleted or unwritten offset must not become a silent jump.
        "auto_offset_reset": "none",
        "allow_auto_create_topics": False,  # a stray worker of a deleted run would create its topics again, with other settings
        "enable_auto_commit": False,  # offsets are committed for work that is done, never for records merely read
        "fetch_max_bytes": FETCH_BYTES,
        "max_partition_fetch_bytes": FETCH_BYTES,
        "max_poll_records": 500,
        "fetch_max_wait_ms": 500,  # the broker responds at once if there is data; this is only the interval of an idle reader
        # Interval of retries for offsets and positions, and of a new reader's requests for its topics' metadata.
        "retry_backoff_ms": 20,
    }


def membership(session_s: float, assignor: Any) -> dict[str, Any]:
    """Settings of a group member on top of `consumer`; a member silent for `session_s` loses its partitions."""
    return {
        "partition_assignment_strategy": [assignor],
        "session_timeout_ms": int(session_s * 1000),  # a killed member's partitions move after this
        "heartbeat_interval_ms": 500,  # a member notices a rebalance within this, and a joiner waits as long
        "retry_backoff_ms": 50,
        "max_poll_interval_ms": 60_000,  # the member's own thread polls each second, so a minute of silence means that it has ended
    }


def producer(connection: Connection, *, give_up_s: float, linger_ms: float) -> dict[str, Any]:
    """Settings for writing single records: idempotent, so a retry neither duplicates nor reorders."""
    give_up_ms = int(give_up_s * 1000)
    return {
        **common(connection),
        "metrics_enabled": False,
        "acks": "all",
        "enable_idempotence": True,
        "linger_ms": linger_ms,  # a few ms gather the records of a decode step into one request
        "batch_size": 1_000_000,
        "max_request_size": MAX_RECORD_BYTES + (1 << 20),
        "delivery_timeout_ms": give_up_ms,
        "request_timeout_ms": max(500, min(15_000, give_up_ms // 2)),
        "max_block_ms": min(5000, give_up_ms),  # how long one wait for a topic's metadata lasts; the caller waits again
        "allow_auto_create_topics": False,
        "retry_backoff_ms": 20,
    }


def transactional(connection: Connection, *, transactional_id: str, timeout_s: float) -> dict[str, Any]:
    """Settings for transactions of at most `timeout_s`; the broker aborts an overdue one and unblocks readers."""
    return {
        **producer(connection, give_up_s=timeout_s, linger_ms=0),  # adding partitions takes a round trip, which gathers records
        "transactional_id": transactional_id,
        "transaction_timeout_ms": int(timeout_s * 1000),
        # With the default of 100 ms back-to-back transactions take 105-215 ms each, with 2 ms about 6-12 ms.
        "retry_backoff_ms": 2,
    }


class Tokens(AbstractTokenProvider):  # type: ignore[misc]
    """Source of OAuth tokens for both clients. Raises `LogError` in one line that does not contain the token."""

    def __init__(self, security: Mapping[str, Any]) -> None:
        self._file, self._command = security.get(TOKEN_FILE), security.get(TOKEN_COMMAND)
        self._token, self._reuse_until = "", 0.0

    def token(self) -> str:
        """Return an OAuth token that is valid now."""
        if self._file is not None:
            return self._checked(self._read(), self._file)
        if time.monotonic() >= self._reuse_until:
            self._token, self._reuse_until = self._checked(self._run(), self._command), time.monotonic() + TOKEN_REUSE_S
        return self._token

    def for_librdkafka(self, _: str) -> tuple[str, float]:
        """Return (token, expiry in seconds since the epoch), as librdkafka's callback has to."""
        token = self.token()
        return token, expires_s(token) or time.time() + UNDATED_TOKEN_S

    def _read(self) -> str:
        try:
            return Path(str(self._file)).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise LogError(f"{TOKEN_FILE} {self._file} cannot be read: {getattr(error, 'strerror', None) or 'it is empty'}") from None

    def _run(self) -> str:
        """Return the output of the command that prints a token. Raises `LogError` if it fails."""
        try:
            command = shlex.split(str(self._command))
            done = subprocess.run(command, capture_output=True, text=True, timeout=TOKEN_COMMAND_S, check=False, stdin=subprocess.DEVNULL)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise LogError(f"{TOKEN_COMMAND} {self._command!r} cannot be started: {type(error).__name__}") from None
        if done.returncode:
            raise LogError(f"{TOKEN_COMMAND} {self._command!r} ended with status {done.returncode}: {' '.join(done.stderr.split())[-200:]}")
        return done.stdout

    @staticmethod
    def _checked(text: str, source: object) -> str:
        """Return the token without surrounding space. Raises `LogError` if `text` is empty or several words."""
        if not (token := text.strip()) or any(character.isspace() for character in token):
            raise LogError(f"{source} returned no OAuth token")
        return token


def expires_s(token: str) -> float | None:
    """Return the expiry time of a JSON web token (claim `exp`), in seconds since the epoch; None if it has none."""
    try:
        payload = token.split(".")[1]
        return float(json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["exp"])
    except (IndexError, ValueError, KeyError, TypeError):
        return None
