"""Rows of `rollouts`, many at a time: records of one shape have the same bytes but for the values, so whole columns are cut out.

The rule: a record takes this way only if every byte of its payload and of its headers is what our own encoder writes for the values
that are cut out of it; any other record goes the way of all other topics.
"""

import operator
import zlib
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.archive.rows import to_table
from pipeline.archive.tables import KINDS
from pipeline.audit.kafka_source import to_record
from topics import rollouts
from topics.errors import Unusable
from topics.rollouts import Rollout
from topics.samples import no_trajectory

KIND = KINDS["rollouts"]
NAMES = ("run", "schema", "group", "sample", "policy-version-min", "policy-version-max", "outcome", "worker", "tokens", "crc32")
"""The headers of a sample, in their order."""
_KNOWN = 4096
_SAID = 100_000
_ALL = 2**64 - 1

Words = NDArray[np.uint64]
Ints = NDArray[np.int64]


class Layout:
    """Where everything stands in a record of one shape: `checks` are words of 8 bytes that are no values, as (place, bits, content)."""

    __slots__ = ("checks", "crc", "cut", "finish", "front", "full", "outcome", "places", "spans", "tail", "tokens", "value")

    def __init__(self, sample: Rollout) -> None:
        tokens, spans, size = len(sample.token_ids), len(sample.span_starts), len(sample.worker.encode())
        payload = rollouts.encode(sample)
        ids, marks, numbers, name = (_padded(count) for count in (4 * tokens, (tokens + 7) // 8, 4 * spans, size))
        end = payload.rindex(no_trajectory(1).body)
        self.value = slice(end - (120 + 2 * ids + marks + 2 * numbers + name), len(payload))
        self.front, self.tail = payload[: self.value.start], payload[end:]
        self.crc, self.finish = zlib.crc32(self.front), sample.finish
        self.full = np.packbits(np.ones(tokens, np.bool_), bitorder="little").tobytes()
        versions = 48 + 2 * ids + marks
        starts, texts = versions + numbers + 8, versions + 2 * numbers + 8
        at = {
            "token_ids": slice(24, 24 + 4 * tokens),
            "behaviour_logprobs": slice(32 + ids, 32 + ids + 4 * tokens),
            "loss_mask": slice(40 + 2 * ids, 40 + 2 * ids + (tokens + 7) // 8),
            "worker": slice(texts + 64, texts + 64 + size),
            "tail": slice(end - len(self.front), len(payload) - len(self.front)),
            "span_versions": slice(versions, versions + 4 * spans),
            "span_starts": slice(starts, starts + 4 * spans),
        }
        self.cut = operator.itemgetter(*list(at.values())[: 5 if spans == 1 else 7])
        self.places = versions >> 3, starts >> 3, texts + 16 >> 3
        self.tokens, self.spans, self.outcome = tokens, spans, self.finish.encode()
        pairs = [(16, tokens), (24 + ids, tokens), (32 + 2 * ids, tokens), (versions - 8, spans), (starts - 8, spans)]
        words = [(place, _ALL, count << 32) for place, count in [*pairs, (texts, len(self.finish)), (texts + 56, size)]]
        words.append((texts + 8, _ALL, int.from_bytes(self.finish.encode(), "little")))
        bits = {"token_ids": 32 * tokens, "behaviour_logprobs": 32 * tokens, "loss_mask": tokens, "span_versions": 32 * spans}
        bits |= {"span_starts": 32 * spans, "worker": 8 * size}
        for column, used in bits.items():  # what fills up the last word of a column is zero
            rest = _ALL << used % 64 & _ALL if used % 64 else 0
            words.append((at[column].start + (used // 64 * 8 if rest else -8), rest, 0))
        self.checks = [(place >> 3, kept, content) for place, kept, content in words]


class RolloutRows:
    """Turns messages of `rollouts` into rows; keeps the shapes it has met."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._identity = (run.encode(), rollouts.SCHEMA.encode())
        self._first = [("run", self._identity[0]), ("schema", self._identity[1])]
        self._line = b"\nrun=%b\nschema=%b" % self._identity
        self._said = [Said(name) for name in NAMES[2:-1]]
        self._known: dict[tuple[int, bytes, bytes, int], int | None] = {}
        self._layouts: list[Layout] = []
        self._checks = np.empty((3, 0, 0), np.uint64)
        self._lengths = np.empty((6, 0), np.int64)

    def table(self, batch: Sequence[Any]) -> pa.Table:
        """One row a message, in their order."""
        values, headers = [message.value() for message in batch], [message.headers() for message in batch]
        known = self._known
        try:  # as a rule all are like some that were met before
            shapes = [known[len(v), h[8][1], h[6][1], len(h[7][1])] for v, h in zip(values, headers, strict=True)]
        except (LookupError, TypeError):
            shapes = [self._shape(value, said) for value, said in zip(values, headers, strict=True)]
        usual = [row for row, shape in enumerate(shapes) if shape is not None]
        if not usual:
            return to_table(KIND, [to_record(message) for message in batch], run=self._run)
        pick: Callable[[list[Any]], list[Any]] = (
            (lambda found: found) if len(usual) == len(batch) else (lambda found: [found[i] for i in usual])
        )
        table, good = self._cut(pick(list(batch)), pick(values), pick(headers), np.array(pick(shapes), np.int64))
        if len(usual) == len(batch) and good.all():
            return table
        taken = np.array(usual)[good]
        rest = np.setdiff1d(np.arange(len(batch)), taken)
        long_way = to_table(KIND, [to_record(batch[row]) for row in rest], run=self._run)
        order = np.argsort(np.concatenate([taken, rest]), kind="stable")
        return pa.concat_tables([table.filter(pa.array(good)), long_way]).combine_chunks().take(pa.array(order))

    def _shape(self, value: bytes | None, said: list[tuple[str, bytes]] | None) -> int | None:
        """The number of the layout that a record seems to have; None for one that has to go the long way."""
        if value is None or said is None or len(said) != len(NAMES):
            return None
        key = (len(value), said[8][1], said[6][1], len(said[7][1] or b""))
        try:
            return self._known[key]
        except KeyError:
            return self._learn(key, value)

    def _learn(self, key: tuple[int, bytes, bytes, int], value: bytes) -> int | None:
        found: int | None = None
        try:
            sample = rollouts.decode(value)
            if not np.isnan(sample.behaviour_logprobs).any() and len(self._layouts) < _KNOWN:
                layout = Layout(sample)
                if layout.value.stop == len(value):
                    found = len(self._layouts)
                    self._layouts.append(layout)
                    self._checks = np.array([one.checks for one in self._layouts], np.uint64).transpose(2, 0, 1)
                    sizes = [(one.tokens, one.spans, one.value.stop - one.value.start, *one.places) for one in self._layouts]
                    self._lengths = np.array(sizes, np.int64).T
        except Unusable:
            return None  # this one; the next of its lengths may be sound
        if len(self._known) < _KNOWN:
            self._known[key] = found
        return found

    def _cut(self, batch: list[Any], values: list[bytes], headers: list[Any], shapes: Ints) -> tuple[pa.Table, NDArray[np.bool_]]:
        """The rows of records of known shapes, and which of them are beyond doubt."""
        layouts = [self._layouts[shape] for shape in shapes.tolist()]
        bodies: list[bytes] = [value[layout.value] for value, layout in zip(values, layouts, strict=True)]
        good = np.fromiter(map(bytes.startswith, values, [layout.front for layout in layouts]), np.bool_, len(values))
        tokens, spans, sizes, *places = self._lengths[:, shapes]
        good &= sizes == np.fromiter(map(len, bodies), np.int64, len(bodies))
        if not good.all():  # cut elsewhere than it should be: its words are not looked at
            bodies = [
                body if sound else bytes(layout.value.stop - layout.value.start)
                for body, sound, layout in zip(bodies, good, layouts, strict=True)
            ]
        first = (np.cumsum(sizes) - sizes) >> 3
        words: Words = np.frombuffer(b"".join(bodies), np.uint64)
        spots, bits, contents = self._checks[:, shapes]
        good &= ((words[first[:, None] + spots.astype(np.int64)] & bits) == contents).all(axis=1)
        columns, facts, sound = _columns(bodies, layouts, words, first, tokens, spans, places)
        columns["finish"] = pa.array([layout.finish for layout in self._layouts]).take(pa.array(shapes))
        good &= sound
        good &= self._headers_follow(headers, facts, bodies, layouts)
        columns |= {
            "partition": pa.array([message.partition() for message in batch], pa.int32()),
            "offset": pa.array([message.offset() for message in batch], pa.int64()),
            "timestamp": pa.array([message.timestamp()[1] for message in batch], pa.timestamp("ms", tz="UTC")),
            "key": pa.array([message.key() for message in batch], pa.binary()),
        }
        schema = KIND.schema
        arrays = [columns[field.name] if field.name in columns else pa.nulls(len(batch), field.type) for field in schema]
        return pa.table(arrays, schema=schema), good

    def _headers_follow(
        self, headers: list[Any], facts: tuple[list[Any], ...], bodies: list[bytes], layouts: list[Layout]
    ) -> NDArray[np.bool_]:
        """Whether the headers are those that the columns make, checksum included."""
        groups, samples, oldest, newest, workers = facts
        for kept in self._said:
            kept.trim()
        values: tuple[list[Any], ...] = (
            groups,
            samples,
            oldest,
            newest,
            [one.outcome for one in layouts],
            workers,
            [one.tokens for one in layouts],
        )
        pairs = [list(map(said.__getitem__, column)) for said, column in zip(self._said, values, strict=True)]
        lines = [list(map(said.line, column)) for said, column in zip(self._said, values, strict=True)]
        whole = map(b"".join, zip(repeat(self._line), *lines))
        sums = map(zlib.crc32, whole, map(zlib.crc32, bodies, [layout.crc for layout in layouts]))
        checks = zip(repeat(NAMES[-1]), map(b"%08x".__mod__, sums))
        wanted = list(map(list, zip(*map(repeat, self._first), *pairs, checks, strict=False)))
        if headers == wanted:
            return np.ones(len(headers), np.bool_)
        return np.fromiter(map(operator.eq, headers, wanted), np.bool_, len(headers))


class Said(dict[Any, tuple[str, bytes]]):
    """Number or text -> the header that says it; `line` gives its line behind the payload's checksum."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._lines: dict[Any, bytes] = {}
        self.line = self._lines.__getitem__

    def __missing__(self, value: int | bytes) -> tuple[str, bytes]:
        text = value if isinstance(value, bytes) else b"%d" % value
        self._lines[value] = b"\n%b=%b" % (self._name.encode(), text)
        found = self[value] = self._name, text
        return found

    def trim(self) -> None:
        """Forget, once there is much to forget."""
        if len(self) > _SAID:
            self.clear()
            self._lines.clear()


def _columns(
    bodies: list[bytes],
    layouts: list[Layout],
    words: Words,
    first: Ints,
    tokens: Ints,
    spans: Ints,
    places: Sequence[Ints],
) -> tuple[dict[str, pa.Array], tuple[list[Any], ...], NDArray[np.bool_]]:
    """The typed columns of some records, what their headers have to say, and which of them hold nothing that our encoder would refuse."""
    cut, versions, starts = _cut_out(bodies, layouts, words, [first + place for place in places[:2]], alone=bool((spans == 1).all()))
    logprobs = np.frombuffer(b"".join(cut[1]), np.float32)
    tails = [layout.tail for layout in layouts]
    same = list(cut[4]) == tails
    sound = np.ones(len(bodies), np.bool_) if same else np.fromiter(map(operator.eq, cut[4], tails), np.bool_, len(bodies))
    if (missing := np.isnan(logprobs)).any():
        sound &= ~_any(missing, tokens)
    mask, full = _mask(cut[2], [one.full for one in layouts], tokens)
    oldest = np.minimum.reduceat(versions, np.cumsum(spans) - spans)
    newest = np.maximum.reduceat(versions, np.cumsum(spans) - spans)
    sound &= (spans == 1) | full  # with a mask the oldest version is that of a trained token
    sound &= _starts_fit(starts, spans, tokens)
    fixed = [words[first + places[2] + number].view(np.int64) for number in range(5)]
    group, sample = words[first].view(np.int64), words[first + 1].view(np.int64)
    columns = {
        "group": pa.array(group),
        "sample": pa.array(sample),
        "token_ids": _lists(np.frombuffer(b"".join(cut[0]), np.int32), tokens),
        "behaviour_logprobs": _lists(logprobs, tokens),
        "loss_mask": _lists(mask, tokens),
        "span_versions": _lists(versions, spans),
        "span_starts": _lists(starts, spans),
        "temperature": pa.array(fixed[0].view(np.float64)),
        "top_p": pa.array(fixed[1].view(np.float64)),
        "top_k": pa.array(fixed[2]),
        "started_ns": pa.array(fixed[3]),
        "ended_ns": pa.array(fixed[4]),
        "policy_version_min": pa.array(oldest, pa.int64()),
        "policy_version_max": pa.array(newest, pa.int64()),
    }
    columns["worker"], ascii_only = _texts(cut[3])
    facts = group.tolist(), sample.tolist(), oldest.tolist(), newest.tolist(), list(cut[3])
    return columns, facts, sound & ascii_only


def _cut_out(
    bodies: list[bytes], layouts: list[Layout], words: Words, places: Sequence[Ints], *, alone: bool
) -> tuple[list[Any], NDArray[np.int32], NDArray[np.int32]]:
    """What differs in length, and the spans' versions and starts; `alone` where every sample has one span."""
    pieces = [layout.cut(body) for layout, body in zip(layouts, bodies, strict=True)]
    if alone:
        versions, starts = (words[place].astype(np.uint32).view(np.int32) for place in places)
        return list(zip(*pieces, strict=True)), versions, starts
    spans = [
        found[5:] if len(found) > 5 else (body[8 * one.places[0] :][:4], body[8 * one.places[1] :][:4])
        for found, body, one in zip(pieces, bodies, layouts, strict=True)
    ]
    versions, starts = (np.frombuffer(b"".join(column), np.int32) for column in zip(*spans, strict=True))
    return list(zip(*[found[:5] for found in pieces], strict=True)), versions, starts


def _mask(cut: Sequence[bytes], full: Sequence[bytes], tokens: Ints) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """The loss masks one after the other, and which of them are all true."""
    if list(cut) == full:
        return np.ones(int(tokens.sum()), np.bool_), np.ones(len(cut), np.bool_)
    bits = np.unpackbits(np.frombuffer(b"".join(cut), np.uint8), bitorder="little").view(np.bool_)
    room = np.fromiter(map(len, cut), np.int64, len(cut)) << 3
    place = np.arange(len(bits)) - np.repeat(np.cumsum(room) - room, room)
    return bits[place < np.repeat(tokens, room)], np.fromiter(map(operator.eq, cut, full), np.bool_, len(cut))


def _starts_fit(starts: NDArray[np.int32], spans: Ints, tokens: Ints) -> NDArray[np.bool_]:
    """Whether the spans of each sample begin at 0, never fall, and end within it."""
    last = np.cumsum(spans)
    fits = (starts[last - spans] == 0) & (starts[last - 1] <= tokens)
    if len(starts) > len(spans):
        falls = np.concatenate([[False], np.diff(starts) < 0])
        falls[last - spans] = False
        fits &= ~_any(falls, spans)
    return fits


def _texts(cut: Sequence[bytes]) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Names as text; one that is not ASCII goes the long way."""
    if all(name.isascii() for name in set(cut)):
        return pa.array(cut, pa.binary()).cast(pa.string()), np.ones(len(cut), np.bool_)
    plain = [name if name.isascii() else b"" for name in cut]
    return pa.array(plain, pa.binary()).cast(pa.string()), np.fromiter(map(bytes.isascii, cut), np.bool_, len(cut))


def _lists(values: NDArray[Any], lengths: Ints) -> pa.Array:
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return pa.ListArray.from_arrays(pa.array(bounds), pa.array(values))


def _any(flags: NDArray[np.bool_], lengths: Ints) -> NDArray[np.bool_]:
    """Whether any of each row's flags is set."""
    total = np.concatenate([[0], np.cumsum(flags)])
    last = np.cumsum(lengths)
    return total[last] > total[last - lengths]


def _padded(size: int) -> int:
    return size + 7 & -8
