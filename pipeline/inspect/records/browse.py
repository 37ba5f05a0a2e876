"""Runs of a broker, a run's topics and their records as plain data; undecodable records are included with the reason."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.infra.errors import ConfigError, RecordMissing
from penstock.infra.log import Log
from penstock.pipeline.config.plugins import nearest
from penstock.pipeline.runtime.topic_reader import POISON, drain, scan
from penstock.topics import dead_letters, groups, ledger, metrics, prompts, rollouts, runs, weights
from penstock.topics.catalogue import RUNS_TOPIC, TOPICS, TURNS, topic_name
from penstock.topics.turns import calls, replies
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from penstock.topics.wire.secrets import without_passwords

if TYPE_CHECKING:
    from penstock.pipeline.inspect.tables.token_texts import TokenTexts

COUNTED_BYTES, COUNTED_OFFSETS = 64 << 20, 200_000
"""Largest topic whose records are counted, since counting means reading them."""
SHOWN_BYTES = 32

_READERS: Mapping[str, Callable[..., object]] = {
    "run": runs.read,
    "prompts": prompts.read,
    "rollouts": rollouts.read_all,
    "calls": calls.read,
    "replies": replies.read,
    "ledger": ledger.read,
    "metrics": metrics.read,
    "dead-letters": dead_letters.read,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRow:
    """One topic of a run."""

    topic: str
    kafka_name: str
    partitions: int
    offsets: int
    """Offsets in use: records and transaction markers, without those deleted by retention."""
    records: int | None
    """None for a topic that is too large to count."""
    bytes: int | None
    """Disk space in this machine's broker; None for any other broker."""


def kafka_topic(run: str, topic: str) -> str:
    """The Kafka name of a run's topic, or of the registry of runs. Raises `ConfigError` naming the nearest topic."""
    plain = topic.removeprefix(f"{run}.")
    if plain in (RUNS_TOPIC, "runs"):
        return RUNS_TOPIC
    if plain not in (*TOPICS, *TURNS):
        raise ConfigError(f"there is no topic {topic!r}: {', '.join((*TOPICS, *TURNS))}{nearest(plain, (*TOPICS, *TURNS))}")
    return topic_name(run, plain)


def list_topics(log: Log, run: str, *, sizes: Mapping[str, int] = MappingProxyType({}), count_records: bool = True) -> list[TopicRow]:
    """A run's topics in pipeline order, without missing ones. `sizes` are bytes by Kafka name; counting records means reading them."""
    counts = {topic: log.partitions(topic_name(run, topic)) for topic in (*TOPICS, *TURNS)}
    rows = []
    for topic, count in counts.items():
        if count is None:
            continue
        name = topic_name(run, topic)
        partitions = [(name, partition) for partition in range(count)]
        beginning_offsets, end_offsets = log.beginning_offsets(partitions), log.end_offsets(partitions)
        offsets = sum(end_offsets[tp] - beginning_offsets[tp] for tp in partitions)
        small = count_records and topic != "weights" and sizes.get(name, 0) <= COUNTED_BYTES and offsets <= COUNTED_OFFSETS
        rows.append(
            TopicRow(
                topic=topic,
                kafka_name=name,
                partitions=count,
                offsets=offsets,
                records=sum(1 for _ in scan(log, name)) if small else None,
                bytes=sizes.get(name),
            )
        )
    return rows


def tail(log: Log, run: str, topic: str, *, count: int, follow: bool, wait_s: float = 0.5) -> Iterator[Record]:
    """The newest `count` records of a topic over all its partitions, by time; with `follow`, then every new record without end."""
    name = kafka_topic(run, topic)
    partitions = [(name, partition) for partition in range(log.partitions(name) or 0)]
    beginning_offsets, end_offsets = log.beginning_offsets(partitions), log.end_offsets(partitions)
    window, newest = max(16, 2 * count), []
    while count:  # offsets are not records: markers of transactions take some, so a window may hold too few
        reader = log.tail({tp: max(beginning_offsets[tp], end_offsets[tp] - window) for tp in partitions})
        newest = list(drain(reader, end_offsets))
        if len(newest) >= count or all(end_offsets[tp] - window <= beginning_offsets[tp] for tp in partitions):
            break
        reader.close()
        window *= 4
    else:
        reader = log.tail({tp: end_offsets[tp] for tp in partitions})
    try:
        yield from sorted(newest, key=lambda record: (record.timestamp_ms, record.partition, record.offset))[-count:] if count else ()
        while follow:
            yield from reader.poll(wait_s)
    finally:
        reader.close()


def record_at(log: Log, run: str, topic: str, *, partition: int, offset: int) -> Record:
    """One record by partition and offset. Raises `RecordMissing` if there is none."""
    name = kafka_topic(run, topic)
    if partition >= (count := log.partitions(name) or 0):
        raise RecordMissing(f"{name} has no partition {partition}: {f'0 to {count - 1}' if count else 'there is no such topic'}")
    return log.read(name, partition, [offset])[0]


def view(record: Record, *, run: str) -> dict[str, Any]:
    """A record as plain data, with the reason if it is unusable; of a dead letter also the `refused` record and its `claims_group`."""
    payload, problem = _payload(record, run)
    dead_letter_fields = _refused(record, run) if record.topic == topic_name(run, "dead-letters") and problem is None else {}
    return {
        **dead_letter_fields,
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "time_s": record.timestamp_ms / 1000,
        "key": _text(record.key),
        "headers": {name: _text(value) for name, value in record.headers},
        "bytes": len(record.value),
        "payload": payload,
        "unusable": problem,
    }


def _refused(record: Record, run: str) -> dict[str, Any]:
    dead_letter = dead_letters.read(record, run=run)[1]
    # A poison record is not decoded here either.
    refused = (
        None if dead_letter.kind == POISON or dead_letter.topic == record.topic else view(dead_letters.to_record(dead_letter), run=run)
    )
    return {"refused": refused, "claims_group": dead_letters.claimed_group(dead_letter)}


def _payload(record: Record, run: str) -> tuple[dict[str, Any] | None, str | None]:
    try:
        _read(record, run)
    except Unusable as error:
        return None, f"{error.kind}: {error}; begins with {_text(record.value[:SHOWN_BYTES])}"
    # The columns as any Arrow library reads them: the bytes were checked above.
    table = pa.ipc.open_stream(record.value).read_all()
    maps = {field.name for field in table.schema if pa.types.is_map(field.type)}
    rows = [{name: dict(value) if name in maps else _plain(value) for name, value in row.items()} for row in table.to_pylist()]
    for row, name in itertools.product(rows, ("config", "details")):  # an earlier release left passwords there
        if isinstance(row.get(name), str):
            row[name] = without_passwords(row[name])
    return rows[0] if len(rows) == 1 else {"samples": rows}, None


def _read(record: Record, run: str) -> None:
    topic = record.topic.removeprefix(f"{run}.")
    if record.topic == RUNS_TOPIC:
        runs.read(record, run=_text(record.key) or "")
    elif topic == "groups":  # one part of a group is shown alone
        groups.check(record, run=run)
        groups.decode_part(record.value)
    elif topic == "weights":
        (weights.read_chunk if record.partition else weights.read)(record, run=run)
    else:
        _READERS[topic](record, run=run)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return _text(value[:SHOWN_BYTES]) if len(value) <= SHOWN_BYTES else f"{len(value)} bytes, {value[:SHOWN_BYTES].hex()}…"
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


def _text(value: bytes | None) -> str | None:
    """Bytes as text if they are printable ASCII, otherwise in hexadecimal."""
    if value is None:
        return None
    text = value.decode("ascii", "replace")
    return text if text.isprintable() and "\ufffd" not in text else f"0x{value.hex()}"


SHOWN_ITEMS = 24
SHOWN_TEXT = 80
SHOWN_SAMPLE = 24
HIDDEN = frozenset({"run", "schema", "sha256", "crc32", "part", "parts", "tokens", "sample-tokens", "samples", "no-reward", "reward-mean"})
"""Headers that a line leaves out: they are the same for all records or part of the payload's summary."""


def as_json_line(record: Record, *, run: str) -> str:
    return json.dumps(view(record, run=run))


def as_line(record: Record, *, run: str, texts: "TokenTexts | None" = None) -> str:
    """A record as one line: time, partition, offset, headers, and a summary of its payload; `texts` decodes the tokens of samples."""
    fields = view(record, run=run)
    moment = clock("%H:%M:%S", fields["time_s"])
    topic = record.topic.rpartition(".")[2]
    hidden = HIDDEN | {"outcome"} if topic == "rollouts" else HIDDEN
    shown = " ".join(f"{name}={value}" for name, value in fields["headers"].items() if name not in hidden)
    gist = f"UNUSABLE {fields['unusable']}" if fields["unusable"] else _gist(topic, fields["payload"], texts)
    return f"{moment} {record.partition}/{record.offset} {shown}  {gist}".rstrip()


def clock(form: str, time_s: float) -> str:
    """The local time; the seconds if it is outside the calendar, which a record may contain."""
    try:
        return time.strftime(form, time.localtime(time_s))
    except (ValueError, OverflowError, OSError):
        return f"{time_s:.0f} s"


def _gist(topic: str, payload: dict[str, Any], texts: "TokenTexts | None") -> str:
    match topic:
        case "prompts":
            gist = repr(payload["prompt"])
        case "rollouts":
            samples = payload.get("samples", [payload])
            gist = ", ".join(f"{_text_of(sample, texts)}{sample['finish']} after {len(sample['token_ids'])} tokens" for sample in samples)
        case "calls":
            gist = f"turn {payload['turn']} after {len(payload['token_ids'])} tokens"
        case "replies":
            gist = f"turn {payload['turn']}: {payload['finish']} after {len(payload['token_ids'])} tokens"
        case "groups":
            scored = " ".join(
                f"{'none' if sample['reward'] is None else format(sample['reward'], 'g')} {_quoted(sample['completion'])}"
                for sample in payload["samples"]
            )
            gist = " · ".join(filter(None, (payload["reason"], scored)))
        case "ledger" | "metrics":
            numbers = payload.get("metrics") or payload.get("values") or {}
            doing = (payload.get("labels") or {}).get("doing", "")
            gist = " ".join(
                [
                    f"step {payload['step']}" if payload["step"] is not None else doing,
                    *(f"{name}={value:.4g}" for name, value in numbers.items()),
                ]
            )
        case "dead-letters":
            gist = f"{payload['topic']}/{payload['partition']}/{payload['offset']}: {payload['reason']}"
        case "weights":
            gist = (
                f"{payload['nbytes']} bytes, chunks: {len(payload['chunk_sizes'])}" if "nbytes" in payload else f"chunk {payload['index']}"
            )
        case _:
            gist = f"{payload['run']} {payload['status']}"
    return gist if len(gist) <= SHOWN_TEXT else gist[:SHOWN_TEXT] + "…"


def _text_of(sample: Mapping[str, Any], texts: "TokenTexts | None") -> str:
    text = None if texts is None else texts.completion(sample["token_ids"])
    return "" if text is None else f"{_quoted(text)} "


def _quoted(text: str) -> str:
    return repr(text if len(text) <= SHOWN_SAMPLE else text[:SHOWN_SAMPLE] + "…")


def as_page(data: Mapping[str, Any]) -> str:
    """A record over many lines, long lists cut short."""
    when = clock("%Y-%m-%d %H:%M:%S", data["time_s"])
    lines = [
        f"{data['topic']} partition {data['partition']} offset {data['offset']}, {when}, key {data['key']}, {data['bytes']} bytes",
        "headers",
    ]
    lines += [f"  {name:<20} {value}" for name, value in data["headers"].items()]
    if data["unusable"]:
        return "\n".join([*lines, f"unusable: {data['unusable']}"])
    lines += ["payload", *_nested(data["payload"], indent=2)]
    if data.get("claims_group") is not None:
        lines.append(f"it claims group {data['claims_group']}: `penstock explain RUN {data['claims_group']}` says what became of that")
    if data.get("refused") is not None:
        lines += ["", "the refused record", "", as_page(data["refused"])]
    return "\n".join(lines)


def _nested(value: Mapping[str, Any], *, indent: int) -> list[str]:
    lines = []
    for name, item in value.items():
        if isinstance(item, list) and item and isinstance(item[0], dict):
            for index, inner in enumerate(item):
                lines += [f"{' ' * indent}{name}[{index}]", *_nested(inner, indent=indent + 2)]
        elif isinstance(item, dict) and len(str(item)) > SHOWN_TEXT:
            lines += [f"{' ' * indent}{name}", *_nested(item, indent=indent + 2)]
        else:
            lines.append(f"{' ' * indent}{name:<20} {_short(item)}")
    return lines


def _short(item: Any) -> str:
    return f"[{first_of(item, most=SHOWN_ITEMS)}]" if isinstance(item, list) and len(item) > SHOWN_ITEMS else str(item)


def first_of(items: Sequence[Any], *, most: int) -> str:
    """The items, or the first of them and how many there are: `first_of([3, 4, 5], most=2)` is "3, 4, … 3 in all"."""
    shown = ", ".join(map(str, items[:most]))
    return shown if len(items) <= most else f"{shown}, … {len(items)} in all"
