"""A run's topics and their records as plain data and as text. Undecodable records are included, with the reason."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.infra.errors import ConfigError, RecordMissing
from penstock.infra.log import Log, drain
from penstock.pipeline.config.plugins import nearest
from penstock.pipeline.runtime.topic_reader import POISON, scan
from penstock.topics import dead_letters, groups, ledger, metrics, prompts, rollouts, runs, weights
from penstock.topics.catalogue import RUNS_TOPIC, TOPICS, TURNS, topic_name
from penstock.topics.turns import calls, replies
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from penstock.topics.wire.secrets import without_passwords

if TYPE_CHECKING:
    from penstock.pipeline.inspect.tables.token_texts import TokenTexts

COUNTED_BYTES, COUNTED_OFFSETS = 64 << 20, 200_000
"""Largest topic, in bytes and in offsets, whose records are counted. Counting requires reading them."""
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
    """Size of one topic of a run."""

    topic: str
    kafka_name: str
    partitions: int
    offsets: int
    """Number of retained offsets, of records and transaction markers."""
    records: int | None
    """Number of records; None if the topic is too large to count."""
    bytes: int | None
    """Disk space on this machine's embedded broker; None for any other broker."""


def kafka_topic(run: str, topic: str) -> str:
    """Return the Kafka name of a run's topic or of the topic of all runs. Raises `ConfigError` with the nearest name."""
    plain = topic.removeprefix(f"{run}.")
    if plain in (RUNS_TOPIC, "runs"):
        return RUNS_TOPIC
    if plain not in (*TOPICS, *TURNS):
        raise ConfigError(f"there is no topic {topic!r}; expected one of {', '.join((*TOPICS, *TURNS))}{nearest(plain, (*TOPICS, *TURNS))}")
    return topic_name(run, plain)


def list_topics(log: Log, run: str, *, sizes: Mapping[str, int] = MappingProxyType({}), count_records: bool = True) -> list[TopicRow]:
    """Return a run's existing topics in pipeline order. `sizes` maps Kafka names to bytes; records are read if `count_records`."""
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
        records = sum(1 for _ in scan(log, name)) if small else None
        rows.append(TopicRow(topic=topic, kafka_name=name, partitions=count, offsets=offsets, records=records, bytes=sizes.get(name)))
    return rows


def tail(log: Log, run: str, topic: str, *, count: int, follow: bool, wait_s: float = 0.5) -> Iterator[Record]:
    """Yield the newest `count` records over all partitions of a topic, by time; if `follow`, then every new record forever."""
    name = kafka_topic(run, topic)
    partitions = [(name, partition) for partition in range(log.partitions(name) or 0)]
    beginning_offsets, end_offsets = log.beginning_offsets(partitions), log.end_offsets(partitions)
    window, newest = max(16, 2 * count), []
    while count:  # transaction markers take offsets too, so a window of offsets may contain too few records
        reader = log.tail({tp: max(beginning_offsets[tp], end_offsets[tp] - window) for tp in partitions})
        newest = list(drain(reader, end_offsets))
        if len(newest) >= count or all(end_offsets[tp] - window <= beginning_offsets[tp] for tp in partitions):
            break
        reader.close()
        window *= 4
    else:
        reader = log.tail({tp: end_offsets[tp] for tp in partitions})
    with closing(reader):
        yield from sorted(newest, key=lambda record: (record.timestamp_ms, record.partition, record.offset))[-count:] if count else ()
        while follow:
            yield from reader.poll(wait_s)


def record_at(log: Log, run: str, topic: str, *, partition: int, offset: int) -> Record:
    """Read the record at a partition and offset. Raises `RecordMissing` if there is none."""
    name = kafka_topic(run, topic)
    if partition >= (count := log.partitions(name) or 0):
        has = f"its partitions are 0 to {count - 1}" if count else "the topic does not exist"
        raise RecordMissing(f"{name} has no partition {partition}: {has}")
    return log.read(name, partition, [offset])[0]


def view(record: Record, *, run: str) -> dict[str, Any]:
    """Convert a record to plain data, with the reason if it is unusable. A dead letter also has the `refused` record and `claims_group`."""
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
    """Return the record that a dead letter contains, as `view` shows it, and the group that its headers name."""
    dead_letter = dead_letters.read(record, run=run)[1]
    # A poison record is not decoded, because decoding it may crash.
    hidden = dead_letter.kind == POISON or dead_letter.topic == record.topic
    refused = None if hidden else view(dead_letters.to_record(dead_letter), run=run)
    return {"refused": refused, "claims_group": dead_letters.claimed_group(dead_letter)}


def _payload(record: Record, run: str) -> tuple[dict[str, Any] | None, str | None]:
    """Return (payload as plain data, None), or (None, reason) if the record is unusable."""
    try:
        _read(record, run)
    except Unusable as error:
        return None, f"{error.kind}: {error}; the payload starts with {_text(record.value[:SHOWN_BYTES])}"
    # The payload was checked above, so its columns can be read directly.
    table = pa.ipc.open_stream(record.value).read_all()
    maps = {field.name for field in table.schema if pa.types.is_map(field.type)}
    rows = [{name: dict(value) if name in maps else _plain(value) for name, value in row.items()} for row in table.to_pylist()]
    for row, name in itertools.product(rows, ("config", "details")):  # earlier releases stored passwords in these columns
        if isinstance(row.get(name), str):
            row[name] = without_passwords(row[name])
    return rows[0] if len(rows) == 1 else {"samples": rows}, None


def _read(record: Record, run: str) -> None:
    """Raise `Unusable` unless the record can be used by the readers of its topic."""
    topic = record.topic.removeprefix(f"{run}.")
    if record.topic == RUNS_TOPIC:
        runs.read(record, run=_text(record.key) or "")
    elif topic == "groups":  # check only this part of the group
        groups.check(record, run=run)
        groups.decode_part(record.value)
    elif topic == "weights":
        (weights.read_chunk if record.partition else weights.read)(record, run=run)
    else:
        _READERS[topic](record, run=run)


def _plain(value: Any) -> Any:
    """Convert bytes in a nested value to text; only length and start of long bytes are shown."""
    if isinstance(value, bytes):
        return _text(value[:SHOWN_BYTES]) if len(value) <= SHOWN_BYTES else f"{len(value)} bytes, {value[:SHOWN_BYTES].hex()}…"
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


def _text(value: bytes | None) -> str | None:
    """Convert bytes to text if they are printable ASCII, otherwise to hexadecimal."""
    if value is None:
        return None
    text = value.decode("ascii", "replace")
    return text if text.isprintable() and "\ufffd" not in text else f"0x{value.hex()}"


SHOWN_ITEMS = 24
SHOWN_TEXT = 80
SHOWN_SAMPLE = 24
HIDDEN = frozenset({"run", "schema", "sha256", "crc32", "part", "parts", "tokens", "sample-tokens", "samples", "no-reward", "reward-mean"})
"""Headers that are not shown in a line, because all records have the same ones or the summary of the payload includes them."""


def as_line(record: Record, *, run: str, texts: "TokenTexts | None" = None) -> str:
    """Format a record in one line: time, partition, offset, headers, summary of the payload. `texts` decodes token ids of samples."""
    fields = view(record, run=run)
    moment = clock("%H:%M:%S", fields["time_s"])
    topic = record.topic.rpartition(".")[2]
    hidden = HIDDEN | {"outcome"} if topic == "rollouts" else HIDDEN
    shown = " ".join(f"{name}={value}" for name, value in fields["headers"].items() if name not in hidden)
    gist = f"UNUSABLE {fields['unusable']}" if fields["unusable"] else _gist(topic, fields["payload"], texts)
    return f"{moment} {record.partition}/{record.offset} {shown}  {gist}".rstrip()


def clock(form: str, time_s: float) -> str:
    """Format a Unix time as local time; if it is outside the calendar, as it may be in a damaged record, as seconds."""
    try:
        return time.strftime(form, time.localtime(time_s))
    except (ValueError, OverflowError, OSError):
        return f"{time_s:.0f} s"


def _gist(topic: str, payload: dict[str, Any], texts: "TokenTexts | None") -> str:
    """Summarise a payload in at most `SHOWN_TEXT` characters."""
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
            head = f"step {payload['step']}" if payload["step"] is not None else doing
            gist = " ".join([head, *(f"{name}={value:.4g}" for name, value in numbers.items())])
        case "dead-letters":
            gist = f"{payload['topic']}/{payload['partition']}/{payload['offset']}: {payload['reason']}"
        case "weights":
            is_chunk = "nbytes" not in payload
            gist = f"chunk {payload['index']}" if is_chunk else f"{payload['nbytes']} bytes, chunks: {len(payload['chunk_sizes'])}"
        case _:
            gist = f"{payload['run']} {payload['status']}"
    return gist if len(gist) <= SHOWN_TEXT else gist[:SHOWN_TEXT] + "…"


def _text_of(sample: Mapping[str, Any], texts: "TokenTexts | None") -> str:
    text = None if texts is None else texts.completion(sample["token_ids"])
    return "" if text is None else f"{_quoted(text)} "


def _quoted(text: str) -> str:
    return repr(text if len(text) <= SHOWN_SAMPLE else text[:SHOWN_SAMPLE] + "…")


def as_page(data: Mapping[str, Any]) -> str:
    """Format a record over several lines; long lists are shortened."""
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
        group = data["claims_group"]
        lines.append(f"the refused record names group {group}, whose status is shown by: penstock explain RUN {group}")
    if data.get("refused") is not None:
        lines += ["", "the refused record", "", as_page(data["refused"])]
    return "\n".join(lines)


def _nested(value: Mapping[str, Any], *, indent: int) -> list[str]:
    """Return a line per field, with the fields of nested records indented below."""
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
    """Format all items, or the first ones and their number: `first_of([3, 4, 5], most=2)` is "3, 4, … 3 in all"."""
    shown = ", ".join(map(str, items[:most]))
    return shown if len(items) <= most else f"{shown}, … {len(items)} in all"
