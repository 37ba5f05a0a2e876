"""The register of runs: the compacted topic `penstock.runs` with the status of each, and each run's own `<run>.run` with what it is.

The rule: a broker address and a run id are all that a worker needs; its configuration comes from the run's own topic, which only
those can write to who may write this run.
"""

import contextlib
import time
from dataclasses import replace

from penstock.infra.errors import ConfigError
from penstock.infra.log import Log
from penstock.pipeline.config.plugins import nearest
from penstock.pipeline.runtime.topic_reader import scan
from penstock.topics import runs as topic
from penstock.topics.catalogue import RUNS_TOPIC, topic_name
from penstock.topics.runs import RunRecord
from penstock.topics.wire.errors import NewerSchema, Unusable
from penstock.topics.wire.record import Outgoing

WRITE_LIMIT_S = 60.0


def write(log: Log, record: RunRecord) -> None:
    """Write down what a run is, and then how it stands; a run of an earlier release has no topic of its own."""
    own = topic_name(record.run, "run")
    if log.partitions(own) is not None:
        _append(log, own, record)
    write_status(log, record)


def write_status(log: Log, record: RunRecord) -> None:
    """Append a run's newest status to the register; the whole record where an earlier release has left it nowhere else."""
    _append(log, RUNS_TOPIC, record if _made(log, record.run) is None else topic.status_of(record))


def _append(log: Log, name: str, record: RunRecord) -> None:
    producer = log.producer()
    try:
        value = topic.encode(record)
        headers = topic.headers(record).encode(value)
        producer.send(Outgoing(topic=name, partition=0, key=record.run.encode(), headers=headers, value=value)).offset(WRITE_LIMIT_S)
    finally:
        producer.close()


def mark(log: Log, record: RunRecord, *, status: topic.Status) -> RunRecord:
    """The same run with another status, written to the register."""
    changed = replace(record, status=status, updated_ns=time.time_ns())
    write_status(log, changed)
    return changed


def all_runs(log: Log) -> list[RunRecord]:
    """The status of every registered run, oldest first; records nobody can use are passed over."""
    states: dict[str, RunRecord] = {}
    for record in scan(log, RUNS_TOPIC):
        key = (record.key or b"").decode("ascii", "replace")
        if not record.value:  # the run was deleted
            states.pop(key, None)
            continue
        try:
            state = topic.read(record, run=key)[1]
        except (Unusable, NewerSchema):  # of a newer release: another run's, which is no reason to stop
            continue
        states[key] = state  # the last one counts, as for compaction: the clocks of machines differ
    return sorted(states.values(), key=lambda run: run.created_ns)


def find(log: Log, run: str) -> RunRecord | None:
    """What a run is and its newest status, or None when it is not registered."""
    status = next((record for record in all_runs(log) if record.run == run), None)
    if status is None:
        return None
    made = _made(log, run)
    return status if made is None else topic.with_status(made, status)


def _made(log: Log, run: str) -> RunRecord | None:
    """The last usable record of the run's own topic; None where an earlier release has registered the run."""
    made = None
    for record in scan(log, topic_name(run, "run")):
        with contextlib.suppress(Unusable):
            made = topic.read(record, run=run)[1]
    return made


def resolve(log: Log, text: str) -> str:
    """A run id from an id, a unique prefix, or `latest`. Raises `ConfigError`."""
    runs = all_runs(log)
    names = [record.run for record in runs]
    if not names:
        raise ConfigError("no run is registered on this broker; start one with `penstock run CONFIG`")
    if text == "latest":
        return names[-1]
    if text in names:
        return text
    matches = [name for name in names if name.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"run {text!r} is ambiguous: {', '.join(matches[:5])}")
    raise ConfigError(f"no run {text!r} on this broker{nearest(text, names)}; see `penstock runs`")
