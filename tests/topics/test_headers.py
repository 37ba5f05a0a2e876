"""Routing facts are read from headers alone, exactly, and anything odd is refused with its kind."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topics.errors import KINDS, Unusable
from topics.headers import MAX_HEADER_BYTES, Headers, match, read_headers

COUNT = st.none() | st.integers(0, 2**63 - 1)
WORD = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)
HEADERS = st.builds(
    Headers,
    run=WORD,
    schema=WORD,
    group=COUNT,
    sample=COUNT,
    policy_version_min=COUNT,
    policy_version_max=COUNT,
    outcome=st.none() | WORD,
    worker=st.none() | WORD,
    attempt=COUNT,
    part=COUNT,
    parts=COUNT,
    samples=COUNT,
    tokens=COUNT,
    reward_mean=st.none() | st.floats(allow_nan=False),
    sha256=st.none() | WORD,
)
PLAIN = (("run", b"r"), ("schema", b"rollouts/1"))


def refused(raw, **required):
    with pytest.raises(Unusable) as error:
        read_headers(raw, run="r", schema="rollouts/1", **required)
    assert error.value.kind in KINDS
    assert "\n" not in str(error.value)
    return error.value.kind


@settings(deadline=None, derandomize=True)
@given(headers=HEADERS)
def test_headers_come_back_as_they_were(headers):
    raw = headers.encode()
    assert read_headers(raw, run=headers.run, schema=headers.schema) == headers
    assert all(value.isascii() for _, value in raw)
    assert [name for name, _ in raw][:2] == ["run", "schema"]


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    raw=st.lists(st.tuples(st.sampled_from(["run", "schema", "group", "reward-mean", "worker", "x"]), st.binary(max_size=8)), max_size=5)
)
def test_arbitrary_headers_raise_nothing_but_unusable(raw):
    try:
        read_headers((*PLAIN[:1], *raw), run="r", schema="rollouts/1")
    except Unusable as error:
        assert error.kind in KINDS  # noqa: PT017


def test_names_on_the_wire_have_dashes_and_the_mean_is_exact():
    raw = dict(Headers(run="r", schema="s", policy_version_min=0, reward_mean=0.1 + 0.2).encode())
    assert raw == {"run": b"r", "schema": b"s", "policy-version-min": b"0", "reward-mean": b"0.30000000000000004"}


def test_a_record_of_another_run_is_refused_before_anything_else_of_it_is_read():
    assert refused((("run", b"other"), ("schema", b"what/9"), ("group", b"x"))) == "foreign-run"


def test_another_schema_version_is_refused():
    assert refused((("run", b"r"), ("schema", b"rollouts/2"), ("group", b"x"))) == "schema-version"


@pytest.mark.parametrize("missing", ["run", "schema", "group"])
def test_a_missing_header_is_named(missing):
    raw = tuple(pair for pair in (*PLAIN, ("group", b"1")) if pair[0] != missing)
    with pytest.raises(Unusable, match=f"'{missing}' is missing") as error:
        read_headers(raw, run="r", schema="rollouts/1", required={"group"})
    assert error.value.kind == "missing-header"


@pytest.mark.parametrize(
    "value", [b"", b"-1", b"+1", b"01", b"1 ", b"1_0", b"1.0", b"9223372036854775808", b"9" * 400, "١".encode(), b"\xb2", None]
)
def test_a_number_that_is_none_is_a_bad_header(value):
    assert refused((*PLAIN, ("group", value))) == "bad-header"


@pytest.mark.parametrize("value", [b"", b"nan ", b"0x1p3", b"1_0.0", b"infinity", b"."])
def test_a_mean_that_is_no_number_is_a_bad_header(value):
    assert refused((*PLAIN, ("reward-mean", value))) == "bad-header"


@pytest.mark.parametrize(
    "extra",
    [("worker", "é".encode()), ("worker", b"x" * (MAX_HEADER_BYTES + 1)), ("run", b"r"), ("worker", None)],
    ids=["not ASCII", "too long", "twice", "no value"],
)
def test_a_header_that_cannot_be_right_is_a_bad_header(extra):
    assert refused((*PLAIN, extra)) == "bad-header"


def test_headers_of_other_names_are_left_alone():
    found = read_headers((*PLAIN, ("traceparent", b"\xff" * 5000), ("traceparent", b"")), run="r", schema="rollouts/1")
    assert found == Headers(run="r", schema="rollouts/1")


def test_a_header_may_be_absent_and_must_not_contradict_the_payload():
    found = Headers(run="r", schema="s", group=3, reward_mean=math.nan)
    match(found, group=3, sample=9, reward_mean=math.nan)
    for facts in ({"group": 4}, {"group": None}, {"reward_mean": 0.5}):
        with pytest.raises(Unusable, match="the payload says") as error:
            match(found, **facts)
        assert error.value.kind == "mismatch"
