"""Records of every topic as rows of an archive: what comes back is what was there, byte for byte, and what was changed can be read."""

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.pipeline.archive.archived_log import to_records, whole_groups
from penstock.pipeline.archive.layout import KINDS, Kind, kind_of
from penstock.pipeline.archive.relocation import GONE, Relocation, signed
from penstock.pipeline.archive.rows import _each, to_table
from penstock.topics import dead_letters, groups, ledger, rollouts, weights
from penstock.topics.rollouts import Rollout
from penstock.topics.weights import Chunk
from penstock.topics.wire.record import Record
from tests.support.a_run import RUN, RecordBuilder, as_records, outgoing, stored, with_group
from tests.support.examples import manifest_of, sample_of


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
    return sample_of(
        number // 4, number % 4, rng.integers(0, 150_000, tokens), behaviour_logprobs=logprobs, loss_mask=mask,
        span_versions=rng.integers(0, 9, spans).astype(np.int32), span_starts=starts, finish=("stop", "length", "abort")[number % 3],
        temperature=float(rng.random()), top_k=number % 2, started_ns=number, ended_ns=number + 7,
        worker=("rollout-0", "rollout-11", "r")[int(rng.integers(0, 3))],
    )  # fmt: skip


def sample_record(sample: Rollout, offset: int) -> Record:
    return stored(outgoing(rollouts, sample, partition=3, key=b"%d" % sample.group), offset, timestamp_ms=1_700_000_000_000 + offset)


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
    manifest = manifest_of(2, names=("a", "b"), dtypes=("float32", "bfloat16"), shapes=((4, 8), ()))
    first, value = stored(outgoing(weights, manifest, key=b"2"), timestamp_ms=5), weights.encode_chunk(chunk)
    yield first
    yield replace(first, partition=1, headers=weights.chunk_headers(chunk, run=RUN).encode(value), value=value)


def letter_about(record: Record) -> Record:
    letter = dead_letters.from_record(record, kind="checksum", reason="bits", worker="scorer-0", time_ns=9)
    key = f"{record.topic}/{record.partition}/{record.offset}".encode()
    return stored(outgoing(dead_letters, letter, key=key), 4, timestamp_ms=6)


def all_records() -> dict[str, list[Record]]:
    """Sound records of every table, and of each topic some that nobody can use or that others wrote."""
    rng = np.random.default_rng(0)
    built = [*as_records(RecordBuilder(steps=2).whole()), *weight_records()]
    built.append(letter_about(flipped(built[5], rng)))
    found: dict[str, list[Record]] = {}
    for record in built:
        name = kind_of(record.topic.removeprefix(f"{RUN}."), record.partition).name
        found.setdefault(name, []).append(record)
    for records in found.values():
        one = records[0]
        bad = [flipped(one, rng) for _ in range(12)]
        bad += [foreign(one), replace(one, value=b""), replace(one, value=b"?" * 99), replace(one, headers=()), replace(one, key=None)]
        bad += [replace(one, headers=one.headers[:-1]), replace(one, headers=(*one.headers, ("x", b"\xff\x00")))]
        bad.append(replace(one, value=one.value[:-8]))
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
    assert 1 <= table["raw"].null_count < len(records) and table["headers"].null_count >= 1


def test_samples_of_any_shape_come_back_byte_for_byte_and_are_not_kept_twice() -> None:
    rng = np.random.default_rng(1)
    records = [sample_record(drawn(number, rng), number) for number in range(200)]
    table = to_table(KINDS["rollouts"], records, run=RUN)
    assert table["raw"].null_count == table["headers"].null_count == len(records)
    assert back(KINDS["rollouts"], table) == records


def test_samples_by_the_thousand_are_judged_as_each_by_itself() -> None:
    rng = np.random.default_rng(3)
    sound = [sample_record(drawn(number, rng), number) for number in range(100)]
    strange = []
    for number in range(200):  # payloads of other writers, whose checksum holds
        record = flipped(sound[number % len(sound)], rng)
        if number % 2:  # somewhere among the values of the columns
            value = bytearray(sound[number % len(sound)].value)
            value[-1 - int(rng.integers(8, 900))] = int(rng.choice([0, 1, 127, 255]))
            record = replace(record, value=bytes(value))
        strange.append(replace(record, offset=1000 + number, headers=signed(record.headers, record.value)))
    for number, record in enumerate(sound[:30]):
        name = record.headers[number % len(record.headers)][0]
        headers = tuple((other, b"-1" if other == name else held) for other, held in record.headers)
        strange.append(replace(record, offset=3000 + number, headers=signed(headers, record.value)))
    records = [*sound, *strange]
    rng.shuffle(records)  # type: ignore[arg-type]
    table = to_table(KINDS["rollouts"], records, run=RUN)
    assert table.equals(_each(KINDS["rollouts"], records, run=RUN)[0])
    assert 30 < table["raw"].null_count - len(sound) < len(strange) - 30
    assert back(KINDS["rollouts"], table) == records


def test_a_record_of_several_samples_is_a_row_for_each_of_them() -> None:
    rng = np.random.default_rng(2)
    single = sample_record(drawn(0, rng), 0)
    several = [replace(drawn(number, rng), worker="rollout-0") for number in range(4, 7)]
    together = outgoing(rollouts, *several)
    records = [single, replace(single, offset=1, key=b"1", headers=together.headers, value=together.value)]
    records += [replace(records[1], offset=2, value=together.value[:-1]), replace(single, offset=3)]
    table = to_table(KINDS["rollouts"], records, run=RUN)
    assert table["offset"].to_pylist()[:4] == [0, 1, 1, 1]
    assert table["sample"].to_pylist()[1:4] == [sample.sample for sample in several]
    assert table["raw"].null_count == 5
    assert back(KINDS["rollouts"], table) == records


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
    whole = RECORDS["groups"][0]
    parts = with_group(replace(whole, offset=0), groups.decode(whole.value), max_bytes=1)
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
    with pytest.raises(ValueError, match=r"rollouts/0@2 is damaged, no record can be restored from it: .* 2 loss mask elements"):
        back(KINDS["rollouts"], table)


def noted(relocation: Relocation, *names: str) -> Relocation:
    for name in names:
        for record in RECORDS[name]:
            relocation.note(KINDS[name], record)
    return relocation


@pytest.mark.parametrize("name", KINDS)
def test_under_another_id_sound_records_stay_sound_and_there_and_back_is_nothing(name: str) -> None:
    kind = KINDS[name]
    there, again = noted(Relocation(RUN, "other"), *KINDS), Relocation("other", RUN)
    for record in RECORDS[name]:
        moved = there.apply(kind, record)
        assert RUN.encode() not in (moved.key or b"") and dict(moved.headers).get("run") != RUN.encode()
        row = to_table(kind, [record], run=RUN)
        if row["problem"][0].as_py() is None:
            assert to_table(kind, [moved], run="other")["problem"][0].as_py() is None
            refers = name in ("weights", "ledger", "dead-letters")  # to offsets, which are others afterwards
            if not refers and row["raw"][0].as_py() is None and record.key is not None:
                assert again.apply(kind, moved) == record


def test_what_a_record_refers_to_is_named_at_its_new_offset() -> None:
    relocation = noted(Relocation(RUN, RUN), "groups")
    (manifest,), (chunk,) = [r for r in RECORDS["weights"] if r.offset == 0], [r for r in RECORDS["chunks"] if r.offset == 0]
    assert weights.decode(relocation.apply(KINDS["weights"], manifest).value).chunk_offsets == (GONE,)
    relocation.note(KINDS["chunks"], replace(chunk, offset=-9))
    relocation.note(KINDS["chunks"], chunk)
    assert weights.decode(relocation.apply(KINDS["weights"], manifest).value).chunk_offsets == (1,)
    assert relocation.offset("groups", 0, RECORDS["groups"][-1].offset) == len(RECORDS["groups"]) - 1

    for record in RECORDS["ledger"]:
        if record.offset >= 1000 or (before := ledger.decode(record.value)).kind != "step":
            continue
        after = ledger.read(relocation.apply(KINDS["ledger"], record), run=RUN)[1]
        new = [relocation.offset("groups", planned.partition, planned.offset) for planned in before.plan]
        assert [planned.offset for planned in after.plan] == new
        assert replace(before, plan=()) == replace(after, plan=())


def test_a_dead_letter_carries_the_record_as_it_is_after_an_import() -> None:
    relocation = Relocation(RUN, "other")
    refused = replace(RECORDS["rollouts"][1], offset=7)
    relocation.note(KINDS["rollouts"], replace(refused, offset=3))
    relocation.note(KINDS["rollouts"], refused)
    moved = relocation.apply(KINDS["dead-letters"], letter_about(refused))
    letter = dead_letters.read(moved, run="other")[1]
    wanted = relocation.apply(KINDS["rollouts"], refused)
    assert moved.key == b"other.rollouts/0/1"
    assert (letter.topic, letter.partition, letter.offset) == ("other.rollouts", 0, 1)
    assert (letter.key, letter.headers, letter.value) == (wanted.key, wanted.headers, wanted.value)
