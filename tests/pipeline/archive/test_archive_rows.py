"""Records of every topic as rows of an archive: what comes back is what was there, byte for byte, and what was changed can be read."""

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.infra.kafka.blocks import Batch, Block, parse, varint
from penstock.infra.kafka.client_repairs.record_format import PackedHeaders, record_body
from penstock.pipeline.archive.arrays import array
from penstock.pipeline.archive.identity import Identity
from penstock.pipeline.archive.laying import Step, first_kept, steps
from penstock.pipeline.archive.layout import KINDS, Kind, kind_of
from penstock.pipeline.archive.restore import to_records, whole_groups
from penstock.pipeline.archive.rollouts_rows import RolloutRows
from penstock.pipeline.archive.rows import to_table
from penstock.topics import dead_letters, groups, rollouts, weights
from penstock.topics.rollouts import Rollout
from penstock.topics.weights import Chunk, Manifest
from penstock.topics.wire.record import Record
from tests.support.a_run import RUN, Teller, as_records

HEADERS = KINDS["rollouts"].schema.field("headers").type


def as_block(records: list[Record]) -> Block:
    """What the broker sends of records, in one batch."""
    data = bytearray()
    for record in records:
        headers = PackedHeaders(record.headers)
        offset, time_ms = record.offset, record.timestamp_ms - records[0].timestamp_ms
        body = record_body(offset_delta=offset, time_delta_ms=time_ms, key=record.key, value=record.value, headers=headers)
        data += varint(len(body)) + body
    batch = Batch(0, len(data), len(records), 0, records[0].timestamp_ms, None)
    return parse(records[0].topic, records[0].partition, data, [batch])


def drawn(number: int, rng: np.random.Generator) -> Rollout:
    """A sample of any length, with gaps, masks and several versions now and then."""
    tokens, spans = int(rng.integers(0, 90)), int(rng.integers(1, 4)) if rng.random() < 0.4 else 1
    starts = np.sort(rng.integers(0, tokens + 1, spans)).astype(np.int32)
    starts[0] = 0
    logprobs, mask = -rng.random(tokens).astype(np.float32), np.ones(tokens, np.bool_)
    if rng.random() < 0.2:
        mask = rng.random(tokens) < 0.5
    if rng.random() < 0.1 and tokens:
        logprobs[0], mask[0] = np.nan, False
    return Rollout(
        group=number // 4,
        sample=number % 4,
        token_ids=rng.integers(0, 150_000, tokens).astype(np.int32),
        behaviour_logprobs=logprobs,
        loss_mask=mask,
        span_versions=rng.integers(0, 9, spans).astype(np.int32),
        span_starts=starts,
        finish=("stop", "length", "abort")[number % 3],
        temperature=float(rng.random()),
        top_p=1.0,
        top_k=number % 2,
        started_ns=number,
        ended_ns=number + 7,
        worker=("rollout-0", "rollout-11", "r")[int(rng.integers(0, 3))],
    )


def sample_record(sample: Rollout, offset: int) -> Record:
    value = rollouts.encode(sample)
    return Record(
        topic=f"{RUN}.rollouts",
        partition=3,
        offset=offset,
        timestamp_ms=1_700_000_000_000 + offset,
        key=b"%d" % sample.group,
        headers=rollouts.headers(sample, run=RUN).encode(value),
        value=value,
    )


def flipped(record: Record, rng: np.random.Generator) -> Record:
    """The record with one bit turned somewhere in its payload."""
    value = bytearray(record.value)
    value[int(rng.integers(0, len(value)))] ^= 1 << int(rng.integers(0, 8))
    return replace(record, value=bytes(value))


def foreign(record: Record) -> Record:
    """The same content written by another Arrow library: another metadata version, the same columns."""
    table = pa.ipc.open_stream(record.value).read_all().replace_schema_metadata({"writer": "other"})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return replace(record, value=sink.getvalue().to_pybytes())


def weight_records() -> Iterator[Record]:
    chunk = Chunk(version=2, index=0, data=bytes(range(256)))
    manifest = Manifest(
        version=2,
        step=2,
        encoding="full",
        base_version=None,
        digest="d" * 64,
        nbytes=256,
        names=("a", "b"),
        dtypes=("float32", "bfloat16"),
        shapes=((4, 8), ()),
        chunk_partitions=(1,),
        chunk_offsets=(0,),
        chunk_sizes=(256,),
        chunk_sha256=("e" * 64,),
        created_ns=5,
    )
    whole = {"topic": f"{RUN}.weights", "offset": 0, "timestamp_ms": 5, "key": b"2"}
    value = weights.encode(manifest)
    yield Record(partition=0, headers=weights.headers(manifest, run=RUN).encode(value), value=value, **whole)  # type: ignore[arg-type]
    value = weights.encode_chunk(chunk)
    yield Record(partition=1, headers=weights.chunk_headers(chunk, run=RUN).encode(value), value=value, **whole)  # type: ignore[arg-type]


def letter_about(record: Record) -> Record:
    letter = dead_letters.from_record(record, kind="checksum", reason="bits", worker="scorer-0", time_ns=9)
    value = dead_letters.encode(letter)
    key = f"{record.topic}/{record.partition}/{record.offset}".encode()
    headers = dead_letters.headers(letter, run=RUN).encode(value)
    return Record(topic=f"{RUN}.dead-letters", partition=0, offset=4, timestamp_ms=6, key=key, headers=headers, value=value)


def all_records() -> dict[str, list[Record]]:
    """Sound records of every table, and of each topic some that nobody can use or that others wrote."""
    rng = np.random.default_rng(0)
    told = [*as_records(list(Teller(steps=2).whole())), *weight_records()]
    told.append(letter_about(flipped(told[5], rng)))
    found: dict[str, list[Record]] = {}
    for record in told:
        name = kind_of(record.topic.removeprefix(f"{RUN}."), record.partition).name
        found.setdefault(name, []).append(record)
    for records in found.values():
        one = records[0]
        bad = [flipped(one, rng) for _ in range(12)]
        bad += [foreign(one), replace(one, value=b""), replace(one, value=b"?" * 99), replace(one, headers=()), replace(one, key=None)]
        bad += [
            replace(one, headers=one.headers[:-1]),
            replace(one, headers=(*one.headers, ("x", b"\xff\x00"))),
            replace(one, value=one.value[:-8]),
        ]
        records += [replace(record, offset=1000 + number) for number, record in enumerate(bad)]
    return found


RECORDS = all_records()


def through_parquet(table: pa.Table) -> pa.Table:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    sink.seek(0)
    return pq.read_table(sink)


def back(kind: Kind, table: pa.Table, *, run: str = RUN) -> list[Record]:
    return list(whole_groups(to_records(kind, through_parquet(table), run=run), run=run))


@pytest.mark.parametrize("name", KINDS)
def test_records_of_every_topic_come_back_byte_for_byte(name: str) -> None:
    kind, records = KINDS[name], RECORDS[name]
    table = to_table(kind, records, run=RUN)
    assert table.schema == kind.schema
    assert back(kind, table) == records
    # What our own encoder wrote is not kept twice.
    assert table["raw"].null_count >= 1 and table["headers"].null_count >= 1
    assert table["raw"].null_count < len(records)


def test_many_samples_become_the_rows_that_each_alone_would_become() -> None:
    rng = np.random.default_rng(1)
    records = [sample_record(drawn(number, rng), number) for number in range(700)]
    records += [replace(flipped(records[number], rng), offset=1000 + number) for number in range(300)]
    records += [replace(foreign(records[0]), offset=2000), replace(records[1], offset=2001, headers=records[1].headers[:4])]
    rows = RolloutRows(RUN)
    rows.table(as_block(records[:50]))
    found = rows.table(as_block(records))
    assert found.equals(to_table(KINDS["rollouts"], records, run=RUN))
    assert back(KINDS["rollouts"], found) == records


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int32(), [1, None, -(2**31)]),
        (pa.float64(), [0.5, None, float("inf")]),
        (pa.string(), ["", None, "é\n"]),
        (pa.binary(), [b"\xff", None, b""]),
        (pa.timestamp("ms", tz="UTC"), [1, None, 1_700_000_000_000]),
        (HEADERS, [[{"name": "a", "value": b"1"}, {"name": "", "value": None}], None, []]),
    ],
)
def test_our_arrays_are_those_of_pyarrow(kind: pa.DataType, values: list[Any]) -> None:
    for some in (values, values[:1], values[1:2] * 9, []):
        found = array(some, kind)
        found.validate(full=True)
        assert found.equals(pa.array(some, kind))


def test_rows_without_a_record_of_a_known_shape_go_the_long_way() -> None:
    record = replace(sample_record(drawn(1, np.random.default_rng(2)), 0), value=b"?", headers=())
    table = RolloutRows(RUN).table(as_block([record]))
    assert table["problem"].to_pylist() == ["missing-header: header 'run' is missing"]
    assert back(KINDS["rollouts"], table) == [record]


def changed(table: pa.Table, row: int, change: Any) -> pa.Table:
    rows = table.to_pylist()
    change(rows[row])
    return pa.Table.from_pylist(rows, schema=table.schema)


def test_a_changed_token_makes_a_record_that_can_be_read_with_its_own_digest() -> None:
    kind, records = KINDS["groups"], RECORDS["groups"][:3]

    def change(row: dict[str, Any]) -> None:
        row["samples"][2]["token_ids"][1] = 77

    found = back(kind, changed(to_table(kind, records, run=RUN), 1, change))
    assert [found[0], found[2]] == [records[0], records[2]]
    before, after = groups.read(records[1], run=RUN), groups.read(found[1], run=RUN)
    assert after[1].samples[2].rollout.token_ids.tolist() == [0, 77, 2]
    assert after[0].sha256 not in (None, before[0].sha256)
    assert after[1].samples[1] == before[1].samples[1]


def test_a_change_in_one_part_of_a_group_changes_the_digest_in_all_of_them() -> None:
    whole = groups.decode(RECORDS["groups"][0].value)
    parts = [
        replace(RECORDS["groups"][0], offset=number, headers=headers.encode(value), value=value)
        for number, (headers, value) in enumerate(groups.encode_parts(whole, run=RUN, worker="scorer-0", max_bytes=1))
    ]
    table = to_table(KINDS["groups"], parts, run=RUN)
    assert back(KINDS["groups"], table) == parts

    def change(row: dict[str, Any]) -> None:
        row["samples"][0]["token_ids"][0] = 5

    found = back(KINDS["groups"], changed(table, 3, change))
    assert groups.read(found, run=RUN)[1].samples[3].rollout.token_ids[0] == 5
    assert len({dict(record.headers)["sha256"] for record in found}) == 1


def test_a_row_that_cannot_be_a_record_is_named() -> None:
    def change(row: dict[str, Any]) -> None:
        row["loss_mask"] = row["loss_mask"][1:]

    table = changed(to_table(KINDS["rollouts"], RECORDS["rollouts"][:3], run=RUN), 2, change)
    with pytest.raises(ValueError, match=r"rollouts partition 0 offset 2 cannot be a record: .* 2 loss mask elements"):
        back(KINDS["rollouts"], table)


@pytest.mark.parametrize("name", KINDS)
def test_under_another_id_sound_records_stay_sound_and_there_and_back_is_nothing(name: str) -> None:
    kind = KINDS[name]
    there, again = Identity(run=RUN, becomes="other"), Identity(run="other", becomes=RUN)
    for record in RECORDS[name]:
        moved = there.apply(kind, record)
        assert RUN.encode() not in (moved.key or b"") and dict(moved.headers).get("run") != RUN.encode()
        if to_table(kind, [record], run=RUN)["problem"][0].as_py() is None:
            assert to_table(kind, [moved], run="other")["problem"][0].as_py() is None
            if to_table(kind, [record], run=RUN)["raw"][0].as_py() is None and record.key is not None:
                assert again.apply(kind, moved) == record


def test_gaps_become_marks_of_transactions_and_aborted_ones() -> None:
    one = RECORDS["ledger"][0]
    at = [replace(one, offset=offset) for offset in (0, 1, 3, 4, 9)]
    assert list(steps(at, begin=0, end=11)) == [
        Step(together=(at[0], at[1])),
        Step(plain=(at[2], at[3]), aborted=3),
        Step(together=(at[4],)),
    ]
    assert list(steps([], begin=2, end=2)) == []
    assert list(steps([], begin=0, end=5)) == [Step(aborted=4)]
    assert first_kept(7, 8, 20) == 8
    assert first_kept(7, 9, 20) == 7
    assert first_kept(7, None, 8) == 8
