"""Rows of `rollouts`, many at a time: a sample's lengths say where each of its values stands, so whole columns are cut out of a block.

The rule: a record takes this way only if every byte of its payload and of its headers is what our own encoder writes for the values
that are cut out of it; any other record goes the way of all other topics.
"""

import zlib
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.infra.kafka.blocks import Block
from penstock.pipeline.archive.arrays import Flags, Ints, any_of, array, fixed, lists, places, runs, texts
from penstock.pipeline.archive.layout import KINDS
from penstock.pipeline.archive.rows import to_table
from penstock.pipeline.archive.sample_headers import SampleHeaders
from penstock.pipeline.archive.sample_layout import BY_SIZE, FRONT, TAIL, Layout, Lengths, Words, of_block, payload

KIND = KINDS["rollouts"]
SCHEMA = KIND.schema
_KNOWN = 4096
"""Combinations of lengths kept, 4 kB each."""
_FINISHES = array([BY_SIZE.get(size) for size in range(9)], pa.string())


class RolloutRows:
    """Turns blocks of `rollouts` into rows; keeps the combinations of lengths it has met."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._headers = SampleHeaders(run)
        self._fronts: dict[Lengths, bytes] = {}
        self._sums: dict[Lengths, int] = {}

    def table(self, block: Block) -> pa.Table:
        """One row a record, in their order."""
        usual, layout = of_block(block)
        usual_rows = np.flatnonzero(usual)
        if not len(usual_rows):
            return to_table(KIND, block.records(), run=self._run)
        table, good = self._cut(block if usual.all() else block.take(usual_rows), layout)
        if good.all() and len(good) == len(block):
            return table
        taken = usual_rows[good]
        rest = np.setdiff1d(np.arange(len(block)), taken)
        long_way = to_table(KIND, block.records(rest.tolist()), run=self._run)
        both = pa.concat_tables([table.filter(fixed(good, pa.bool_())), long_way]).combine_chunks()
        return both.take(fixed(np.argsort(np.concatenate([taken, rest])), pa.int64()))

    def _cut(self, block: Block, layout: Layout) -> tuple[pa.Table, Flags]:
        """The rows of records with these lengths, and which of them are beyond doubt."""
        begins, ends, rows = block.values[0], block.values[1], len(block)
        shapes: list[Lengths] = layout.lengths()
        self._learn(set(shapes))
        good = np.fromiter(map(block.data.startswith, map(self._fronts.__getitem__, shapes), begins.tolist()), np.bool_, rows)
        good &= np.fromiter(map(block.data.startswith, repeat(TAIL), (ends - len(TAIL)).tolist()), np.bool_, rows)
        values = [block.data[begin:end] for begin, end in zip((begins + FRONT).tolist(), ends.tolist(), strict=True)]
        sizes = layout.size + len(TAIL)
        words, first = np.frombuffer(b"".join(values), np.uint64), np.cumsum(sizes) - sizes
        columns, facts, sound = _columns(words, first, layout)
        good &= layout.fits(words, first) & sound
        good &= self._headers.follow(block, facts, values, map(self._sums.__getitem__, shapes))
        keys = np.maximum(block.keys[1] - block.keys[0], 0)
        columns |= {
            "partition": fixed(np.full(rows, block.partition, np.int32), pa.int32()),
            "offset": fixed(block.offsets, pa.int64()),
            "timestamp": fixed(block.times_ms, SCHEMA.field("timestamp").type),
            "key": texts(
                runs(np.frombuffer(block.data, np.uint8), block.keys[0], keys), keys, pa.binary(), there=block.keys[1] >= block.keys[0]
            ),
        }
        arrays = [columns[field.name] if field.name in columns else pa.nulls(rows, field.type) for field in SCHEMA]
        return pa.table(arrays, schema=SCHEMA), good

    def _learn(self, shapes: set[Lengths]) -> None:
        """Know the front of every payload of these lengths."""
        if len(self._fronts) + len(shapes) > _KNOWN:
            self._fronts.clear()
            self._sums.clear()
        for shape in shapes - self._fronts.keys():
            front = payload(shape)[:FRONT]
            self._fronts[shape], self._sums[shape] = front, zlib.crc32(front)


def _columns(words: Words, first: Ints, layout: Layout) -> tuple[dict[str, pa.Array], list[list[Any]], Flags]:
    """The typed columns of some samples, the facts in their headers, and which hold nothing that an encoder or a reader would refuse."""
    tokens, spans = layout.tokens, layout.spans
    numbers, octets = words.view(np.int32), words.view(np.uint8)
    logprobs = runs(words.view(np.float32), first + layout.logprobs >> 2, tokens)
    versions = runs(numbers, first + layout.versions >> 2, spans)
    starts = runs(numbers, first + layout.starts >> 2, spans)
    mask, full = _mask(runs(octets, first + layout.mask, tokens + 7 >> 3), tokens)
    oldest, newest = (bound.reduceat(versions, np.cumsum(spans) - spans).astype(np.int64) for bound in (np.minimum, np.maximum))
    group, sample = (words[(first >> 3) + number].view(np.int64) for number in range(2))
    after = [words[(first + layout.finished >> 3) + number] for number in range(1, 6)]
    names = runs(octets, first + layout.name, layout.worker)
    plain = np.where(names < 0x80, names, np.uint8(0))
    ends, text = np.cumsum(layout.worker), plain.tobytes().decode()
    facts = [group.tolist(), sample.tolist(), oldest.tolist(), newest.tolist(), [BY_SIZE[size] for size in layout.finish.tolist()]]
    facts += [[text[begin:end] for begin, end in zip((ends - layout.worker).tolist(), ends.tolist(), strict=True)], tokens.tolist()]
    # With a mask the oldest version is that of a trained token.
    sound = ~any_of(names > 0x7F, layout.worker) & ((spans == 1) | full) & ~any_of(np.isnan(logprobs), tokens)
    sound &= _starts_fit(starts, spans, tokens) & (np.minimum(group, sample) >= 0) & (oldest >= 0)
    columns = {
        "group": fixed(group, pa.int64()),
        "sample": fixed(sample, pa.int64()),
        "token_ids": lists(fixed(runs(numbers, first + layout.ids >> 2, tokens), pa.int32()), tokens),
        "behaviour_logprobs": lists(fixed(logprobs, pa.float32()), tokens),
        "loss_mask": lists(fixed(mask, pa.bool_()), tokens),
        "span_versions": lists(fixed(versions, pa.int32()), spans),
        "span_starts": lists(fixed(starts, pa.int32()), spans),
        "finish": _FINISHES.take(fixed(layout.finish, pa.int64())),
        "temperature": fixed(after[0], pa.float64()),
        "top_p": fixed(after[1], pa.float64()),
        "top_k": fixed(after[2], pa.int64()),
        "started_ns": fixed(after[3], pa.int64()),
        "ended_ns": fixed(after[4], pa.int64()),
        "worker": texts(plain, layout.worker, pa.string()),
        "policy_version_min": fixed(oldest, pa.int64()),
        "policy_version_max": fixed(newest, pa.int64()),
    }
    return columns, facts, sound


def _mask(octets: NDArray[np.uint8], tokens: Ints) -> tuple[Flags, Flags]:
    """The loss masks one after the other, from bits that begin a new octet with each sample; and which of them are all true."""
    bits = np.unpackbits(octets, bitorder="little").view(np.bool_)
    room = tokens + 7 >> 3 << 3
    mask = bits[places(np.cumsum(room) - room, tokens)]
    return mask, ~any_of(~mask, tokens)


def _starts_fit(starts: NDArray[np.int32], spans: Ints, tokens: Ints) -> Flags:
    """Whether the spans of each sample begin at 0, never fall, and end within it."""
    last = np.cumsum(spans)
    fits: Flags = (starts[last - spans] == 0) & (starts[last - 1] <= tokens)
    falls = np.concatenate([[False], np.diff(starts) < 0])
    falls[last - spans] = False
    return fits & ~any_of(falls, spans)
