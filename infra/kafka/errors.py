"""Creates clients of the client library and translates its errors into ours."""

import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kafka import errors
from kafka.net.compat import KafkaNetClient

from penstock.infra.errors import Fenced, LogError, LogUnreachable, LostPartition, OutcomeUnknown, SendFailed
from penstock.infra.kafka.client_repairs import faults, private_api
from penstock.infra.kafka.settings import CONNECTING, Connection
from penstock.infra.log import TRANSACTION_S

# Without a handler Python prints the client library's warnings to the terminal; an application that configures logging still gets them.
logging.getLogger("kafka").addHandler(logging.NullHandler())
# At each connection it warns that SCRAM sends a password in the clear, which it does not.
logging.getLogger("kafka.net.sasl.scram").setLevel(logging.ERROR)

NEVER_WRITTEN = (
    errors.MessageSizeTooLargeError,
    errors.RecordListTooLargeError,
    errors.InvalidRecordError,
    errors.TopicAuthorizationFailedError,
    errors.ClusterAuthorizationFailedError,
    errors.TransactionalIdAuthorizationFailedError,
    errors.InvalidTopicError,
    errors.PolicyViolationError,
    errors.InvalidTimestampError,
)
UNREACHABLE = (
    errors.KafkaConnectionError,
    errors.NodeNotReadyError,
    errors.RequestTimedOutError,
    errors.KafkaTimeoutError,
    errors.MetadataEmptyBrokerList,
    errors.Cancelled,
    errors.UnknownBrokerIdError,  # a broker that has just returned does not lead its partitions yet
)
"""Errors a client raises while no broker responds."""
GENERATION_OVER = (errors.CommitFailedError, errors.IllegalGenerationError, errors.UnknownMemberIdError)
_FENCED = (errors.ProducerFencedError, errors.InvalidProducerEpochError)
_FORBIDDEN = (
    errors.TopicAuthorizationFailedError,
    errors.GroupAuthorizationFailedError,
    errors.ClusterAuthorizationFailedError,
    errors.TransactionalIdAuthorizationFailedError,
)
_ADVICE = {
    # Also in a run of an earlier release, whose rules name fewer topics.
    **dict.fromkeys(_FORBIDDEN, "create the ACLs that `penstock topics acls RUN` prints"),
    errors.InvalidSessionTimeoutError: (
        "set kafka.session_s between the broker's group.min.session.timeout.ms and group.max.session.timeout.ms"
    ),
    errors.InvalidTransactionTimeoutError: f"set the broker's transaction.max.timeout.ms to {1000 * TRANSACTION_S:.0f} or more",
    errors.GroupMaxSizeReachedError: "set the broker's group.max.size to the number of workers of a role or more",
}
"""Fix of an error that another attempt does not mend."""
REFUSED = (*_ADVICE, errors.SaslAuthenticationFailedError)


def one_line(error: BaseException) -> str:
    """Format an error as one line of at most 300 characters, with the fix for a missing right or a limit of the broker."""
    if isinstance(error, errors.InvalidTimestampError):
        return "the broker rejects the record's timestamp as too far from its own clock: correct this machine's clock"
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= 300 else text[:297] + "..."
    return f"{text}; {_ADVICE[type(error)]}" if type(error) in _ADVICE else text


def translate(error: BaseException, what: str) -> LogError:
    """Translate an error of the client library; `what` names the operation that failed."""
    if isinstance(error, LogError):
        return error
    text = f"{what}: {one_line(error)}"
    if isinstance(error, _FENCED):
        return Fenced(f"{what}: another process now writes with this transactional id")
    if isinstance(error, GENERATION_OVER):
        return LostPartition(f"{what}: the consumer group has moved on to another generation")
    if isinstance(error, NEVER_WRITTEN):
        return SendFailed(text)
    if isinstance(error, errors.KafkaTimeoutError):
        return OutcomeUnknown(text)
    return LogError(text)


_REFUSAL = re.compile(r"Authentication failed[^)]*|(?<=\] )[^(\]]*(?= \(_ssl\.c)")
_CAUSE = re.compile(r"Bootstrap connection to \S+ failed: (?:KafkaConnectionError: )?(.*?)(?: \(backoff .*)?")
_TLS_ALERT = "Invalid frame length: 352518"
"""The client takes the first bytes of an alert, 0x15 and the version of TLS, for a length."""


class _Reasons(logging.Handler):
    """Collects the causes that the client library only logs when it cannot reach a broker."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = self.refused = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Store the refusal of a login or certificate, or the cause of a failed connection, from a line of the client's log."""
        text = record.getMessage()
        if match := _REFUSAL.search(text):
            self.refused = match[0]
        if match := _CAUSE.fullmatch(text):
            self.last = "its listener has TLS: set security_protocol to SSL or SASL_SSL" if _TLS_ALERT in text else match[1]


def make(kind: Callable[..., Any], connection: Connection, settings: dict[str, Any]) -> Any:
    """Return a client of class `kind`; if no broker responds in time, close it and raise `LogUnreachable` with the cause."""
    faults.apply()
    network_clients: list[Any] = []

    def net_client(**configs: Any) -> Any:
        network_clients.append(KafkaNetClient(**configs, **CONNECTING))
        return network_clients[0]

    reasons = _Reasons()
    net_log = logging.getLogger("kafka.net")
    net_log.addHandler(reasons)
    try:
        return kind(**settings, kafka_client=net_client)
    except errors.KafkaError as error:
        for client in network_clients:
            client.close()
        if reasons.refused:
            reason = one_line(RuntimeError(reasons.refused))
            where = "--security, PENSTOCK_SECURITY or kafka.security"
            raise LogUnreachable(
                f"the broker at {connection.bootstrap} refuses the login ({reason}): check the credentials in {where}"
                if reason.startswith("Authentication failed")
                else f"the TLS handshake with the broker at {connection.bootstrap} failed ({reason}): "
                f"check the certificates in {where}, and that this listener has TLS"
            ) from None
        raise _unreachable(
            connection,
            reasons.last or one_line(error),
            "; TLS and passwords are set by --security and PENSTOCK_SECURITY",
        ) from None
    finally:
        net_log.removeHandler(reasons)


def _unreachable(connection: Connection, reason: str, hint: str = "") -> LogUnreachable:
    reason = " ".join(reason.split())[:160]
    return LogUnreachable(
        f"cannot reach a Kafka broker at {connection.bootstrap} ({reason}): "
        f"start one with `penstock broker start` or set kafka.bootstrap{hint}"
    )


def probe(connection: Connection) -> None:
    """Raise `LogError` for an unreadable certificate file, and `LogUnreachable`, with the cause, if no address accepts connections."""
    security = connection.credentials()
    for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile"):
        if name in security and not os.access(str(security[name]), os.R_OK):
            raise LogError(f"kafka security setting {name}: {security[name]} does not exist or cannot be read")
    if reason := _refusal(connection.servers(), connection.unreachable_after_s):
        raise _unreachable(connection, reason)


def probe_advertised(connection: Connection, client: Any) -> None:
    """Raise `LogUnreachable` if the cluster names only addresses to its clients that accept no connections."""
    advertised = private_api.advertised(client)
    if not set(advertised) & set(connection.servers()) and (reason := _refusal(advertised, connection.unreachable_after_s)):
        raise LogUnreachable(
            f"the broker at {connection.bootstrap} responds, but tells its clients to connect to "
            f"{', '.join(':'.join(address) for address in advertised[:3])}, which this machine cannot reach ({reason}): "
            "set advertised.listeners in the brokers' configuration to addresses that clients reach"
        )


def _refusal(addresses: Sequence[tuple[str, str]], within_s: float) -> str:
    """Return why none of (host, port) accepts connections; empty if one does, or there are none."""
    reason, timeout_s = "", min(5.0, within_s) / max(1, len(addresses))
    for host, port in addresses:
        try:
            socket.create_connection((host, int(port)), timeout=timeout_s).close()
        except OSError as error:
            reason = getattr(error, "strerror", None) or one_line(error)
        else:
            return ""
    return reason


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Translate errors of the client library that the block raises."""
    try:
        yield
    except errors.KafkaError as error:
        raise translate(error, what) from error
