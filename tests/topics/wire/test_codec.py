"""Every payload survives the way there and back, any Arrow library reads it, and no bytes whatever bring a reader down."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.topics import groups, ledger, rollouts, weights
from penstock.topics.wire.errors import Unusable
from tests.support.strategies import EXAMPLES, RECORDS, a_group, a_rollout, refused

NAMES = sorted(RECORDS)
QUICK = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
HUGE = [value.to_bytes(8, "little", signed=True) for value in (-1, 2**31 - 1, 2**40, 2**62, -(2**63), 0)]


def stream(table, options=None):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def table_of(name):
    return pa.ipc.open_stream(RECORDS[name][0](EXAMPLES[name])).read_all()


@pytest.mark.parametrize("name", NAMES)
@QUICK
@given(data=st.data())
def test_a_record_comes_back_as_it_was_and_a_foreign_reader_finds_it_whole(name, data):
    encode, decode, records, codec = RECORDS[name]
    record = data.draw(records)
    value = encode(record)
    assert decode(value) == record
    assert decode(memoryview(value)) == record
    table = pa.ipc.open_stream(value).read_all()
    table.validate(full=True)
    absent = {"reward_ns", "support", "metrics"} - set(table.schema.names)  # columns without any value are left out
    assert table.schema.names == [name for name in codec.schema.names if name not in absent]
    assert table.num_rows == (len(record) if name == "several samples" else 1)
    assert decode(stream(table)) == record


@pytest.mark.parametrize("name", NAMES)
@QUICK
@given(value=st.binary(max_size=300))
def test_arbitrary_bytes_are_undecodable(name, value):
    assert refused(RECORDS[name][1], value).kind == "undecodable"


def mutated(value, rng):
    spoiled = bytearray(value)
    where = rng.randrange(len(spoiled) - 8)
    match rng.randrange(5):
        case 0:
            for _ in range(rng.randint(1, 8)):
                spoiled[rng.randrange(len(spoiled))] ^= 1 << rng.randrange(8)
        case 1:
            del spoiled[where:]
        case 2:
            where -= where % 4
            spoiled[where : where + 8] = rng.choice(HUGE)
        case 3:
            spoiled[where:where] = rng.randbytes(rng.randint(1, 16))
        case 4:
            source, size = rng.randrange(len(spoiled)), rng.randint(1, 64)
            spoiled[where : where + size] = spoiled[source : source + size]
    return bytes(spoiled)


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_payload_is_read_or_undecodable_and_never_anything_else(name):
    encode, decode, _, codec = RECORDS[name]
    ours = encode(EXAMPLES[name])
    foreign = stream(table_of(name).append_column("extra", pa.array([1] * len(table_of(name)))))
    head = len(codec.schema.serialize())
    rng = random.Random(20240)
    refused = 0
    for _ in range(400):
        value = rng.choice([lambda: ours[:head] + mutated(ours[head:], rng), lambda: mutated(ours, rng), lambda: mutated(foreign, rng)])()
        try:
            decode(value)
        except Unusable as error:
            refused += 1
            assert error.kind == "undecodable"  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017
    assert refused > 200


@pytest.mark.parametrize("name", NAMES)
def test_five_megabytes_of_zeros_are_undecodable(name):
    decode, codec = RECORDS[name][1], RECORDS[name][3]
    for value in (bytes(5 << 20), codec.schema.serialize().to_pybytes() + bytes(5 << 20), b""):
        with pytest.raises(Unusable, match="payload"):
            decode(value)


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_cut_off_anywhere_in_its_batch_is_undecodable(name):
    encode, decode, _, codec = RECORDS[name]
    value = encode(EXAMPLES[name])
    for end in range(len(codec.schema.serialize()), len(value) - 8, 7):
        refused(decode, value[:end])


@pytest.mark.parametrize("name", NAMES)
def test_the_end_marker_may_be_missing_and_a_second_batch_may_not_be_there(name):
    encode, decode, _, _ = RECORDS[name]
    value = encode(EXAMPLES[name])
    assert decode(value[:-8]) == EXAMPLES[name]
    with pytest.raises(Unusable, match="record batch"):
        decode(value[:-8] + value[len(pa.ipc.open_stream(value).schema.serialize()) :])


@pytest.mark.parametrize("name", NAMES)
def test_a_compressed_body_is_refused(name):
    for codec in ("zstd", "lz4"):
        with pytest.raises(Unusable, match="compressed"):
            RECORDS[name][1](stream(table_of(name), pa.ipc.IpcWriteOptions(compression=codec)))


@pytest.mark.parametrize("name", NAMES)
def test_unknown_nullable_columns_are_dropped_whatever_their_type_and_order(name):
    table = table_of(name)
    extra = pa.array(["x"] * len(table)).dictionary_encode()
    wider = pa.table({"first": pa.array([[1.5]] * len(table)), **{column: table[column] for column in table.column_names[::-1]}})
    assert RECORDS[name][1](stream(wider)) == EXAMPLES[name]
    with pytest.raises(Unusable, match="one record batch"):
        RECORDS[name][1](stream(table.append_column("extra", extra)))


def test_what_a_compressed_body_claims_to_hold_is_never_allocated():
    chunk = weights.Chunk(version=2, index=1, data=bytes(1_234_567))
    bomb = bytearray(stream(pa.ipc.open_stream(weights.encode_chunk(chunk)).read_all(), pa.ipc.IpcWriteOptions(compression="zstd")))
    size = (1_234_567).to_bytes(8, "little")
    place = bomb.rindex(size)
    bomb[place : place + 8] = (1 << 44).to_bytes(8, "little")
    with pytest.raises(Unusable, match="compressed"):
        weights.decode_chunk(bytes(bomb))


def test_an_unknown_column_that_may_not_be_null_is_refused():
    table = table_of("runs").append_column(pa.field("must", pa.int64(), nullable=False), pa.array([1]))
    with pytest.raises(Unusable, match="cannot be ignored"):
        RECORDS["runs"][1](stream(table))


def test_missing_nullable_columns_read_as_null_and_others_are_refused():
    table = table_of("groups")
    assert groups.decode(stream(table.drop_columns(["reason", "reward_ns"]))) == a_group()
    with pytest.raises(Unusable, match="'prompt' is missing"):
        groups.decode(stream(table.drop_columns(["prompt"])))


def test_a_column_of_another_type_is_refused():
    table = table_of("rollouts")
    for column, values in {"group": pa.array([3], pa.int32()), "worker": pa.array([b"x"]), "token_ids": pa.array([[1]])}.items():
        position = table.column_names.index(column)
        with pytest.raises(Unusable, match=column):
            rollouts.decode(stream(table.set_column(position, column, values)))


def test_a_later_version_may_add_and_a_foreign_one_leave_out_nullable_fields_inside_samples():
    table = table_of("groups")
    rows = table["samples"].combine_chunks()
    samples = rows.values
    kept = {field.name: samples.field(field.name) for field in samples.type if field.name not in ("turns", "media")}
    changed = pa.StructArray.from_arrays([*kept.values(), pa.array([1, 2, 3])], names=[*kept, "extra"])
    lists = pa.ListArray.from_arrays(rows.offsets, changed)
    other = table.set_column(table.column_names.index("samples"), "samples", lists)
    assert groups.decode(stream(other)) == EXAMPLES["groups"]


def test_nulls_where_none_may_be_are_refused():
    table = table_of("rollouts")
    for column, values in {"group": pa.array([None], pa.int64()), "token_ids": pa.array([[None, 1]], pa.list_(pa.int32()))}.items():
        position = table.column_names.index(column)
        with pytest.raises(Unusable, match="null, which is not allowed"):
            rollouts.decode(stream(table.set_column(position, column, values)))


@pytest.mark.parametrize("rows", [0, 2])
def test_a_payload_with_another_number_of_rows_than_one_is_refused(rows):
    table = pa.concat_tables([table_of("runs")] * 2).combine_chunks().slice(0, rows)
    with pytest.raises(Unusable, match=r"2 rows|got schema"):
        RECORDS["runs"][1](stream(table))


def test_a_list_that_does_not_begin_at_its_first_element_is_read_right():
    table = table_of("weights")
    names = pa.ListArray.from_arrays(pa.array([1, 3], pa.int32()), pa.array(["unused", "a", "b"]))
    assert weights.decode(stream(table.set_column(table.column_names.index("names"), "names", names))) == EXAMPLES["weights"]


def test_arrays_of_a_decoded_record_cannot_be_changed_by_accident():
    rollout = rollouts.decode(rollouts.encode(a_rollout()))
    with pytest.raises(ValueError, match="read-only"):
        rollout.token_ids[0] = 1


def test_a_logprob_is_null_on_the_wire_and_nan_in_memory_where_the_model_did_not_draw():
    rollout = a_rollout(tokens=4)
    rollout.behaviour_logprobs[1] = np.nan
    rollout.loss_mask[1] = False
    value = rollouts.encode(rollout)
    assert pa.ipc.open_stream(value).read_all()["behaviour_logprobs"][0].as_py()[1] is None
    assert np.isnan(rollouts.decode(value).behaviour_logprobs[1])


def broken_rollouts():
    def changed(**fields):
        known = {name: getattr(a_rollout(tokens=4), name) for name in rollouts.Rollout.__dataclass_fields__}
        return rollouts.Rollout(**{**known, **fields})

    logprobs = np.array([0, np.nan, 0, 0], np.float32)
    yield changed(token_ids=np.arange(5, dtype=np.int32))
    yield changed(span_starts=np.array([1, 2], np.int32))
    yield changed(span_starts=np.array([0, 5], np.int32))
    yield changed(span_starts=np.empty(0, np.int32), span_versions=np.empty(0, np.int32))
    yield changed(behaviour_logprobs=logprobs)
    yield changed(finish="because")


@pytest.mark.parametrize("rollout", broken_rollouts())
def test_a_sample_whose_arrays_do_not_fit_together_is_neither_written_nor_read(rollout, monkeypatch):
    with pytest.raises(ValueError, match="group 3 sample 1"):
        rollouts.encode(rollout)
    monkeypatch.setattr("penstock.topics.rollouts.flaw", lambda *_, **__: None)
    value = rollouts.encode(rollout)
    monkeypatch.undo()
    refused(rollouts.decode, value)


def test_a_manifest_whose_chunks_do_not_make_its_bytes_is_refused():
    fields = {name: getattr(EXAMPLES["weights"], name) for name in weights.Manifest.__dataclass_fields__}
    with pytest.raises(ValueError, match="in all, expected 31"):
        weights.encode(weights.Manifest(**{**fields, "nbytes": 31}))


def test_a_kind_nobody_knows_is_undecodable():
    with pytest.raises(Unusable, match="kind is 'what'"):
        ledger.decode(ledger.encode(ledger.Entry(seq=0, kind="what", time_ns=0)))  # type: ignore[arg-type]


def test_a_float_is_not_cut_to_fit_a_column_of_integers():
    with pytest.raises(TypeError):
        ledger.encode(ledger.Entry(seq=0, kind="stale", time_ns=1.5))  # type: ignore[arg-type]


def test_a_missing_value_is_not_written_where_none_may_be_null():
    with pytest.raises(ValueError, match="'digest' may not be null"):
        weights.encode(replace(EXAMPLES["weights"], digest=None))


def test_a_payload_of_the_first_encoder_is_read_and_written_the_same():
    value = (Path(__file__).parent / "group_of_the_first_encoder.arrow").read_bytes()
    assert groups.decode(value) == a_group()
    assert groups.encode(a_group()) == value
