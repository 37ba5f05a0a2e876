"""The broker's two loopback ports, stored with its data so that its address stays the same after a restart."""

import base64
import json
import random
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

from penstock.infra.broker.settings import HOST
from penstock.infra.errors import BrokerError
from penstock.infra.paths import write_private

# Below the ports of outgoing connections (32768 and up), which could occupy a stored one by chance.
_RANGE = range(20000, 30000)
_TRIES = 200
_FILE = "ports.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Port of the clients, and port of the broker's own controller."""

    client: int
    controller: int


def remembered(directory: Path) -> Ports | None:
    """Return the ports last chosen for the broker of this directory."""
    try:
        stored = json.loads((directory / _FILE).read_text())
        return Ports(client=int(stored["client"]), controller=int(stored["controller"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def choose(directory: Path, port: int | None) -> Ports:
    """Choose the ports of a start and store them. Raises `BrokerError` if another program has the client port.

    No client uses the controller's port, so an occupied one is replaced silently.
    """
    before = remembered(directory)
    client = port if port is not None else before.client if before else _free(avoid=0)
    if not is_free(client):
        which = "remembered from the last start" if port is None else "requested"
        raise BrokerError(
            f"port {client} ({which}) is in use by another program: stop that program, or start the broker with another port "
            f"(`penstock broker start --port N`)"
        )
    controller = before.controller if before and before.controller != client and is_free(before.controller) else _free(avoid=client)
    ports = Ports(client=client, controller=controller)
    write_private(directory / _FILE, json.dumps({"client": client, "controller": controller}))
    return ports


def is_free(port: int) -> bool:
    """True if a server could listen on this loopback port now. Raises `BrokerError` for an invalid port."""
    if not 1 <= port <= 65535:
        raise BrokerError(f"{port} is not a port: choose one between 1024 and 65535")
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


def _free(*, avoid: int) -> int:
    for port in random.SystemRandom().sample(_RANGE, _TRIES):
        if port != avoid and is_free(port):
            return port
    raise BrokerError(f"no free port between {_RANGE.start} and {_RANGE.stop}: choose one (`penstock broker start --port N`)")
