"""All settings of the embedded broker, each with its reason; paths are relative to the broker's own directory."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

HOST = "127.0.0.1"
NODE_ID = 1
OWN_USER = "broker"
"""Name by which the broker authenticates at its own listeners."""
_LOGIN_MODULES = "org.apache.kafka.common.security"

# One broker keeps one copy of everything.
_SINGLE_NODE = {
    "process.roles": "broker,controller",
    "node.id": str(NODE_ID),
    "controller.listener.names": "CONTROLLER",
    # Every listener requires a password. PLAIN is between the broker and itself; clients authenticate without sending theirs.
    "listener.security.protocol.map": "CLIENT:SASL_PLAINTEXT,CONTROLLER:SASL_PLAINTEXT",
    "listener.name.controller.sasl.enabled.mechanisms": "PLAIN",
    "sasl.mechanism.controller.protocol": "PLAIN",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "min.insync.replicas": "1",
    # The default of 50 partitions each means 100 logs to open and flush for a few groups and transactional ids.
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
}

_BEHAVIOUR = {
    # A mistyped topic name is an error, never a new topic with default settings.
    "auto.create.topics.enable": "false",
    # The largest record is a dead letter: an 8 MiB part or a foreign 16 MiB record with its reason, 18 MiB, and batch overhead.
    "message.max.bytes": str(18 * 1024 * 1024 + 64 * 1024),
    # A group starts with the members it has; the 3 s default waits for more at every start.
    "group.initial.rebalance.delay.ms": "0",
    # Allows sessions shorter than 6 s, so that a killed worker's partitions are reassigned within 2 s.
    "group.min.session.timeout.ms": "1000",
    # A broker that was frozen, with its machine or alone, stays in service: a controller that fences the only broker leaves every
    # partition without a leader for a moment, in which Kafka 4.3.1 can lose the end of a transaction (`embedded._fence_predecessor`).
    "broker.session.timeout.ms": "30000",
    "broker.heartbeat.interval.ms": "500",
    # An overdue transaction of a killed worker blocks every read_committed reader: check each second, not every ten.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    # After a minute's freeze the reconnections of all clients are queued; the default queue of 50 refuses the others.
    "socket.listen.backlog.size": "1000",
    # A run may be resumed after months: group offsets expire after 7 days by default.
    "offsets.retention.minutes": str(10 * 365 * 24 * 60),
}

_DISK = {
    # A plan names group records by offset, and a checkpoint depends on the ledger records before it. With this setting a record is on
    # disk before it is acknowledged and before any reader sees it, so a power failure never loses a record that a checkpoint depends on;
    # the same holds for transaction markers and group offsets. By default Kafka leaves that to the operating system (tens of seconds)
    # and to replicas, which a single broker does not have. Cost: one fsync per batch, not per record.
    "log.flush.interval.messages": "1",
    # Old weights are deleted segment by segment: check every 5 s instead of every 5 minutes, from the first second on.
    "log.retention.check.interval.ms": "5000",
    "log.initial.task.delay.ms": "1000",
    # The default takes 128 of the 512 MB heap for compaction of a few thousand keys.
    "log.cleaner.dedupe.buffer.size": str(8 * 1024 * 1024),
}

JVM = (
    # Serves four clients with 16 records of 16 MiB each at once (measured; 192 MB is the least that does).
    "-Xmx512m",
    "-Xms128m",
    # For a small heap on few cores: starts faster and takes less memory than G1.
    "-XX:+UseSerialGC",
    # C1 only: starts in 2.6 s instead of 4.1 s; C2 pays off only for TLS, which a loopback does not use.
    "-XX:TieredStopAtLevel=1",
    # A broker out of memory responds with errors or not at all: let it exit and log the cause.
    "-XX:+ExitOnOutOfMemoryError",
    # No files in the shared temporary directory.
    "-XX:-UsePerfData",
    "-Djava.io.tmpdir=tmp",
    "-XX:ErrorFile=logs/crash.log",
    "-Djava.awt.headless=true",
    "-Djava.net.preferIPv4Stack=true",
    "-Dlog4j2.configurationFile=log4j2.properties",
)
# Java 22 and later warn about the native compression libraries without it.
JVM_FROM_22 = ("--enable-native-access=ALL-UNNAMED",)

# 8 MB and two older files: a broker that logs errors for weeks takes 24 MB. Without KafkaConfig each start lists 400 settings five times.
LOG4J = """\
status = error
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = logs/broker.log
appender.file.filePattern = logs/broker.log.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = [%d] %p %m (%c)%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 8MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 2
logger.values.name = kafka.server.KafkaConfig
logger.values.level = warn
logger.clients.name = org.apache.kafka.clients
logger.clients.level = warn
rootLogger.level = info
rootLogger.appenderRef.file.ref = file
"""


@dataclass(frozen=True, slots=True)
class Listener:
    """An address for clients on other machines, who authenticate as on the loopback."""

    host: str
    port: int
    advertised: str
    """HOST:PORT by which clients reach it."""


def server_properties(*, port: int, controller_port: int, data: str, password: str, listener: Listener | None = None) -> str:
    """Return the text of `server.properties`; without `listener` everything is bound to the loopback only.

    `password` is the broker's at its own listeners, new at each start; it has no quotation mark and no backslash.
    """
    client, controller = f"CLIENT://{HOST}:{port}", f"CONTROLLER://{HOST}:{controller_port}"
    addresses = {
        "listeners": f"{client},{controller}",
        "advertised.listeners": client,
        "controller.quorum.bootstrap.servers": f"{HOST}:{controller_port}",
        "log.dirs": data,
        "inter.broker.listener.name": "CLIENT",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "listener.name.client.sasl.enabled.mechanisms": "SCRAM-SHA-256,PLAIN",
        "listener.name.client.scram-sha-256.sasl.jaas.config": f"{_LOGIN_MODULES}.scram.ScramLoginModule required;",
        "listener.name.client.plain.sasl.jaas.config": _own_login(password),
        "listener.name.controller.plain.sasl.jaas.config": _own_login(password),
    }
    if listener is not None:
        addresses |= {
            "listeners": f"{client},{controller},REMOTE://{listener.host}:{listener.port}",
            "advertised.listeners": f"{client},REMOTE://{listener.advertised}",
            "listener.security.protocol.map": f"{_SINGLE_NODE['listener.security.protocol.map']},REMOTE:SASL_PLAINTEXT",
            "listener.name.remote.sasl.enabled.mechanisms": "SCRAM-SHA-256",
            "listener.name.remote.scram-sha-256.sasl.jaas.config": f"{_LOGIN_MODULES}.scram.ScramLoginModule required;",
        }
    return _text({**_SINGLE_NODE, **_BEHAVIOUR, **_DISK, **addresses})


def own_password(properties: str) -> str | None:
    """Return the broker's own password in the text of `server.properties`; None if there is none."""
    match = re.search(rf'user_{OWN_USER}="([^"]*)"', properties)
    return match[1] if match else None


def fencing_properties(*, controller_port: int, data: str, password: str) -> str:
    """Return properties of the same node as a controller only, which fences a killed broker as soon as possible."""
    properties = {
        "process.roles": "controller",
        "listeners": f"CONTROLLER://{HOST}:{controller_port}",
        "controller.quorum.bootstrap.servers": f"{HOST}:{controller_port}",
        "log.dirs": data,
        "broker.session.timeout.ms": "200",
        "broker.heartbeat.interval.ms": "50",
        "metadata.max.idle.interval.ms": "100",  # interval between two records
        "listener.name.controller.plain.sasl.jaas.config": _own_login(password),
    }
    return _text({**_SINGLE_NODE, **properties})


def _own_login(password: str) -> str:
    login = f'username="{OWN_USER}" password="{password}" user_{OWN_USER}="{password}"'
    return f"{_LOGIN_MODULES}.plain.PlainLoginModule required {login};"


def _text(properties: Mapping[str, str]) -> str:
    return "".join(f"{key}={value}\n" for key, value in properties.items())
