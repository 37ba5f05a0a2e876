"""Columns: a value reaches a reward function as the data has it, or not at all and with its name; no function sees another's changes."""

import json
import math
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.pipeline.data.open import open_dataset
from penstock.pipeline.data.read_files import DataError, Fields, make_row
from penstock.pipeline.rewards import scoring as reward_child
from penstock.pipeline.rewards.functions import resolve
from penstock.pipeline.rewards.values import RewardError

SEEN = """
import json

def keep(completions, **columns):
    for name in ("trainer_state", "log_extra", "log_metric"):
        del columns[name]
    with open({path!r}, "w") as file:
        json.dump(columns, file)
    return [1.0] * len(completions)
"""
CHANGES = """
def spoil(value):
    if isinstance(value, dict):
        for key in list(value):
            spoil(value.pop(key))
    elif isinstance(value, list):
        while value:
            spoil(value.pop())

def first(prompts, completions, completion_ids, log_extra, log_metric, **columns):
    count, seen = len(completions), repr([prompts, completions, completion_ids, sorted(columns.items(), key=str)])
    state = columns.pop("trainer_state")
    for argument in (prompts, completions, completion_ids, *columns.values()):
        for value, text in [(each, repr(each)) for each in argument] if isinstance(argument, list) else ():
            assert repr(value) == text, "two completions share a value"
            spoil(value)
        spoil(argument)
    return [float(len(seen))] * count

second = first
"""
NUMBERS = (pa.int8(), pa.uint64(), pa.int64(), pa.float32(), pa.float64(), pa.decimal128(12, 3), pa.decimal256(40, 0))
TEXTS = (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()), pa.json_())
TIMES = (pa.date32(), pa.time32("ms"), pa.time64("us"), pa.timestamp("us"), pa.timestamp("ns"), pa.timestamp("ms", tz="UTC"))
OTHERS = (pa.binary(), pa.large_binary(), pa.binary(4), pa.duration("us"), pa.uuid(), pa.null(), pa.bool_(), pa.bool8())
TYPES = st.recursive(
    st.sampled_from([*NUMBERS, *TEXTS[:3], *TIMES, pa.binary(), pa.bool_()]),
    lambda inner: st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        st.tuples(inner, inner).map(lambda pair: pa.struct({"a": pair[0], "b": pair[1]})),
        inner.map(lambda value: pa.map_(pa.string(), value)),
    ),
    max_leaves=4,
) | st.sampled_from([*TEXTS, *OTHERS])


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Python values that Arrow holds in this type, null among them."""
    if pa.types.is_struct(kind):
        made = st.fixed_dictionaries({field.name: values(field.type) for field in kind})
    elif pa.types.is_map(kind):
        made = st.dictionaries(st.text(max_size=3), values(kind.item_type), max_size=3).map(lambda each: list(each.items()))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        made = st.lists(values(kind.value_type), max_size=3)
    else:
        made = _single(kind)
    return st.none() | made


def _single(kind: pa.DataType) -> st.SearchStrategy[Any]:
    is_ = pa.types
    if is_.is_integer(kind):
        return st.integers(*((0, 2**64 - 1) if kind == pa.uint64() else (-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1)))
    if is_.is_floating(kind):
        return st.floats(width=kind.bit_width)
    if is_.is_decimal(kind):
        return st.integers(-(10**8), 10**8).map(lambda number: Decimal(number).scaleb(-kind.scale))
    if is_.is_date(kind):
        return st.dates()
    if is_.is_time(kind):
        return st.times().map(lambda each: each.replace(microsecond=0))
    if is_.is_timestamp(kind):
        return st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1)).map(lambda each: each.replace(microsecond=0))
    if is_.is_duration(kind):
        return st.integers(0, 10**6)
    if kind in (pa.bool_(), pa.bool8()):
        return st.booleans() if kind == pa.bool_() else st.integers(0, 1)
    if kind == pa.null():
        return st.none()
    if kind == pa.json_():
        return st.just('{"a": 1}')
    if kind in (pa.binary(), pa.large_binary(), pa.binary(4), pa.uuid()):
        return st.binary(min_size=16, max_size=16) if kind == pa.uuid() else st.binary(min_size=4, max_size=4)
    return st.text(st.characters(codec="utf-8"), max_size=4)


def same(value: Any, got: Any) -> bool:
    """Whether a reward got the value: numbers as numbers, not-a-number as None, times as ISO text, and all else as it is."""
    if isinstance(value, float) and math.isnan(value):
        return got is None
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return type(got) in (int, float) and Decimal(got if isinstance(got, int) else repr(got)) == Decimal(str(value))
    if isinstance(value, date | time):
        return isinstance(got, str) and got == value.isoformat()
    if isinstance(value, dict):
        return isinstance(got, dict) and set(value) == set(got) and all(same(inner, got[key]) for key, inner in value.items())
    if isinstance(value, list):
        return isinstance(got, list) and len(value) == len(got) and all(same(inner, each) for inner, each in zip(value, got, strict=True))
    return type(value) is type(got) and value == got


def fits(value: Any) -> bool:
    """Whether JSON holds the value."""
    if isinstance(value, dict):
        return all(map(fits, value.values()))
    if isinstance(value, list):
        return all(map(fits, value))
    if isinstance(value, float):
        return not math.isinf(value)
    return value is None or isinstance(value, str | int | Decimal | date | time)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns")
    (folder / "seen.py").write_text(SEEN.format(path=str(folder / "seen.json")))
    (folder / "changes.py").write_text(CHANGES)
    return folder


def seen_by_a_reward(folder: Path, columns: dict[str, Any]) -> dict[str, Any]:
    """What the function of a reward child gets as columns, for two completions."""
    judge = reward_child.child(reward_child.spec(["seen.py:keep"], base_dir=folder, concurrency=1))
    judge(json.loads(json.dumps(reward_child.payload(["x", "y"], prompt="p", messages=None, columns=columns), allow_nan=False)))
    seen: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return seen


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), kind=TYPES)
def test_a_parquet_column_of_any_type_reaches_a_reward_unchanged_or_is_named(folder: Path, data: st.DataObject, kind: pa.DataType) -> None:
    column = data.draw(st.lists(values(kind), min_size=1, max_size=3))
    storage = pa.array(column, kind.storage_type).cast(kind) if isinstance(kind, pa.BaseExtensionType) else pa.array(column, kind)
    pq.write_table(pa.table({"prompt": ["p"] * len(column), "value": storage}), folder / "rows.parquet")
    for row, expected in zip(open_dataset(f"{folder}/rows.parquet"), storage.to_pylist(maps_as_pydicts="strict"), strict=True):
        if fits(expected):
            assert not row.not_json
            assert all(same(expected, got) for got in seen_by_a_reward(folder, row.columns)["value"])
        else:
            assert (set(row.not_json), row.columns) == ({"value"}, {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_infinity=False) | st.text(st.characters(codec="utf-8"), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(value=JSON)
def test_a_value_of_a_json_line_reaches_a_reward_unchanged(folder: Path, value: Any) -> None:
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "p", "answer": "a", "value": value}) + "\n")
    seen = seen_by_a_reward(folder, open_dataset(f"{folder}/rows.jsonl")[0].columns)
    assert all(same(value, got) for got in seen["value"])
    assert seen["answer"] == ["a", "a"]


@given(columns=st.dictionaries(st.sampled_from(["answer", "level", "tests", "prompts", "completion_ids", "columns"]), JSON, max_size=4))
def test_what_a_function_does_to_its_arguments_no_other_function_or_completion_sees(folder: Path, columns: dict[str, Any]) -> None:
    found, before = resolve(["changes.py:first", "changes.py:second"], base_dir=folder), json.dumps(columns)
    messages = [{"role": "user", "content": "hi"}]
    score = found.score(["x", "y"], prompt="p", messages=messages, columns=columns, completion_ids=[[1, 2], [3]])
    assert all(first == second for first, second in score.components)
    assert json.dumps(columns) == before
    assert messages == [{"role": "user", "content": "hi"}]


FACTS = ("prompts", "completions", "completion_ids", "completion_lengths", "max_completion_length", "environment_reward")


@pytest.mark.parametrize("name", FACTS)
def test_a_column_with_the_name_of_a_fact_is_accepted_and_found_under_columns(folder: Path, name: str) -> None:
    (folder / "own.jsonl").write_text(json.dumps({"prompt": "p", "answer": "a", name: ["old"]}) + "\n")
    row = open_dataset(f"{folder}/own.jsonl")[0]
    seen, plain = seen_by_a_reward(folder, row.columns), seen_by_a_reward(folder, {"answer": "a"})
    assert seen.get(name) == plain.get(name)
    assert seen["columns"] == [{name: ["old"]}] * 2
    assert resolve(["seen.py:keep"], base_dir=folder).facts_named_by(row.columns) == [name]


def test_a_function_that_needs_a_column_of_bytes_is_named_with_the_column(folder: Path) -> None:
    (folder / "sees.py").write_text("def sees(completions, image):\n    return [1.0] * len(completions)\n")
    found = resolve(["sees.py:sees"], base_dir=folder)
    refusal = r"sees needs the column 'image', .*: that column contains bytes, which JSON cannot represent; store"
    with pytest.raises(RewardError, match=refusal):
        found.check({"answer": "a"}, not_json={"image": "bytes"})


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (b"x", "bytes"),
        (float("inf"), "an infinite number"),
        ({1: "a"}, "a dict with keys of type int"),
        ({"a", "b"}, "set"),
        (10**5000, "an integer of more than 4,000 digits"),
        (Decimal("0.12345678901234567890123"), "a decimal with more digits than a float"),
        ([[{"x": [object()]}]], "object"),
    ],
    ids=["bytes", "infinity", "keys", "set", "integer", "decimal", "object"],
)
def test_what_json_cannot_hold_is_told_by_its_kind(value: Any, what: str) -> None:
    row = make_row({"prompt": "p", "value": value, "answer": value}, index=0, origin="d:1", fields=Fields())
    assert row.not_json == {"value": what, "answer": what}


def test_a_value_nested_too_deeply_is_told() -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    assert make_row({"prompt": "p", "v": nested}, index=0, origin="d:1", fields=Fields()).not_json == {"v": "values nested too deeply"}


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (np.datetime64("2020-01-02T03:04:05", "ns"), "2020-01-02T03:04:05"),
        (np.array(["2020-01-02T03:04:05", "NaT"], "datetime64[ns]"), ["2020-01-02T03:04:05", None]),
        (np.datetime64("2020-01-02"), "2020-01-02"),
        (np.datetime64("NaT"), None),
        (np.array([{"a": 1}, None], dtype=object), [{"a": 1}, None]),
        (np.float64("nan"), None),
        (np.int64(2**62), 2**62),
    ],
)
def test_a_numpy_value_of_an_own_function_is_what_it_stands_for(value: Any, got: Any) -> None:
    assert make_row({"prompt": "p", "x": value}, index=0, origin="rows", fields=Fields()).columns["x"] == got


@pytest.mark.parametrize("value", [np.timedelta64(5, "ns"), np.timedelta64(5, "s")])
def test_a_duration_of_numpy_is_told_by_its_kind(value: Any) -> None:
    row = make_row({"prompt": "p", "x": value}, index=0, origin="rows", fields=Fields())
    assert ("x" not in row.columns) and row.not_json == {"x": "timedelta"}


@pytest.mark.parametrize("nested", [False, True])
def test_text_of_parquet_that_is_not_utf_8_is_told(tmp_path: Path, nested: bool) -> None:
    latin = pa.array(["Zürich".encode("latin-1")])
    text = pa.Array.from_buffers(pa.string(), 1, latin.buffers())
    table = pa.table({"prompt": ["p"], "x": pa.ListArray.from_arrays([0, 1], text) if nested else text})
    pq.write_table(table, tmp_path / "rows.parquet")
    assert open_dataset(f"{tmp_path}/rows.parquet")[0].not_json == {"x": "text that is not UTF-8"}
    pq.write_table(table.rename_columns(["y", "prompt"]), tmp_path / "rows.parquet")
    refusal = r"rows.parquet:1: field 'prompt' contains text that is not UTF-8; expected text or a list of messages"
    with pytest.raises(DataError, match=refusal):
        _ = open_dataset(f"{tmp_path}/rows.parquet")[0]
