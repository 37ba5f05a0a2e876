"""Creates, checks, lists and deletes topics of a Kafka cluster, and looks up offsets."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from kafka import KafkaAdminClient, TopicPartition, errors
from kafka.admin import ConfigResource, ConfigResourceType, OffsetSpec
from kafka.protocol.consumer import IsolationLevel

from penstock.infra.errors import LogError, LogUnreachable
from penstock.infra.kafka import errors as edge
from penstock.infra.kafka import settings
from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.kafka.cpu_meter import CpuCosts
from penstock.infra.kafka.outage import Contact, Wait
from penstock.infra.kafka.settings import Connection
from penstock.infra.log import FOLLOWING, Copies, Partition
from penstock.topics.catalogue import TopicSpec, is_ours

T = TypeVar("T")

UNCLEAN = "unclean.leader.election.enable"
LISTED = 5
_LEAST = ("max.message.bytes", "min.insync.replicas")
"""Settings of which an existing topic may have a larger value."""
_ANY = ("segment.bytes", "file.delete.delay.ms")
"""Settings of which an existing topic may have any value: they only determine how soon disk is freed, and some services fix them."""
GROUP_OFFSETS = "__consumer_offsets"
_INTERNAL = {GROUP_OFFSETS: "offsets.topic.replication.factor", "__transaction_state": "transaction.state.log.replication.factor"}
"""Topics that the cluster makes at the first use of groups and transactions, and the broker setting of their replicas."""

_UNKNOWN_TOPIC = 3  # Kafka's error code UNKNOWN_TOPIC_OR_PARTITION


class Described(NamedTuple):
    """A topic as the cluster reports it."""

    id: str
    """Differs once the topic was deleted and created again."""
    partitions: int
    replicas: int
    """Replicas of the partition that has the fewest."""


class Weakness(NamedTuple):
    """A problem and its fix, one line each."""

    problem: str
    fix: str


class Admin:
    """An admin client shared by all threads of a log, created at first use, with the state that all clients of the log share."""

    def __init__(self, connection: Connection, cpu: CpuCosts, contact: Contact) -> None:
        self.connection, self.cpu, self.contact = connection, cpu, contact
        self._client: Any = None
        self._spare: Any = None
        """The consumer of a tail that was closed, for the next one."""
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def connect(self) -> None:
        """Create the admin client unless it exists. Raises `LogUnreachable` if no broker responds within `unreachable_after_s`."""
        with self._lock:
            if self._client is None:
                edge.probe(self.connection)
                with self.cpu.count("io_s"):
                    client = edge.make(KafkaAdminClient, self.connection, settings.common(self.connection))
                try:
                    edge.probe_advertised(self.connection, client)
                except BaseException:
                    client.close()
                    raise
                self._client = client
                self.cpu.watch(private_api.io_thread(client), "io_s")

    def request(self, what: str, call: Callable[[Any], T], timeout_s: float = 30.0) -> T:
        """Return `call(client)`, repeated while the cluster is unavailable; `what` names the request in an error.

        Raises `LogError` after `timeout_s`, not counting outages, and `LogUnreachable` after an outage of `give_up_s`.
        """
        self.contact.reach(self.connect)
        wait, end = Wait(self.contact), time.monotonic() + timeout_s
        wait.start()
        while True:
            try:
                with self._lock, self.cpu.count("io_s"):
                    response = call(self._client)
            except edge.UNREACHABLE:
                wait.check()
                end = time.monotonic() + timeout_s
                time.sleep(0.1)
            except errors.RetriableError as error:
                wait.responded(more=True)
                if time.monotonic() > end:
                    raise edge.translate(error, f"{what} (tried for {timeout_s:.0f} s)") from error
                time.sleep(0.1)
            except errors.KafkaError as error:
                raise edge.translate(error, what) from error
            else:
                wait.responded()
                return response

    def topics(self, prefix: str = "") -> list[str]:
        """Return the names of the topics that start with `prefix`, sorted, without Kafka's internal ones."""
        names = self.request("cannot list topics", lambda client: client.list_topics())
        return sorted(name for name in names if name.startswith(prefix) and not name.startswith("__"))

    def partitions(self, topic: str) -> int | None:
        """Return the number of partitions of `topic`, cached; None if it does not exist."""
        if topic not in self._counts:
            described = self.describe([topic])
            if topic not in described:
                return None
            self._counts[topic] = described[topic].partitions
        return self._counts[topic]

    def ids(self, topics: Sequence[str]) -> dict[str, str]:
        """Return topic -> its topic id in the cluster now, without missing topics; also drops their cached partition counts."""
        for topic in topics:
            self._counts.pop(topic, None)
        return {name: described.id for name, described in self.describe(topics).items()}

    def require(self, partitions: Iterable[Partition]) -> None:
        """Raise `LogError` unless every partition exists: reading a missing one would wait silently for ever."""
        for topic, partition in partitions:
            count = self.partitions(topic)
            if count is None:
                raise LogError(f"topic {topic} does not exist, or this user has no permission to see it")
            if not 0 <= partition < count:
                raise LogError(f"topic {topic} has no partition {partition}; its partitions are 0 to {count - 1}")

    def describe(self, topics: Sequence[str]) -> dict[str, Described]:
        """Return topic -> its id, partition count and smallest replica count, without missing topics. Raises `LogError`."""
        if not topics:
            return {}
        descriptions = {}
        for described in self.request(f"cannot describe {topics[0]}", lambda client: client.describe_topics(topics)):
            code = described["error_code"]
            if code == _UNKNOWN_TOPIC:
                continue
            if code:
                raise LogError(f"cannot use topic {described['name']}: {errors.for_code(code).__name__}")
            replicas = [len(partition["replica_nodes"]) for partition in described["partitions"]]
            descriptions[described["name"]] = Described(str(described["topic_id"]), len(replicas), min(replicas))
        return descriptions

    def create_topics(self, specs: Mapping[str, TopicSpec], *, copies: Copies = FOLLOWING) -> list[str]:
        """Create the missing topics; return one warning line for each existing topic with fewer replicas than `copies` requests.

        Raises `LogError` if an existing topic has other partitions or settings than its `TopicSpec`, or the cluster cannot hold new ones.
        """
        existing = self.describe(list(specs))
        missing = {name: spec for name, spec in specs.items() if name not in existing}
        replicas, durable = self._replication(copies)
        if missing:
            if impossible := self._impossible(self.brokers()):
                raise LogError(f"{impossible[0].problem}: {impossible[0].fix}")
            new_topics = {
                name: {"num_partitions": spec.partitions, "replication_factor": replicas, "configs": {**spec.configs, **durable}}
                for name, spec in missing.items()
            }
            try:
                self.request(
                    f"cannot create topics {', '.join(missing)}", lambda client: client.create_topics(new_topics, timeout_ms=20_000)
                )
            except LogError as error:
                if not isinstance(error.__cause__, errors.TopicAlreadyExistsError):
                    raise
                existing = self.describe(list(specs))  # another process created some of them at the same time
            self.request(f"no leader of {', '.join(missing)}", lambda client: client.wait_for_topics(list(missing), timeout_ms=20_000))
            # The next request may go to another broker, which does not have them in its metadata yet.
            self._counts |= {name: spec.partitions for name, spec in missing.items() if name not in existing}
        if wrong := self._differences({name: spec for name, spec in specs.items() if name in existing}, existing):
            raise LogError(f"{wrong[0]}: use another run id, alter the topic or delete it")
        return [
            f"topic {name} has {topic.replicas} replica{'' if topic.replicas == 1 else 's'}, expected {replicas}: "
            "the topic could be lost with one broker; add replicas with kafka-reassign-partitions.sh"
            for name, topic in existing.items()
            if topic.replicas < replicas
        ]

    def brokers(self) -> list[int]:
        """Ids of the brokers in service."""
        return [
            broker["broker_id"] for broker in self.request("cannot list the brokers", lambda client: client.describe_cluster())["brokers"]
        ]

    def _replication(self, copies: Copies) -> tuple[int, dict[str, str]]:
        """Return (replicas of a new topic, its setting `min.insync.replicas`). Raises `LogError` if `copies` does not fit the cluster."""
        brokers = len(self.brokers())
        try:
            replicas, in_sync = copies.on(brokers)
        except ValueError as error:
            raise LogError(str(error)) from None
        return replicas, {} if brokers == 1 else {"min.insync.replicas": str(in_sync)}

    def problems_of(self, specs: Mapping[str, TopicSpec], *, copies: Copies = FOLLOWING) -> list[str]:
        """Return one line for each topic that is missing, or that would lose or refuse records; creates and changes nothing."""
        (replicas, durable), existing = self._replication(copies), self.describe(list(specs))
        expected = {name: replace(spec, configs={**spec.configs, **durable}) for name, spec in specs.items()}
        return self._differences({name: spec for name, spec in expected.items() if name in existing}, existing) + [
            f"topic {name} is missing: create it with {spec.partitions} partitions, {replicas} replicas, "
            + " ".join(f"{key}={value}" for key, value in spec.configs.items())
            for name, spec in expected.items()
            if name not in existing
        ]

    def _differences(self, specs: Mapping[str, TopicSpec], existing: Mapping[str, Described]) -> list[str]:
        """Return one line for each existing topic whose partition count or settings differ from its `TopicSpec`."""
        resources, lines = [ConfigResource(ConfigResourceType.TOPIC, name, None) for name in specs], list[str]()
        if not specs:
            return lines
        configs = self.request("cannot read topic settings", lambda client: client.describe_configs(resources, config_filter="all"))
        for name, spec in specs.items():
            actual, count = {key: value.get("value") for key, value in configs["topic"][name].items()}, existing[name].partitions
            wrong = [f"{count} partitions, expected {spec.partitions}"] * (count != spec.partitions)
            for key, value in spec.configs.items():
                if not _fits(key, actual.get(key), value):
                    wrong.append(f"{key}={actual.get(key)}, expected {'at least ' if key in _LEAST else ''}{value}")
            lines += [f"topic {name} has {'; '.join(wrong)}"] * bool(wrong)
        return lines

    def delete_topics(self, names: Iterable[str]) -> None:
        """Delete topics with all their records and wait until they are deleted; missing ones are no error."""
        present = set(self.topics())
        existing = [name for name in names if name in present]
        for name in existing:
            self._counts.pop(name, None)
        if not existing:
            return
        self.request(f"cannot delete topics {', '.join(existing)}", lambda client: client.delete_topics(existing, timeout_ms=20_000))
        end = time.monotonic() + 20
        while set(existing) & set(self.topics()):
            if time.monotonic() > end:
                raise LogError(f"topics {', '.join(existing)} still exist 20 s after the request to delete them: try again")
            time.sleep(0.05)

    def offsets(self, partitions: Iterable[Partition], *, end: bool, committed: bool, time_ms: int | None = None) -> dict[Partition, int]:
        """Return each partition's first offset, or with `end` its end offset: if `committed`, at most the start of an open transaction.

        With `time_ms`, the offset of the first record with that timestamp or a later one, -1 if there is none.
        """
        spec = time_ms if time_ms is not None else OffsetSpec.LATEST if end else OffsetSpec.EARLIEST
        partitions = list(partitions)
        if not partitions:
            return {}
        self.require(partitions)
        isolation = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        specs = {TopicPartition(topic, partition): spec for topic, partition in partitions}
        offsets = self.request(
            f"cannot look up offsets of {partitions[0][0]}",
            lambda client: client.list_partition_offsets(specs, isolation_level=isolation, timeout_ms=15_000),
        )
        return {(tp.topic, tp.partition): value.offset for tp, value in offsets.items()}

    def delete_records(self, before: Mapping[Partition, int]) -> None:
        """Delete the records before these offsets; disk is freed soon after, by whole segments."""
        if not before:
            return
        self.require(before)
        offsets = {TopicPartition(topic, partition): offset for (topic, partition), offset in before.items()}
        self.request(f"cannot delete records of {next(iter(before))[0]}", lambda client: client.delete_records(offsets, timeout_ms=15_000))

    def holder(self, transactional_id: str) -> tuple[int, int]:
        """Return producer id and epoch of the producer that took a transactional id last."""
        descriptions = self.request(f"cannot look up {transactional_id}", lambda client: client.describe_transactions([transactional_id]))
        return descriptions[transactional_id].producer_id, descriptions[transactional_id].producer_epoch

    def weaknesses(self) -> list[Weakness]:
        """List settings that disable groups or transactions, or let one lost broker lose acknowledged records. Raises `LogError`."""
        brokers = self.brokers()
        if len(brokers) == 1:
            return self._impossible(brokers)
        described = self.describe([name for name in self.topics() if is_ours(name)])
        resources = [ConfigResource(ConfigResourceType.BROKER, str(broker), None) for broker in brokers]
        resources += [ConfigResource(ConfigResourceType.TOPIC, name, None) for name in described]
        values = self.request("cannot read the cluster's settings", lambda client: client.describe_configs(resources, config_filter="all"))
        problems = self._impossible(brokers)
        if unclean := _with_unclean(values.get("broker", {})):
            why = "an election could lose acknowledged records: set it to false"
            problems.append(Weakness(f"{UNCLEAN} is true on broker {_listed(unclean)}", why))
        elif unclean := _with_unclean(values.get("topic", {})):
            why = "an election could lose their acknowledged records: set it to false with kafka-configs.sh"
            problems.append(Weakness(f"{UNCLEAN} is true of {_listed(unclean)}", why))
        if single := sorted(name for name, topic in described.items() if topic.replicas < 2):
            why = "the topic could be lost with one broker: add replicas with kafka-reassign-partitions.sh"
            problems.append(Weakness(f"one copy of {_listed(single)}, on {len(brokers)} brokers", why))
        return problems

    def _impossible(self, brokers: Sequence[int]) -> list[Weakness]:
        """List Kafka's internal topics whose configured replicas exceed the brokers: without them groups or transactions never work."""
        broker = str(brokers[0])
        resource = ConfigResource(ConfigResourceType.BROKER, broker, None)
        try:
            missing = _INTERNAL.keys() - self.describe(list(_INTERNAL)).keys()
            configs = self.request("cannot read a broker's settings", lambda admin: admin.describe_configs([resource], config_filter="all"))
        except LogUnreachable:
            raise
        except LogError:
            return []  # this user may see neither, as one with the rights of a role
        # Some services report no settings of brokers.
        values = {key: value.get("value") for key, value in configs.get("broker", {}).get(broker, {}).items()}
        return [
            Weakness(
                f"{_INTERNAL[topic]} is {values[_INTERNAL[topic]]} on {len(brokers)} broker{'s' * (len(brokers) > 1)}: "
                f"Kafka cannot make its topic {topic}",
                f"set it to {min(3, len(brokers))} in the brokers' configuration, or start more brokers",
            )
            for topic in sorted(missing)
            if int(values.get(_INTERNAL[topic]) or 0) > len(brokers)
        ]

    def take_spare(self) -> Any:
        """Return the connected, idle consumer that a closed tail has left for reuse; None if there is none."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is None or private_api.connected(spare):
            return spare
        self._end(spare)
        return None

    def keep_spare(self, consumer: Any) -> bool:
        """Keep an idle consumer for `take_spare`; False if it has to be closed."""
        with self._lock:
            if self._client is None or self._spare is not None or not private_api.is_idle(consumer):
                return False
            consumer.unsubscribe()
            self._spare = consumer
            return True

    def close(self) -> None:
        with self._lock:
            clients, self._client, self._spare = [self._client, self._spare], None, None
        for client in filter(None, clients):
            self._end(client)

    def _end(self, client: Any) -> None:
        self.cpu.unwatch(private_api.io_thread(client))
        client.close()


def _fits(key: str, actual: str | None, expected: str) -> bool:
    """Return True if an existing topic's setting suits the expected value: with it, the topic neither loses nor refuses our records."""
    if key in _LEAST:
        return int(actual or 0) >= int(expected)
    return key in _ANY or (key, actual) == ("compression.type", "producer") or set((actual or "").split(",")) == set(expected.split(","))


def _with_unclean(settings: dict[str, dict[str, Any]]) -> list[str]:
    return sorted(name for name, values in settings.items() if str(values.get(UNCLEAN, {}).get("value")).lower() == "true")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
