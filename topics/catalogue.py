"""The table of topics: those of a run, their partitions, and the settings they are created with."""

import re
from dataclasses import dataclass

RUNS_TOPIC = "penstock.runs"
TOPICS = ("run", "prompts", "rollouts", "groups", "weights", "ledger", "metrics", "dead-letters")
"""Topics of a run that are archived and audited."""
TURNS = ("calls", "replies")
"""Turns of trajectories, in runs with environment workers. Not archived: each turn is in its trajectory's record too."""
BY_GROUP = ("prompts", "rollouts", "groups", *TURNS)
"""Topics in which a group stays in one partition."""
CONTROL = tuple(f"control-{role}" for role in ("launcher", "feeder", "rollout", "scorer", "trainer", "evaluator"))
"""A topic for each role with exclusive control records or whose evaluations may end a run; only the role's Kafka user may write it.
Used only while the run is active, so neither archived nor audited."""
STATE = "state"
"""Snapshot of the others, for readers: neither archived nor audited, as it follows from them."""

MAX_RECORD_BYTES = (16 << 20) + (64 << 10)
"""[bytes] Largest record: 16 MiB of payload with headers and framing, twice the largest part that Penstock writes."""
MAX_DEAD_LETTER_BYTES = 18 << 20
"""[bytes] Largest dead letter: a record of `MAX_RECORD_BYTES` inside another record."""
DELETED_SEGMENT_BYTES = 32 << 20
"""Segment size of topics whose old records are deleted: disk is freed by full segments only, and a segment must fit the largest record."""
KEPT_SEGMENT_BYTES = 256 << 20
"""Segment size of `weights` if all versions are retained: a segment takes a descriptor and two memory maps of the broker, which after a
crash reads the newest one of each partition again."""

_RUN_ID = re.compile(r"(?!latest\Z)[a-z0-9][a-z0-9-]{0,63}")
_RECORD = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "max.message.bytes": str(MAX_RECORD_BYTES),
    # Ours are never compressed; the broker stores others' so that every reader can decode them, unless they inflate beyond the limit.
    "compression.type": "uncompressed",
}
_SETTINGS: dict[str, dict[str, str]] = {
    # Chunks of old versions are deleted on purpose; without the short delay their files would occupy the disk for another minute.
    "weights": {**_RECORD, "file.delete.delay.ms": "1000"},
    "dead-letters": {**_RECORD, "max.message.bytes": str(MAX_DEAD_LETTER_BYTES)},
    # A record per writer every two seconds, of which only the newest counts; compaction starts with the second segment.
    **{topic: {"cleanup.policy": "compact", "segment.bytes": str(4 << 20), "max.message.bytes": str(1 << 20)} for topic in CONTROL},
    STATE: {"cleanup.policy": "compact", "segment.bytes": str(DELETED_SEGMENT_BYTES), "max.message.bytes": str(MAX_RECORD_BYTES)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSpec:
    """Name, partitions and settings of a Kafka topic; replication depends on the cluster."""

    name: str
    partitions: int
    configs: dict[str, str]


RUNS_SPEC = TopicSpec(name=RUNS_TOPIC, partitions=1, configs={"cleanup.policy": "compact", "max.message.bytes": str(MAX_RECORD_BYTES)})
"""The one topic shared by all runs: everyone can write to it, so no worker acts on its records."""


def is_run_id(run: str) -> bool:
    """Return True if a text can be a topic prefix and a folder name, and no command reads it as an option or keyword."""
    return _RUN_ID.fullmatch(run) is not None


def check_run_id(run: str) -> str:
    """Return the run id. Raises `ValueError` if it cannot be the prefix of a topic."""
    if not is_run_id(run):
        raise ValueError(f"run id {run!r} is not allowed: use 1 to 64 characters of a-z, 0-9 and -, not starting with -, and not 'latest'")
    return run


def topic_name(run: str, topic: str) -> str:
    """Return the Kafka name `RUN.TOPIC` of one of a run's topics."""
    assert topic in (*TOPICS, *TURNS, *CONTROL, STATE), topic
    return f"{run}.{topic}"


def control_topic(run: str, role: str) -> str:
    """Return the Kafka name of a role's control topic."""
    return topic_name(run, f"control-{role}")


def is_ours(name: str) -> bool:
    """Return True if a topic of the cluster belongs to Penstock: to one run, or to all runs."""
    run, dot, topic = name.partition(".")
    return name == RUNS_TOPIC or (bool(dot and is_run_id(run)) and topic in (*TOPICS, *TURNS, *CONTROL, STATE))


def control_topics_of(run: str) -> dict[str, TopicSpec]:
    """Return Kafka name -> specification of a run's control topics, which runs of earlier releases lack."""
    specs = topics_of(run, partitions=1)
    return {name: specs[name] for name in (topic_name(run, topic) for topic in CONTROL)}


def topics_of(
    run: str, *, partitions: int, weight_partitions: int = 3, weight_segment_bytes: int = KEPT_SEGMENT_BYTES,
    sample_segment_bytes: int | None = None, turns: bool = False,
) -> dict[str, TopicSpec]:  # fmt: skip
    """Return Kafka name -> specification of all topics of a run. Raises `ValueError` for an invalid run id or count.

    `prompts`, `rollouts` and `groups`, and with `turns` `calls` and `replies`, have `partitions`: a group has the same partition number in
    all. Their segments have `sample_segment_bytes`, if None the broker's default. `weights` has one partition for manifests, one for
    version 0 and the others for chunks; with only two, the chunks of version 0 are in the partition of the others.
    """
    check_run_id(run)
    if partitions < 1:
        raise ValueError(f"a topic needs at least 1 partition, not {partitions}")
    if weight_partitions < 2:
        raise ValueError(f"the weights topic needs at least 2 partitions, one for manifests and one for chunks, not {weight_partitions}")
    counts = {**dict.fromkeys(BY_GROUP, partitions), "weights": weight_partitions}
    specs = {}
    for topic in (*TOPICS, *(TURNS if turns else ()), *CONTROL, STATE):
        name = topic_name(run, topic)
        configs = dict(_SETTINGS.get(topic, _RECORD))
        if topic == "weights":
            configs["segment.bytes"] = str(weight_segment_bytes)
        if topic in BY_GROUP and sample_segment_bytes is not None:
            configs["segment.bytes"] = str(sample_segment_bytes)
        specs[name] = TopicSpec(name=name, partitions=counts.get(topic, 1), configs=configs)
    return specs
