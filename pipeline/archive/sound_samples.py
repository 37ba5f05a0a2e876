"""Records of one sample that our own encoder has written, by the thousand: their columns, and which of them can be restored from these.

The rule: a record counts as sound only where its bytes and headers follow from its columns and no reader would refuse it; each of the
others is decoded and encoded again by itself.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.pipeline.archive.relocation import checksum
from penstock.topics import rollouts
from penstock.topics.rollouts import FINISHES
from penstock.topics.wire.checked import NAME
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import CHECKSUM
from penstock.topics.wire.record import RawHeaders, Record

_SCHEMA = rollouts.UNLIMITED.schema
_HEAD = _SCHEMA.serialize().to_pybytes()
_WRITTEN = [field for field in _SCHEMA if not field.nullable]
"""The columns that have values; those of trajectories, which come after them, are null."""
_LAYOUTS_KEPT = 2048
_METADATA_BYTES = 4096
"""More than the layout of one sample takes."""
_FACTS = {
    "group": "group",
    "sample": "sample",
    "policy-version-min": "policy_version_min",
    "policy-version-max": "policy_version_max",
    "outcome": "finish",
    "worker": "worker",
    "tokens": "tokens",
}
"""Header after `run` and `schema`, in their order -> the column that says the same, or that of the tokens' number."""
_NAN = np.float32("nan").view(np.uint32)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Payloads with the same metadata differ only in the values of their columns; all other bits are fixed."""

    size: int
    places: NDArray[np.intp]
    """Of the bytes with fixed bits."""
    mask: NDArray[np.uint8]
    fixed: bytes
    values: tuple[slice, ...]
    """The bytes of each column's values, then those that say which logprobs are not null."""
    tokens: int
    spans: int
    nulls: int
    """Logprobs that are null."""

    def fits(self, value: bytes) -> bool:
        """True if our own encoder lays out the values of this payload in the same way."""
        return len(value) == self.size and (np.frombuffer(value, np.uint8)[self.places] & self.mask).tobytes() == self.fixed


_layouts: OrderedDict[bytes, _Layout | None] = OrderedDict()
"""By the bytes before a payload's body; None for one that our own encoder would not write."""


def read_sound(records: Sequence[Record], *, run: str) -> tuple[list[int], dict[str, pa.Array]]:
    """The positions of sound records, and by name the columns of their payloads and headers."""
    fitting = [(number, layout) for number, record in enumerate(records) if (layout := _layout_of(record))]
    if not fitting:
        return [], {}
    columns = _columns([records[number].value for number, _ in fitting], [layout for _, layout in fitting])
    usable = _usable(columns, np.array([layout.nulls for _, layout in fitting]))
    numbers = [number for (number, _), whole in zip(fitting, usable.tolist(), strict=True) if whole]
    columns = _kept(columns, usable)
    said = [columns[name] if name in columns else columns["token_ids"].value_lengths() for name in _FACTS.values()]
    texts = zip(*(array.cast(pa.string()).cast(pa.binary()).to_pylist() for array in said), strict=True)
    fixed = (("run", run.encode()), ("schema", rollouts.SCHEMA.encode()))
    sound = [_follow(records[number], (*fixed, *zip(_FACTS, row, strict=True))) for number, row in zip(numbers, texts, strict=True)]
    return [number for number, follows in zip(numbers, sound, strict=True) if follows], _kept(columns, np.array(sound, np.bool_))


def _kept(columns: dict[str, pa.Array], chosen: NDArray[np.bool_]) -> dict[str, pa.Array]:
    return columns if chosen.all() else {name: column.filter(pa.array(chosen)) for name, column in columns.items()}


def _layout_of(record: Record) -> _Layout | None:
    """The layout of a record of one sample, where it is the one that our own encoder makes of such values."""
    value = record.value
    if not value.startswith(_HEAD) or ("schema", rollouts.SCHEMA.encode()) not in record.headers:
        return None
    body = len(_HEAD) + 8 + int.from_bytes(value[len(_HEAD) + 4 : len(_HEAD) + 8], "little")
    if body > len(_HEAD) + _METADATA_BYTES:
        return None
    metadata = value[:body]
    if metadata not in _layouts:
        _layouts[metadata] = _learned(value, body)
        if len(_layouts) > _LAYOUTS_KEPT:
            _layouts.popitem(last=False)
    layout = _layouts[metadata]
    return layout if layout and layout.fits(value) else None


def _learned(value: bytes, body: int) -> _Layout | None:
    try:
        if rollouts.encode(sample := rollouts.decode(value)) != value or sample.turns is not None or sample.support is not None:
            return None
    except (Unusable, ValueError):
        return None
    buffer = pa.py_buffer(value)
    batch = pa.ipc.open_stream(buffer).read_next_batch()
    places = [_place(array, buffer.address) for array in batch.columns[: len(_WRITTEN)]]
    places.append(_bits(batch["behaviour_logprobs"].values.buffers()[0], len(sample.token_ids), buffer.address))
    free = np.zeros(8 * len(value), np.bool_)
    for begin, bits in places:
        free[8 * begin : 8 * begin + bits] = True
    mask = ~np.packbits(free, bitorder="little")
    fixed = body + np.flatnonzero(mask[body:])
    return _Layout(
        size=len(value),
        places=fixed,
        mask=mask[fixed],
        fixed=(np.frombuffer(value, np.uint8)[fixed] & mask[fixed]).tobytes(),
        values=tuple(slice(begin, begin + -(-bits // 8)) for begin, bits in places),
        tokens=len(sample.token_ids),
        spans=len(sample.span_versions),
        nulls=batch["behaviour_logprobs"].values.null_count,
    )


def _place(array: pa.Array, base: int) -> tuple[int, int]:
    """Where in a payload at the address `base` the values of a column begin, and how many bits they have."""
    if pa.types.is_list(array.type):
        array = array.values
    data = array.buffers()[-1]
    return _bits(data, 8 * data.size if pa.types.is_string(array.type) and data else len(array) * array.type.bit_width, base)


def _bits(buffer: pa.Buffer | None, bits: int, base: int) -> tuple[int, int]:
    return (buffer.address - base, bits) if buffer and bits else (0, 0)


def _columns(values: Sequence[bytes], layouts: Sequence[_Layout]) -> dict[str, pa.Array]:
    """The columns of payloads whose layouts they fit, and the oldest and newest version of each."""
    *parts, valid = zip(*([value[place] for place in layout.values] for value, layout in zip(values, layouts, strict=True)), strict=True)
    tokens, spans = (np.array(lengths, np.int64) for lengths in zip(*((layout.tokens, layout.spans) for layout in layouts), strict=True))
    # Of each token its place among bits that begin with a whole byte in each sample.
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
            whole = [bits or b"\xff" * size for bits, size in zip(valid, bytes_each.tolist(), strict=True)]
            buffers[0] = _picked(pa.py_buffer(b"".join(whole)), bit)
        items = pa.Array.from_buffers(field.type.value_type, int(lengths.sum()), buffers)
        columns[field.name] = pa.Array.from_buffers(field.type, len(values), [None, _offsets(lengths)], 0, 0, [items])
    versions, starts = columns["span_versions"].values.to_numpy(), np.cumsum(spans) - spans
    for extreme, bound in ((np.minimum, "min"), (np.maximum, "max")):
        columns[f"policy_version_{bound}"] = pa.array(extreme.reduceat(versions, starts), pa.int64())
    return columns


def _offsets(lengths: NDArray[np.int64]) -> pa.Buffer:
    return pa.py_buffer(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _picked(bits: pa.Buffer, places: NDArray[np.int64]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[places], bitorder="little"))


def _usable(columns: dict[str, pa.Array], nulls: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which samples are sound and have the same bytes when they are written again; `nulls`: how many logprobs are said to be null."""
    tokens, spans = (columns[name].value_lengths().to_numpy() for name in ("token_ids", "span_versions"))
    # One entry a token, from here on: `owner` is the row it belongs to.
    owner = np.repeat(np.arange(len(tokens)), tokens)
    array = columns["behaviour_logprobs"].values
    logprobs = np.frombuffer(array.buffers()[1], np.float32, len(owner)) if len(owner) else np.empty(0, np.float32)
    missing, null = np.isnan(logprobs), np.asarray(array.is_null().to_numpy(zero_copy_only=False))
    mask = columns["loss_mask"].values.to_numpy(zero_copy_only=False)
    usable = np.bincount(owner[null], minlength=len(tokens)) == nulls
    usable[owner[(missing != null) | (missing & (logprobs.view(np.uint32) != _NAN)) | (~np.isfinite(logprobs) & mask)]] = False
    usable[owner[columns["token_ids"].values.to_numpy() < 0]] = False
    # The oldest version of a sample that is masked in parts is that of its trained tokens.
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
    """True if a record has these headers and the checksum of both."""
    return record.headers[:-1] == expected and record.headers[-1] == (CHECKSUM, checksum(expected, record.value))
