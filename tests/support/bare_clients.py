"""Settings of clients that Penstock does not make: the address of a broker, and the login if it is one of ours."""

from typing import Any

from penstock.infra.kafka.settings import Connection, librdkafka


def python_client(bootstrap: str) -> dict[str, Any]:
    """For kafka-python."""
    return {"bootstrap_servers": bootstrap, **Connection(bootstrap=bootstrap, client_id="test").credentials()}


def c_client(bootstrap: str) -> dict[str, Any]:
    """For confluent-kafka."""
    return librdkafka(Connection(bootstrap=bootstrap, client_id="test"))
