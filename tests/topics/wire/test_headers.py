"""Routing facts are read from headers alone, exactly, and anything odd is refused with its kind."""

import math
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.topics.wire import checked
from penstock.topics.wire.errors import KINDS, Unusable
from penstock.topics.wire.headers import MAX_HEADER_BYTES, Headers, match, read_headers
from penstock.topics.wire.record import RawHeaders
from tests.support import strategies

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
    worker=st.none() | st.from_regex(checked.NAME, fullmatch=True),
    attempt=COUNT,
    part=COUNT,
    parts=COUNT,
    samples=COUNT,
    tokens=COUNT,
    reward_mean=st.none() | st.floats(allow_nan=False),
    sha256=st.none() | WORD,
    sample_tokens=st.none() | st.lists(st.tuples(*[st.integers(0, 10**18 - 1)] * 2), min_size=1, max_size=4).map(tuple),
)
PLAIN = (("run", b"r"), ("schema", b"rollouts/1"))
KNOWN = {name for name, _ in Headers(**dict.fromkeys(Headers.__dataclass_fields__, "0")).encode(b"")} - {"crc32"}


def signed(raw: RawHeaders, value: bytes = b"") -> RawHeaders:
    """With the checksum that the document of the topics describes, whatever else is wrong."""
    lines = b"".join(b"\n" + name.encode() + b"=" + (text or b"") for name, text in dict(raw).items() if name in KNOWN)
    return (*raw, ("crc32", b"%08x" % zlib.crc32(value + lines)))


def refused(raw, **required):
    found = strategies.refused(read_headers, signed(raw), b"", run="r", schema="rollouts/1", **required)
    assert found.kind in KINDS
    return found.kind


@given(headers=HEADERS, value=st.binary(max_size=30))
def test_headers_come_back_as_they_were(headers, value):
    raw = headers.encode(value)
    assert read_headers(raw, value, run=headers.run, schema=headers.schema) == headers
    assert all(text.isascii() for _, text in raw)
    assert [name for name, _ in raw][:2] == ["run", "schema"]
    assert raw == signed(raw[:-1], value)


@settings(max_examples=100)
@given(
    raw=st.lists(st.tuples(st.sampled_from(["run", "schema", "group", "reward-mean", "worker", "x"]), st.binary(max_size=8)), max_size=5)
)
def test_arbitrary_headers_raise_nothing_but_unusable(raw):
    try:
        read_headers(signed((*PLAIN[:1], *raw)), b"", run="r", schema="rollouts/1")
    except Unusable as error:
        assert error.kind in KINDS  # noqa: PT017


def test_names_on_the_wire_have_dashes_and_the_mean_is_exact():
    raw = dict(Headers(run="r", schema="s", policy_version_min=0, reward_mean=0.1 + 0.2).encode(b""))
    assert raw == {
        "run": b"r",
        "schema": b"s",
        "policy-version-min": b"0",
        "reward-mean": b"0.30000000000000004",
        "crc32": b"%08x" % zlib.crc32(b"\nrun=r\nschema=s\npolicy-version-min=0\nreward-mean=0.30000000000000004"),
    }


def test_a_record_of_another_run_is_refused_before_anything_else_of_it_is_read():
    assert refused((("run", b"other"), ("schema", b"what/9"), ("group", b"x"))) == "foreign-run"


def test_another_schema_is_refused():
    assert refused((("run", b"r"), ("schema", b"rollouts/0"), ("group", b"x"))) == "schema-version"
    assert refused((("run", b"r"), ("schema", b"samples/2"), ("group", b"x"))) == "schema-version"


@pytest.mark.parametrize("missing", ["run", "schema", "group"])
def test_a_missing_header_is_named(missing):
    raw = tuple(pair for pair in (*PLAIN, ("group", b"1")) if pair[0] != missing)
    with pytest.raises(Unusable, match=f"'{missing}' is missing") as error:
        read_headers(signed(raw), b"", run="r", schema="rollouts/1", required={"group"})
    assert error.value.kind == "missing-header"


WRONG = {
    "group": (b"", b"-1", b"+1", b"01", b"1 ", b"1_0", b"1.0", b"9223372036854775808", b"9" * 400, "١".encode(), b"\xb2", None),
    "reward-mean": (b"", b"nan ", b"0x1p3", b"1_0.0", b"infinity", b"."),
    "sample-tokens": (b"", b",", b"1", b"1:2,", b"01:2", b"1:-2", b"1:2;3:4", b"1:2:3", b"9" * 19 + b":1"),
    "worker": ("é".encode(), b"x" * (MAX_HEADER_BYTES + 1), None),
    "run": (b"r",),  # a second one
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_header_that_cannot_be_right_is_a_bad_header(name, value):
    assert refused((*PLAIN, (name, value))) == "bad-header"


def test_headers_of_other_names_are_left_alone():
    foreign = (("traceparent", b"\xff" * 5000), ("traceparent", b""))
    found = read_headers((*foreign, *signed(PLAIN)), b"", run="r", schema="rollouts/1")
    assert found == Headers(run="r", schema="rollouts/1")


WHOLE = Headers(run="r", schema="rollouts/1", group=3, sample=1, policy_version_min=4, outcome="stop", worker="w", reward_mean=0.5)


@pytest.mark.parametrize("part", ["payload", *dict(WHOLE.encode(b""))])
@given(data=st.data())
def test_one_bit_turned_anywhere_in_payload_or_headers_is_noticed(part, data):
    raw, value = list(WHOLE.encode(b"payload")), b"payload"
    place = [name for name, _ in raw].index(part) if part != "payload" else None
    spoiled = bytearray(value if place is None else raw[place][1])
    spoiled[data.draw(st.integers(0, len(spoiled) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    if place is None:
        value = bytes(spoiled)
    else:
        raw[place] = (part, bytes(spoiled))
    kinds = {"run": ("foreign-run", "bad-header"), "schema": ("schema-version", "bad-header", "checksum")}
    found = strategies.refused(read_headers, tuple(raw), value, run="r", schema="rollouts/1")
    assert found.kind in kinds.get(part, ("checksum",))


def test_a_header_taken_from_added_to_or_moved_between_records_is_noticed():
    raw = WHOLE.encode(b"payload")
    other = Headers(run="r", schema="rollouts/1", group=4, sample=1).encode(b"another")
    renamed = tuple(("smaple" if name == "sample" else name, text) for name, text in raw)
    for wrong, value in ((raw, b"another"), (other, b"payload"), (raw[:2] + raw[3:], b"payload"), (renamed, b"payload")):
        with pytest.raises(Unusable, match="'crc32' is") as error:
            read_headers(wrong, value, run="r", schema="rollouts/1")
        assert error.value.kind == "checksum"
    with pytest.raises(Unusable, match="'crc32' occurs twice"):
        read_headers((*raw, raw[-1]), b"payload", run="r", schema="rollouts/1")


@pytest.mark.parametrize("said", [b"", b"0", b"\xff" * 8, b"0x000000", None])
def test_a_checksum_that_is_none_is_refused(said):
    found = strategies.refused(read_headers, (*PLAIN, ("crc32", said)), b"", run="r", schema="rollouts/1")
    assert found.kind in ("checksum", "missing-header")


def test_a_record_without_a_checksum_is_refused():
    with pytest.raises(Unusable, match="'crc32' is missing") as error:
        read_headers(PLAIN, b"", run="r", schema="rollouts/1")
    assert error.value.kind == "missing-header"


def test_a_header_may_be_absent_and_must_not_contradict_the_payload():
    found = Headers(run="r", schema="s", group=3, reward_mean=math.nan)
    match(found, group=3, sample=9, reward_mean=math.nan)
    for facts in ({"group": 4}, {"group": None}, {"reward_mean": 0.5}):
        with pytest.raises(Unusable, match="the payload has") as error:
            match(found, **facts)
        assert error.value.kind == "mismatch"
