"""Converts records to rows of an archive's tables. A row from which the record's bytes could not be restored also stores the bytes."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.infra.kafka.bulk import BulkReader
from penstock.pipeline.archive.layout import RECORD, Kind
from penstock.pipeline.archive.relocation import checksum, signed
from penstock.topics import rollouts
from penstock.topics.rollouts import FINISHES
from penstock.topics.wire.checked import NAME
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import CHECKSUM
from penstock.topics.wire.record import RawHeaders, Record

_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def read_tables(reader: BulkReader, kind: Kind, partition: int, *, run: str, first: int, end: int) -> Iterator[tuple[pa.Table, int]]:
    """Yield (rows, offset after the last one) for the records of a partition from offset `first` to before `end`. Raises `LogError`."""
    for block in reader.read(kind.kafka_name(run), partition, first=first, end=end):
        records: Sequence[Record] = block
        if kind.name == "runs":  # this topic has the records of all runs; an empty value is a tombstone
            records = [record for record in block if record.key == run.encode() and record.value]
        yield to_table(kind, records, run=run), block[-1].offset + 1


def to_table(kind: Kind, records: Sequence[Record], *, run: str) -> pa.Table:
    """Convert records to rows, in order. A payload without rows yields one row of nulls."""
    numbers, columns = read_sound(records, run=run) if kind.name == "rollouts" else ([], {})
    if not numbers:
        return _each(kind, records, run=run)[0]
    sound = _table(kind, [records[number] for number in numbers], {name: columns.get(name) for name in kind.schema.names})
    if len(numbers) == len(records):
        return sound
    others = sorted(set(range(len(records))) - set(numbers))
    rest, counts = _each(kind, [records[number] for number in others], run=run)
    order = np.argsort(np.concatenate([numbers, np.repeat(others, counts)]), kind="stable")
    return pa.concat_tables([sound, rest]).take(pa.array(order))


def _each(kind: Kind, records: Sequence[Record], *, run: str) -> tuple[pa.Table, list[int]]:
    """Convert records one by one; return the rows and the number of rows of each record."""
    rows = [_row(kind, record, run=run) for record in records]
    columns, counts = _payload_columns(kind, [payload for payload, _ in rows])
    repeated = None if max(counts, default=1) == 1 else pa.array(np.repeat(np.arange(len(counts)), counts))
    for field in kind.schema:
        if field.name not in columns and field not in RECORD:
            values = pa.array([own.get(field.name) for _, own in rows], field.type)
            # A record's key, headers and other columns are repeated in each of its rows.
            columns[field.name] = values if repeated is None else values.take(repeated)
    return _table(kind, np.repeat(np.array(records, object), counts).tolist(), columns), counts


def _table(kind: Kind, records: Sequence[Record], columns: dict[str, pa.Array | None]) -> pa.Table:
    """Build a table with one row per entry of `records`; missing columns are null."""
    own = {
        "partition": [record.partition for record in records],
        "offset": [record.offset for record in records],
        "timestamp": [record.timestamp_ms for record in records],
        "key": [record.key for record in records],
    }
    arrays = []
    for field in kind.schema:
        column = columns.get(field.name)
        if field.name in own:
            arrays.append(pa.array(own[field.name], field.type))
        else:
            arrays.append(pa.nulls(len(records), field.type) if column is None else column.cast(field.type))
    return pa.table(arrays, schema=kind.schema)


def _row(kind: Kind, record: Record, *, run: str) -> tuple[bytes | None, dict[str, Any]]:
    """Return the payload encoded again (None if it cannot be decoded), and the values of the columns that are not from the payload."""
    record = _scrubbed(kind, record)
    try:
        read_headers, content = kind.read(record, run=run)
        problem = None
    except Unusable as error:
        read_headers, problem = None, f"{error.kind}: {error}"
        try:
            content = kind.decode(record.value)
        except Unusable:
            return _original(record, problem)
    worker = next((text for name, text in record.headers if name == "worker"), None)
    try:
        payload = kind.encode(content)
        expected = kind.headers(content, run=run, worker=worker and worker.decode("ascii"), value=record.value)
        follows = expected.encode(record.value) == record.headers
    except ValueError:  # a worker name that is not ASCII, or arrays of different lengths
        return _original(record, problem)
    columns: dict[str, Any] = {"problem": problem}
    if payload != record.value:
        columns["raw"] = record.value
    if "raw" in columns or not follows:
        columns["headers"] = _as_structs(record.headers)
    for field in kind.facts:
        value = getattr(read_headers, field.name, None)
        columns[field.name] = getattr(expected, field.name) if value is None else value
    return payload, columns


def _scrubbed(kind: Kind, record: Record) -> Record:
    """Return the record without the passwords that earlier releases stored in it."""
    if kind.name not in ("runs", "run", "ledger") or (b'"security"' not in record.value and b'"tracking_uri"' not in record.value):
        return record
    try:
        value = kind.encode(kind.decode(record.value))
    except (Unusable, ValueError):
        return record
    return replace(record, value=value, headers=signed(record.headers, value)) if len(value) < len(record.value) else record


def _original(record: Record, problem: str | None) -> tuple[None, dict[str, Any]]:
    """Return a row that stores only the bytes of the record."""
    return None, {"headers": _as_structs(record.headers), "raw": record.value, "problem": problem}


def _payload_columns(kind: Kind, payloads: Sequence[bytes | None]) -> tuple[dict[str, pa.Array], list[int]]:
    """Decode encoded payloads; return their columns by name and the number of rows of each. None yields a row of nulls."""
    streams = [payload for payload in payloads if payload is not None]
    if not streams:
        return {name: pa.nulls(len(payloads), kind.schema.field(name).type) for name in kind.payload}, [1] * len(payloads)
    batches = _batches(kind.codec.schema, streams)
    batch, sizes = pa.concat_batches(batches), iter([len(batch) for batch in batches])
    columns = {ours: batch[name].cast(kind.schema.field(ours).type) for ours, name in kind.payload.items()}
    counts = [1 if payload is None else next(sizes) for payload in payloads]
    if len(streams) == len(payloads):
        return columns, counts
    numbers = iter(range(len(batch)))
    indices = [None if payload is None else next(numbers) for payload, count in zip(payloads, counts, strict=True) for _ in range(count)]
    rows = pa.array(indices, pa.int64())
    return {name: column.take(rows) for name, column in columns.items()}, counts


def _batches(schema: pa.Schema, streams: Sequence[bytes]) -> list[pa.RecordBatch]:
    """Decode Arrow streams to one batch each, all with `schema`; columns that a stream lacks are null."""
    head, types, batches = schema.serialize().to_pybytes(), {field.name: field.type for field in schema}, []
    for complete, alike in groupby(streams, key=lambda stream: stream.startswith(head)):
        if complete:  # decode as one stream, because parsing the schema costs most of the time
            batches += pa.ipc.open_stream(b"".join([head, *(stream[len(head) : -len(_END)] for stream in alike), _END]))
            continue
        for stream in alike:
            batch = pa.ipc.open_stream(stream).read_next_batch()
            names = batch.schema.names
            columns = [batch[name].cast(type_) if name in names else pa.nulls(len(batch), type_) for name, type_ in types.items()]
            batches.append(pa.RecordBatch.from_arrays(columns, schema=schema))
    return batches


def _as_structs(headers: RawHeaders) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in headers]


_SCHEMA = rollouts.UNLIMITED.schema
_HEAD = _SCHEMA.serialize().to_pybytes()
_WRITTEN = [field for field in _SCHEMA if not field.nullable]
"""Columns that every sample has. The other columns are those of trajectories, null for other samples."""
_MOST_LAYOUTS = 2048
_METADATA_BYTES = 4096
_FACTS = {
    "group": "group",
    "sample": "sample",
    "policy-version-min": "policy_version_min",
    "policy-version-max": "policy_version_max",
    "outcome": "finish",
    "worker": "worker",
    "tokens": "tokens",
}
"""Header after `run` and `schema`, in their order -> the column with its value; `tokens` is the length of `token_ids`."""
_NAN = np.float32("nan").view(np.uint32)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Layout of encoded samples with the same Arrow metadata: which bits are column values and which are fixed.

    A payload that has all fixed bits can be read by slicing bytes, without decoding it.
    """

    size: int
    positions: NDArray[np.intp]
    mask: NDArray[np.uint8]
    fixed: bytes
    values: tuple[slice, ...]
    """Byte ranges of the columns' values and, last, of the validity bitmap of the logprobs."""
    tokens: int
    spans: int
    nulls: int

    def fits(self, value: bytes) -> bool:
        """True if a payload has this size and these fixed bits."""
        return len(value) == self.size and (np.frombuffer(value, np.uint8)[self.positions] & self.mask).tobytes() == self.fixed


_layouts: OrderedDict[bytes, _Layout | None] = OrderedDict()
"""Metadata bytes before a payload's body -> layout; None if our encoder does not write such a payload."""


def read_sound(records: Sequence[Record], *, run: str) -> tuple[list[int], dict[str, pa.Array]]:
    """Read the samples that pass all checks of a reader and that our encoder would write with the same bytes, all at once.

    Returns the indices of these records, and their columns by name.
    """
    fitting = [(number, layout) for number, record in enumerate(records) if (layout := _layout_of(record))]
    if not fitting:
        return [], {}
    columns = _columns([records[number].value for number, _ in fitting], [layout for _, layout in fitting])
    usable = _usable(columns, np.array([layout.nulls for _, layout in fitting]))
    numbers = [number for (number, _), is_usable in zip(fitting, usable.tolist(), strict=True) if is_usable]
    columns = _filtered(columns, usable)
    facts = [columns[name] if name in columns else columns["token_ids"].value_lengths() for name in _FACTS.values()]
    texts = zip(*(array.cast(pa.string()).cast(pa.binary()).to_pylist() for array in facts), strict=True)
    fixed = (("run", run.encode()), ("schema", rollouts.SCHEMA.encode()))
    sound = [_follow(records[number], (*fixed, *zip(_FACTS, row, strict=True))) for number, row in zip(numbers, texts, strict=True)]
    return [number for number, follows in zip(numbers, sound, strict=True) if follows], _filtered(columns, np.array(sound, np.bool_))


def _filtered(columns: dict[str, pa.Array], mask: NDArray[np.bool_]) -> dict[str, pa.Array]:
    return columns if mask.all() else {name: column.filter(pa.array(mask)) for name, column in columns.items()}


def _layout_of(record: Record) -> _Layout | None:
    """Return the layout of a record with a single sample; None if our encoder would write other bytes."""
    value = record.value
    if not value.startswith(_HEAD) or ("schema", rollouts.SCHEMA.encode()) not in record.headers:
        return None
    body = len(_HEAD) + 8 + int.from_bytes(value[len(_HEAD) + 4 : len(_HEAD) + 8], "little")
    if body > len(_HEAD) + _METADATA_BYTES:
        return None
    metadata = value[:body]
    if metadata not in _layouts:
        _layouts[metadata] = _new_layout(value, body)
        if len(_layouts) > _MOST_LAYOUTS:
            _layouts.popitem(last=False)
    layout = _layouts[metadata]
    return layout if layout and layout.fits(value) else None


def _new_layout(value: bytes, body: int) -> _Layout | None:
    """Return the layout of a payload whose metadata end at `body`; None if our encoder would write other bytes, or it has turns."""
    try:
        if rollouts.encode(sample := rollouts.decode(value)) != value or sample.turns is not None or sample.support is not None:
            return None
    except (Unusable, ValueError):
        return None
    buffer = pa.py_buffer(value)
    batch = pa.ipc.open_stream(buffer).read_next_batch()
    ranges = [_value_range(array, buffer.address) for array in batch.columns[: len(_WRITTEN)]]
    ranges.append(_bits(batch["behaviour_logprobs"].values.buffers()[0], len(sample.token_ids), buffer.address))
    free = np.zeros(8 * len(value), np.bool_)
    for start, bits in ranges:
        free[8 * start : 8 * start + bits] = True
    mask = ~np.packbits(free, bitorder="little")
    fixed = body + np.flatnonzero(mask[body:])
    return _Layout(
        size=len(value),
        positions=fixed,
        mask=mask[fixed],
        fixed=(np.frombuffer(value, np.uint8)[fixed] & mask[fixed]).tobytes(),
        values=tuple(slice(start, start + -(-bits // 8)) for start, bits in ranges),
        tokens=len(sample.token_ids),
        spans=len(sample.span_versions),
        nulls=batch["behaviour_logprobs"].values.null_count,
    )


def _value_range(array: pa.Array, base: int) -> tuple[int, int]:
    """Return (first byte, number of bits) of a column's values in a payload that starts at the address `base`."""
    if pa.types.is_list(array.type):
        array = array.values
    data = array.buffers()[-1]
    return _bits(data, 8 * data.size if pa.types.is_string(array.type) and data else len(array) * array.type.bit_width, base)


def _bits(buffer: pa.Buffer | None, bits: int, base: int) -> tuple[int, int]:
    return (buffer.address - base, bits) if buffer and bits else (0, 0)


def _columns(values: Sequence[bytes], layouts: Sequence[_Layout]) -> dict[str, pa.Array]:
    """Slice the columns out of payloads with these layouts, and add the oldest and newest policy version of each sample."""
    *parts, valid = zip(*([value[part] for part in layout.values] for value, layout in zip(values, layouts, strict=True)), strict=True)
    tokens, spans = (np.array(lengths, np.int64) for lengths in zip(*((layout.tokens, layout.spans) for layout in layouts), strict=True))
    # Bit index of each token in the joined bitmaps, where each sample starts at a new byte.
    bytes_each = -(-tokens // 8)
    bit = np.arange(tokens.sum()) + np.repeat(8 * (np.cumsum(bytes_each) - bytes_each) - (np.cumsum(tokens) - tokens), tokens)
    columns = {}
    for field, data in zip(_WRITTEN, parts, strict=True):
        buffers = [None, pa.py_buffer(b"".join(data))]
        if pa.types.is_string(field.type):
            buffers.insert(1, _offsets(np.array([len(text) for text in data])))
        if not pa.types.is_list(field.type):
            columns[field.name] = pa.Array.from_buffers(field.type, len(values), buffers, 0)
            continue
        lengths = spans if field.name.startswith("span") else tokens
        if field.type.value_type == pa.bool_():
            buffers[1] = _picked(buffers[1], bit)
        if field.type.value_field.nullable:
            bitmaps = [bits or b"\xff" * size for bits, size in zip(valid, bytes_each.tolist(), strict=True)]
            buffers[0] = _picked(pa.py_buffer(b"".join(bitmaps)), bit)
        items = pa.Array.from_buffers(field.type.value_type, int(lengths.sum()), buffers)
        columns[field.name] = pa.Array.from_buffers(field.type, len(values), [None, _offsets(lengths)], 0, 0, [items])
    versions, starts = columns["span_versions"].values.to_numpy(), np.cumsum(spans) - spans
    for extreme, bound in ((np.minimum, "min"), (np.maximum, "max")):
        columns[f"policy_version_{bound}"] = pa.array(extreme.reduceat(versions, starts), pa.int64())
    return columns


def _offsets(lengths: NDArray[np.int64]) -> pa.Buffer:
    return pa.py_buffer(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _picked(bits: pa.Buffer, indices: NDArray[np.int64]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[indices], bitorder="little"))


def _usable(columns: dict[str, pa.Array], nulls: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask of the samples that pass all checks of a reader; `nulls` are the recorded numbers of null logprobs."""
    tokens, spans = (columns[name].value_lengths().to_numpy() for name in ("token_ids", "span_versions"))
    # The following arrays have one entry per token; `owner` is the row of its sample.
    owner = np.repeat(np.arange(len(tokens)), tokens)
    array = columns["behaviour_logprobs"].values
    logprobs = np.frombuffer(array.buffers()[1], np.float32, len(owner)) if len(owner) else np.empty(0, np.float32)
    missing, null = np.isnan(logprobs), np.asarray(array.is_null().to_numpy(zero_copy_only=False))
    mask = columns["loss_mask"].values.to_numpy(zero_copy_only=False)
    usable = np.bincount(owner[null], minlength=len(tokens)) == nulls
    usable[owner[(missing != null) | (missing & (logprobs.view(np.uint32) != _NAN)) | (~np.isfinite(logprobs) & mask)]] = False
    usable[owner[columns["token_ids"].values.to_numpy() < 0]] = False
    # Partly masked samples of several versions are left to the slow path: their oldest version is that of the trained tokens.
    usable[np.intersect1d(owner[~mask], np.flatnonzero(spans > 1))] = False
    bounds, starts = columns["span_starts"].offsets.to_numpy(), columns["span_starts"].values.to_numpy()
    falls = np.flatnonzero(np.diff(starts) < 0) + 1
    usable[np.searchsorted(bounds, np.setdiff1d(falls, bounds), side="right") - 1] = False
    usable &= (starts[bounds[:-1]] == 0) & (starts[bounds[1:] - 1] <= tokens)
    usable &= ~np.isnan(columns["temperature"].to_numpy()) & ~np.isnan(columns["top_p"].to_numpy())
    for name in ("group", "sample", "policy_version_min", "top_k", "started_ns", "ended_ns"):
        usable &= columns[name].to_numpy() >= 0
    named = pc.and_(pc.match_substring_regex(columns["worker"], f"^(?:{NAME})$"), pc.is_in(columns["finish"], pa.array(FINISHES)))
    return usable & named.to_numpy(zero_copy_only=False)


def _follow(record: Record, expected: RawHeaders) -> bool:
    """True if a record has exactly these headers and a valid checksum."""
    return record.headers[:-1] == expected and record.headers[-1] == (CHECKSUM, checksum(expected, record.value))
