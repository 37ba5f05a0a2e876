"""The password of an embedded broker, in a private file in the broker's folder.

The file has the names of librdkafka's settings, so that other programs can use it (`kcat -F FILE`).
"""

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from penstock.infra.broker import ports
from penstock.infra.broker.settings import HOST
from penstock.infra.errors import BrokerError
from penstock.infra.paths import state_path, write_private

FILE, USER, MECHANISM, PROTOCOL = "client.properties", "penstock", "SCRAM-SHA-256", "SASL_PLAINTEXT"
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


def at(bootstrap: str) -> Login | None:
    """The login of the embedded broker at this address, if it belongs to this user and has one. Raises `BrokerError`."""
    host, _, port = bootstrap.strip().rpartition(":")
    if host not in (HOST, "localhost"):
        return None
    for directory in (state_path() / "broker", *started):
        last_ports = ports.remembered(directory)
        if last_ports is not None and str(last_ports.client) == port:
            return read(directory)
    return None


def read(directory: Path) -> Login | None:
    """The login in a broker's directory; None if the broker was last started without one. Raises `BrokerError`."""
    file = directory / FILE
    try:
        settings = dict(line.split("=", 1) for line in file.read_text(encoding="ascii").splitlines() if "=" in line)
        return Login(settings["sasl.username"], settings["sasl.password"])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BrokerError(f"the broker's password in {file} cannot be read ({error.strerror}): the broker is another user's") from None
    except (KeyError, ValueError):
        raise BrokerError(f"{file} has no user and password: remove it, then `penstock broker stop` and `penstock broker start`") from None


def ensure(directory: Path) -> Login:
    """The login in a broker's directory, created if missing. Raises `BrokerError`."""
    if (login := read(directory)) is not None:
        return login
    login = Login(USER, secrets.token_urlsafe(_PASSWORD_BYTES))
    lines = {"security.protocol": PROTOCOL, "sasl.mechanism": MECHANISM, "sasl.username": login.user, "sasl.password": login.password}
    write_private(directory / FILE, "".join(f"{name}={value}\n" for name, value in lines.items()))
    return login
